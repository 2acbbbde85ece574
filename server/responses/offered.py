"""Tools of a request to `/v1/responses`: functions, tools that take a text, either in namespaces, and tools that the
model does not see.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import orjson
from pydantic import BeforeValidator, Field

from slipstream.server.http.body import type_of, wrong
from slipstream.server.openai import sent
from slipstream.server.openai.tools import (
    MAX_TOOLS,
    NAME,
    Mode,
    ToolChoice,
    read_tool_choice,
    read_tools,
)

# Tools that OpenAI runs itself or has trained its models for. Agents offer them beside their functions whatever the
# server is; the model is not shown them.
HOSTED = (
    *("web_search", "web_search_preview", "file_search", "computer", "computer_use", "computer_use_preview"),
    *("code_interpreter", "image_generation", "mcp", "local_shell", "shell", "apply_patch"),
    *("tool_search", "programmatic_tool_calling", "web_search_2025_08_26", "web_search_preview_2025_03_11"),
)
MAX_NAME = 64  # of a function, for the model and in what it writes
N_HASH = 8


# A custom tool takes a text. The model is shown a function with it as its only argument.
TEXT_ARGUMENT = "input"
TEXT_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {TEXT_ARGUMENT: {"type": "string"}},
    "required": [TEXT_ARGUMENT],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Callee:
    """What a client knows a function by that the model has another name for. `is_custom`: it takes a text."""

    name: str
    namespace: str | None = None
    is_custom: bool = False

    @property
    def fields(self) -> dict[str, str]:
        return {"name": self.name, **({"namespace": self.namespace} if self.namespace else {})}


@dataclass(frozen=True, slots=True)
class Offered:
    """The functions that the model is shown, under names of which there is one each.

    `shown`: as the response lists them. `callees`: of those that clients know otherwise, by the model's name.
    """

    functions: Sequence[dict[str, Any]]
    shown: Sequence[Mapping[str, Any]]
    callees: Mapping[str, Callee]

    def called(self, name: str) -> Callee:
        """What a client knows the function by that the model calls `name`."""
        return self.callees.get(name) or Callee(name)


NOTHING = Offered((), (), {})


def flat_name(namespace: str | None, name: str) -> str:
    """The model's name of a function. Where namespace and name are too long together, their end is a hash of both."""
    if not namespace:
        return name
    joined = f"{namespace}{name}" if namespace.endswith("_") else f"{namespace}__{name}"
    if len(joined) <= MAX_NAME:
        return joined
    return f"{joined[: MAX_NAME - N_HASH - 1]}_{hashlib.sha256(joined.encode()).hexdigest()[:N_HASH]}"


def as_arguments(text: str) -> str:
    """The arguments of a call of a custom tool with a text."""
    return orjson.dumps({TEXT_ARGUMENT: text}).decode()


def text_of(arguments: str) -> str:
    """The text of a call that the model made of a custom tool; of arguments without one, all of them."""
    for end in ("", '"}'):  # the second where the reply was cut
        with contextlib.suppress(orjson.JSONDecodeError):
            read = orjson.loads(arguments + end)
            text = read.get(TEXT_ARGUMENT) if isinstance(read, dict) else None
            return text if isinstance(text, str) else arguments
    return arguments


def read_flat_tools(value: Any) -> Any:
    """The functions among a request's tools, those in namespaces too; None if there are none."""
    if value is None:
        return None
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise wrong(f"Input should be a list of at most {MAX_TOOLS} tools")
    functions: list[dict[str, Any]] = []
    shown: list[dict[str, Any]] = []
    callees: dict[str, Callee] = {}
    for one in value:
        group, members = _group(one)
        listed = []
        for member in members:
            if type_of(member) in HOSTED:
                continue
            (function,), is_custom = read_tools([_nested(member)]), type_of(member) == "custom"
            name = function["function"]["name"]
            flat = flat_name(group["name"] if group else None, name)
            functions.append({**function, "function": {**function["function"], "name": flat}})
            listed.append(
                _custom_shown(member) if is_custom else {"type": "function", **function["function"]}
            )
            if group or is_custom:
                callees[flat] = Callee(name, group["name"] if group else None, is_custom)
        if listed:
            shown += [{**group, "tools": listed}] if group else listed
    # Read again as one list: of each name there may be one, and no more than the limit together.
    return Offered(read_tools(functions), shown, callees) if functions else None


def _group(tool: Any) -> tuple[dict[str, Any] | None, Sequence[Any]]:
    """A namespace as it is shown, with its tools; None with any other tool."""
    if type_of(tool) != "namespace":
        return None, [tool]
    name, description, members = tool.get("name"), tool.get("description"), tool.get("tools")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise wrong("A namespace's name should have 1 to 64 letters, digits, '_', '.' and '-'")
    if not isinstance(description, str | None) or not isinstance(members, list) or len(members) > MAX_TOOLS:
        raise wrong(
            f"A namespace should have a list of at most {MAX_TOOLS} tools, and a string as its description"
        )
    return {"type": "namespace", "name": name, "description": description or ""}, members


def _custom_shown(value: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value[name] for name in ("type", "name", "description", "format") if name in value}


def _custom_description(value: Mapping[str, Any]) -> Any:
    """What the model is told of a custom tool: its description, and the grammar of its text, which is not enforced."""
    description, form = value.get("description"), value.get("format")
    if form is None or type_of(form) == "text":
        return description
    is_grammar = type_of(form) == "grammar" and isinstance(form.get("definition"), str)
    if not is_grammar or form.get("syntax") not in ("lark", "regex"):
        raise wrong("A format should be text, or a grammar with a syntax, lark or regex, and a definition")
    if not isinstance(description, str | None):
        return description
    told = f"The input follows this {form['syntax']} grammar:\n{form['definition']}"
    return f"{description or ''}\n\n{told}".strip()


def _nested(value: Any) -> Any:
    """`{"type": "function", "name": …}` as `{"type": "function", "function": {"name": …}}`; custom tools too."""
    if type_of(value) == "custom":
        told = {"description": _custom_description(value), "parameters": TEXT_PARAMETERS}
        return {"type": "function", "function": {"name": value.get("name"), **told}}
    if type_of(value) != "function" or "function" in value:
        return value
    return {"type": "function", "function": {name: one for name, one in value.items() if name != "type"}}


def read_flat_choice(value: Any) -> Any:
    """A `tool_choice`, with the names of functions beside their type."""
    if type_of(value) in HOSTED:
        raise wrong("only tools of type 'function' are supported", code="unsupported_value")
    if type_of(value) == "allowed_tools" and isinstance(value.get("tools"), list):
        return read_tool_choice({**value, "tools": [_chosen(one) for one in value["tools"]]})
    return read_tool_choice(_chosen(value))


def _chosen(value: Any) -> Any:
    if (
        isinstance(value, dict)
        and isinstance(value.get("namespace"), str)
        and isinstance(value.get("name"), str)
    ):
        value = {**value, "name": flat_name(value["namespace"], value["name"])}
    return _nested(value)


class FlatFunction(sent.FunctionDefinition):
    type: Literal["function"]


class HostedTool(sent.Sent):
    """A tool that is not a function: accepted, and not shown to the model."""

    type: Literal[HOSTED]  # type: ignore[valid-type]


class TextOfAnyForm(sent.Sent):
    type: Literal["text"]


class TextOfGrammar(sent.Sent):
    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: str = Field(description="shown to the model, and not enforced")


class ToolOfText(sent.Sent):
    """A tool that takes a text: for the model a function with one argument, `input`."""

    type: Literal["custom"]
    name: sent.Name
    description: str | None = None
    format: TextOfAnyForm | TextOfGrammar | None = None


class Namespace(sent.Sent):
    """Tools of one origin, such as an MCP server; calls name both."""

    type: Literal["namespace"]
    name: sent.Name
    description: str | None = None
    tools: list[FlatFunction | ToolOfText | HostedTool] = Field(max_length=MAX_TOOLS)


class FlatName(sent.FunctionName):
    type: Literal["function", "custom"]
    namespace: sent.Name | None = None


class FlatAllowed(sent.Sent):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[FlatName] = Field(min_length=1, description="functions the model may call")


_Tools = Annotated[list[FlatFunction | ToolOfText | Namespace | HostedTool], Field(max_length=MAX_TOOLS)]
FlatTools = Annotated[Offered | None, BeforeValidator(read_flat_tools, _Tools | None)]
FlatChoice = Annotated[
    ToolChoice | None, BeforeValidator(read_flat_choice, Mode | FlatName | FlatAllowed | None)
]
