"""The model of a request to `/v1/responses`. What chat requests share (sampling, speculation, grammars) is here too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from slipstream.engine.api import MOST_LOGPROBS
from slipstream.server.describe.shape import optional
from slipstream.server.http.body import wrong
from slipstream.server.openai import sent, structured
from slipstream.server.openai.readers import MaxTokens, TemplateKwargs
from slipstream.server.openai.wire import Generate, Wire
from slipstream.server.responses.input_items import Items
from slipstream.server.responses.offered import NOTHING, FlatChoice, FlatTools, Offered

MAX_METADATA = 16
LOGPROBS = "message.output_text.logprobs"
SEALED_THINKING = "reasoning.encrypted_content"


@dataclass(frozen=True, slots=True)
class TextFormat:
    """A `text.format`: the source of a grammar, None for plain text; and the format as the response shows it."""

    source: structured.Source | None
    shown: Mapping[str, Any]


def read_format(value: Any) -> Any:
    """OpenAI's `text.format`, which is `response_format` with the schema's fields beside the type."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise wrong("Input should be an object with a type")
    nested = value
    if value.get("type") == "json_schema" and "json_schema" not in value:
        nested = {"type": "json_schema", "json_schema": {k: v for k, v in value.items() if k != "type"}}
    source = structured.read_response_format(nested)
    names = ("type", "name", "description", "schema", "strict")
    return TextFormat(source, {name: value[name] for name in names if name in value})


def read_metadata(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, dict) or len(value) > MAX_METADATA:
        raise wrong(f"Input should be an object of at most {MAX_METADATA} texts")
    if not all(isinstance(one, str) and len(one) <= 512 and len(key) <= 64 for key, one in value.items()):
        raise wrong("Each value should be a string of at most 512 characters, each key of at most 64")
    return value


def read_absent(value: Any) -> Any:
    if value is not None:
        raise wrong("this is not supported", code="unsupported_value")


class FlatSchemaFormat(sent.NamedSchema):
    type: Literal["json_schema"]
    description: str | None = None


FlatFormat = sent.TextFormat | sent.JsonObjectFormat | FlatSchemaFormat


class TextSettings(Wire):
    """`text`: what the reply must be."""

    format: Annotated[TextFormat | None, BeforeValidator(read_format, FlatFormat | None)] = optional(
        "text, any JSON object, or JSON of a schema"
    )
    verbosity: str | None = optional("accepted, without influence", max_length=16)


class ReasoningSettings(Wire):
    effort: str | None = optional("passed to the template; `none` also switches thinking off", max_length=32)
    summary: str | None = optional(
        "`auto`, `concise` or `detailed`: thinking is shown as its summary, whole, in place of content",
        max_length=32,
    )
    generate_summary: str | None = optional("the older name of `summary`", max_length=32)

    @property
    def summarises(self) -> str | None:
        """The kind of summary that is asked for, None for none."""
        asked = self.summary or self.generate_summary
        return None if asked == "none" else asked


class ResponsesRequest(Generate):
    input: Items = Field(description="a text, or a list of items: messages, calls, their outputs, thinking")
    instructions: str | None = optional("a system message before the input, for this response alone")
    previous_response_id: str | None = optional("the kept response to go on from", max_length=128)
    store: bool | None = optional("keep the response (see `--responses-kept`); on by default")
    background: bool | None = optional("answer at once, and go on; `GET /v1/responses/{id}` has the result")
    max_output_tokens: MaxTokens = optional(
        "most tokens of the reply, thinking included; wins over `max_tokens`"
    )
    max_tool_calls: int | None = optional("accepted: it counts calls of OpenAI's own tools", ge=1)
    text: TextSettings | None = optional("what the reply must be")
    reasoning: ReasoningSettings | None = optional("how the model should think")
    tools: FlatTools = optional(
        "functions and custom tools the model may call, also in namespaces; it sees nothing of those that OpenAI runs"
    )
    tool_choice: FlatChoice = optional("whether the model may, must or must not call functions, or which")
    parallel_tool_calls: bool | None = optional("false: one call at most")
    include: Annotated[list[str], Field(max_length=32)] | None = optional(
        f"`{LOGPROBS}`: log-probabilities of the text; `{SEALED_THINKING}`: thinking in a form that clients give back; "
        "other values are accepted"
    )
    top_logprobs: int | None = optional("so many of the likeliest tokens per token", ge=0, le=MOST_LOGPROBS)
    truncation: Literal["auto", "disabled"] | None = optional(
        "auto: where the context is too small, the oldest turns are left out"
    )
    metadata: Annotated[dict[str, str] | None, BeforeValidator(read_metadata, dict[str, str] | None)] = (
        optional("kept with the response, and shown")
    )
    chat_template_kwargs: TemplateKwargs = optional(
        "values for the template; names the renderer uses itself are refused"
    )
    conversation: Annotated[None, BeforeValidator(read_absent, None)] = optional(
        "refused: `previous_response_id` is the way to go on"
    )
    prompt: Annotated[None, BeforeValidator(read_absent, None)] = optional(
        "refused: templates are not kept here"
    )

    @property
    def offered(self) -> Offered:
        return self.tools or NOTHING
