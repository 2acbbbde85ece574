"""Models of the requests to `/v1/messages`. What chat requests share (sampling, speculation, grammars) is here too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from slipstream.server.anthropic.content_blocks import Turns, images_of, read_texts
from slipstream.server.describe.shape import optional
from slipstream.server.http.body import type_of, wrong
from slipstream.server.images.image_part import Placed
from slipstream.server.openai import sent, structured
from slipstream.server.openai.readers import INT32, Stops, TemplateKwargs, Texts
from slipstream.server.openai.refuse import without_refused
from slipstream.server.openai.tools import MAX_TOOLS, ToolChoice, read_tools
from slipstream.server.openai.wire import Generate, Wire

# Only inform a provider, or manage what is not there.
IGNORED = (
    *("metadata", "cache_control", "inference_geo", "speed", "diagnostics", "user_profile_id"),
    *("workspace_id", "context_management", "betas", "anthropic_version"),
)
# Refused with this reason, but for these values.
REFUSED: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "mcp_servers": ("this is not supported", ([],)),
    "container": ("this is not supported", ()),
    "fallbacks": ("this is not supported", ([],)),
}


@dataclass(frozen=True, slots=True)
class ChosenTools:
    """A `tool_choice`; `many`: whether several calls are allowed."""

    choice: ToolChoice
    many: bool


def read_custom_tools(value: Any) -> Any:
    """Tools in the form that chat templates read."""
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        return read_tools(value)
    return read_tools([_function(one) for one in value]) or None


def _function(value: Any) -> Any:
    if not isinstance(value, dict):
        raise wrong("Each tool should be an object with a name and an input_schema")
    if value.get("type") not in (None, "custom"):
        raise wrong("only tools with an input_schema (type 'custom') are supported", code="unsupported_value")
    if not isinstance(value.get("input_schema"), dict):
        raise wrong("Each tool should have a JSON schema as 'input_schema'")
    names = ("name", "description", "strict")
    function = {name: value[name] for name in names if name in value}
    return {"type": "function", "function": function | {"parameters": value["input_schema"]}}


MODES: dict[str, Literal["auto", "required", "none"]] = {"auto": "auto", "any": "required", "none": "none"}


def read_choice(value: Any) -> Any:
    if value is None:
        return None
    if type_of(value) not in (*MODES, "tool"):
        raise wrong(f"Input should be an object with one of the types {', '.join(MODES)}, tool")
    alone = value.get("disable_parallel_tool_use")
    if not isinstance(alone, bool | None):
        raise wrong("'disable_parallel_tool_use' should be true or false")
    if value["type"] != "tool":
        return ChosenTools(ToolChoice(MODES[value["type"]]), not alone)
    if not isinstance(value.get("name"), str):
        raise wrong("a choice of the type 'tool' should have the tool's name")
    return ChosenTools(ToolChoice("required", (value["name"],)), not alone)


def read_output_format(value: Any) -> Any:
    """`{"type": "json_schema", "schema": …}` as the source of a grammar."""
    if value is None:
        return None
    if type_of(value) != "json_schema":
        raise wrong("Input should be an object of the type 'json_schema'")
    return structured.read_response_format({"type": "json_schema", "schema": value.get("schema")})


class CustomTool(sent.Sent):
    name: sent.Name
    description: str | None = optional("shown to the model")
    input_schema: sent.Schema = Field(description="JSON schema of the arguments")
    type: Literal["custom"] | None = None
    strict: bool | None = optional("accepted: arguments always follow the schema where calls are forced")


class ModeChoice(sent.Sent):
    type: Literal["auto", "any", "none"] = Field(description="`any`: one of the tools must be called")
    disable_parallel_tool_use: bool | None = optional("one call at most")


class NamedChoice(sent.Sent):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = optional("one call at most")


class SchemaFormat(sent.Sent):
    type: Literal["json_schema"]
    schema_: sent.Schema | str = Field(alias="schema", description="the JSON schema")


class Thinking(Wire):
    """`thinking`: whether the model thinks before it answers, for templates that have a switch (`enable_thinking`)."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"] = Field(
        description="`adaptive` is `enabled`; `between_tools` leaves it to the template"
    )
    budget_tokens: int | None = optional(
        "the most tokens of thinking, whose end then follows", ge=0, le=INT32
    )
    display: Literal["summarized", "omitted"] | None = optional(
        "`omitted`: thinking is left out of the reply; else it is shown whole"
    )


class OutputConfig(Wire):
    """`output_config`: how hard the model should try, and what the reply must be."""

    effort: str | None = optional("passed to the template as `reasoning_effort`", max_length=32)
    format: Annotated[structured.Source | None, BeforeValidator(read_output_format, SchemaFormat | None)] = (
        optional("JSON of a schema")
    )


class CountRequest(Generate):
    """The request whose prompt is counted."""

    messages: Turns = Field(description="the conversation; a last turn of the assistant is continued")
    system: Annotated[str | None, BeforeValidator(read_texts, Texts | None)] = optional(
        "the system prompt: a text, or a list of text blocks"
    )
    stop_sequences: Stops = optional("strings that end the reply; they are not part of it")
    thinking: Thinking | None = optional("whether the model should think")
    output_config: OutputConfig | None = optional("effort, and structured output")
    tools: Annotated[
        list[dict[str, Any]] | None,
        BeforeValidator(read_custom_tools, Annotated[list[CustomTool], Field(max_length=MAX_TOOLS)] | None),
    ] = optional("tools the model may call")
    tool_choice: Annotated[
        ChosenTools | None, BeforeValidator(read_choice, ModeChoice | NamedChoice | None)
    ] = optional("whether the model may, must or must not call tools, or which")
    chat_template_kwargs: TemplateKwargs = optional(
        "values for the template; names the renderer uses itself are refused"
    )

    def images(self) -> Iterator[Placed]:
        return images_of(self.messages)

    @classmethod
    def prepared(cls, data: dict[str, Any]) -> dict[str, Any]:
        return super().prepared(without_refused(data, (), REFUSED, IGNORED))


class MessagesRequest(CountRequest):
    """A request for a message."""

    max_tokens: Annotated[int, Field(ge=1, le=INT32)] = Field(
        description="most tokens of the reply, thinking included"
    )
