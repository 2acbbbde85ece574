"""Tools of a chat request: reads what clients may send, and works out which tools the reply may or must call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import orjson
from pydantic import BeforeValidator, Field

from slipstream.server.http.body import wrong
from slipstream.server.openai import sent
from slipstream.server.openai.formats.format import Tool
from slipstream.server.openai.formats.schemas import rooted
from slipstream.server.openai.schema import read_schema

MAX_TOOLS = 128
MAX_CALLS = 128  # of a message
MAX_DESCRIPTION = 64 << 10
NAME = re.compile(sent.FUNCTION_NAME)
# Of a function without `parameters`: it takes none, as OpenAI has it.
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

Mode = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """A `tool_choice`: whether tools may or must be called. `names`: the only tools allowed; None: all are."""

    mode: Mode
    names: tuple[str, ...] | None = None


def read_tools(value: Any) -> Any:
    """OpenAI's `tools` as functions in the form that chat templates read."""
    if value is None:
        return None
    if not isinstance(value, list):
        raise wrong("Input should be a list of tools")
    if len(value) > MAX_TOOLS:
        raise wrong(f"Input should have at most {MAX_TOOLS} tools")
    tools = [_tool(one) for one in value]
    names = [one["function"]["name"] for one in tools]
    if len(set(names)) < len(names):
        raise wrong("Each function should have a name of its own")
    return tools


def _tool(value: Any) -> dict[str, Any]:
    function = _function(value)
    description = function.get("description")
    if description is not None and (not isinstance(description, str) or len(description) > MAX_DESCRIPTION):
        raise wrong(f"A description should be a string of at most {MAX_DESCRIPTION} characters")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise wrong("'strict' should be true or false")
    told = {"name": function["name"]}
    if description is not None:
        told["description"] = description
    return {
        "type": "function",
        "function": {**told, "parameters": read_schema(function.get("parameters")) or NO_PARAMETERS},
    }


def _function(value: Any) -> Mapping[str, Any]:
    """The inner object of `{"type": "function", "function": {"name": …}}`, whose name is checked."""
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise wrong("Each tool should be an object with a type")
    if value["type"] != "function":
        raise wrong("only tools of type 'function' are supported", code="unsupported_value")
    function = value.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise wrong("Each function should be an object with a name")
    if not NAME.fullmatch(function["name"]):
        raise wrong("A function's name should have 1 to 64 letters, digits, '_', '.' and '-'")
    return function


def read_tool_choice(value: Any) -> Any:
    """OpenAI's `tool_choice` in any of its forms; null means absent."""
    if value is None:
        return None
    if value in ("none", "auto", "required"):
        return ToolChoice(value)
    if not isinstance(value, dict):
        raise wrong("Input should be 'none', 'auto', 'required' or an object")
    if value.get("type") != "allowed_tools":
        return ToolChoice("required", (_function(value)["name"],))
    allowed = value.get("allowed_tools", value)  # some clients leave out the inner object
    if not isinstance(allowed, dict) or allowed.get("mode") not in ("auto", "required"):
        raise wrong("allowed_tools should be an object whose mode is 'auto' or 'required'")
    tools = allowed.get("tools")
    if not isinstance(tools, list) or not 0 < len(tools) <= MAX_TOOLS:
        raise wrong(f"allowed_tools should list 1 to {MAX_TOOLS} tools")
    return ToolChoice(allowed["mode"], tuple(_function(one)["name"] for one in tools))


def read_calls(value: Any) -> Any:
    """`tool_calls` of an assistant's message."""
    if value is None:
        return None
    if not isinstance(value, list) or len(value) > MAX_CALLS:
        raise wrong(f"Input should be a list of at most {MAX_CALLS} calls")
    return [_call(one) for one in value]


def _call(value: Any) -> dict[str, Any]:
    function = _function({"type": "function", **value} if isinstance(value, dict) else value)
    arguments = function.get("arguments")
    if isinstance(arguments, dict):  # as templates have them, and some clients
        arguments = orjson.dumps(arguments).decode()
    if not isinstance(arguments, str):
        raise wrong("A call's arguments should be a string of JSON, or an object")
    call_id = value.get("id")
    if call_id is not None and not isinstance(call_id, str):
        raise wrong("A call's id should be a string")
    told = {"name": function["name"], "arguments": arguments}
    return {"id": call_id or "", "type": "function", "function": told}


# Types of a request's fields: the type in Python, its reader, and what clients may send (for the OpenAPI document).
ToolsField = Annotated[
    list[dict[str, Any]] | None,
    BeforeValidator(read_tools, Annotated[list[sent.ToolDefinition], Field(max_length=MAX_TOOLS)] | None),
]
ToolChoiceField = Annotated[
    ToolChoice | None, BeforeValidator(read_tool_choice, Mode | sent.NamedTool | sent.AllowedTools | None)
]
CallsField = Annotated[
    list[dict[str, Any]] | None,
    BeforeValidator(read_calls, Annotated[list[sent.CallOfMessage], Field(max_length=MAX_CALLS)] | None),
]


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks of tools: those the model is shown, and whether it has to call one of them."""

    shown: Sequence[Mapping[str, Any]] = ()
    is_forced: bool = False
    many: bool = True

    @property
    def tools(self) -> dict[str, Tool]:
        functions = [one["function"] for one in self.shown]
        return {one["name"]: Tool(one["name"], rooted(one["parameters"])) for one in functions}


def asked(tools: Sequence[Mapping[str, Any]] | None, choice: ToolChoice | None, *, many: bool) -> Asked:
    """What a request with these tools and this `tool_choice` asks for; `many`: several calls are allowed.

    Raises ValueError, with what is wrong about the choice.
    """
    if not tools:
        if choice and (choice.mode == "required" or choice.names):
            raise ValueError("only allowed with tools")
        return Asked()
    if choice is None:
        return Asked(tools, many=many)
    if choice.mode == "none":
        return Asked()
    if choice.names is None:
        return Asked(tools, choice.mode == "required", many)
    named = [one for one in tools if one["function"]["name"] in choice.names]
    if len(named) < len(set(choice.names)):
        raise ValueError("names a function that is not among the tools")
    return Asked(named, choice.mode == "required", many)
