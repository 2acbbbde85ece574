"""Tools of a request to `/v1/responses`: functions, functions in namespaces, and tools that the model does not see."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from slipstream.server.http.body import wrong
from slipstream.server.openai import sent
from slipstream.server.openai.tools import (
    MAX_TOOLS,
    NAME,
    Mode,
    ToolChoice,
    read_tool_choice,
    read_tools,
)

# Tools that OpenAI runs itself, or that take other input than JSON. Agents offer them beside their functions whatever
# the server is; the model is not shown them.
HOSTED = (
    *("web_search", "web_search_preview", "file_search", "computer", "computer_use", "computer_use_preview"),
    *("code_interpreter", "image_generation", "mcp", "local_shell", "shell", "custom", "apply_patch"),
    *("tool_search", "programmatic_tool_calling", "web_search_2025_08_26", "web_search_preview_2025_03_11"),
)
MAX_NAME = 64  # of a function, for the model and in what it writes
N_HASH = 8


@dataclass(frozen=True, slots=True)
class Offered:
    """The functions that the model is shown, under names of which there is one each.

    `shown`: as the response lists them. `namespaces`: of those in a namespace, namespace and name by the model's name.
    """

    functions: Sequence[dict[str, Any]]
    shown: Sequence[Mapping[str, Any]]
    namespaces: Mapping[str, tuple[str, str]]

    def called(self, name: str) -> dict[str, str]:
        """The fields of an item by which a client knows the function that the model calls `name`."""
        if name not in self.namespaces:
            return {"name": name}
        namespace, own = self.namespaces[name]
        return {"name": own, "namespace": namespace}


NOTHING = Offered((), (), {})


def flat_name(namespace: str | None, name: str) -> str:
    """The model's name of a function. Where namespace and name are too long together, their end is a hash of both."""
    if not namespace:
        return name
    joined = f"{namespace}{name}" if namespace.endswith("_") else f"{namespace}__{name}"
    if len(joined) <= MAX_NAME:
        return joined
    return f"{joined[: MAX_NAME - N_HASH - 1]}_{hashlib.sha256(joined.encode()).hexdigest()[:N_HASH]}"


def read_flat_tools(value: Any) -> Any:
    """The functions among a request's tools, those in namespaces too; None if there are none."""
    if value is None:
        return None
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise wrong(f"Input should be a list of at most {MAX_TOOLS} tools")
    functions: list[dict[str, Any]] = []
    shown: list[dict[str, Any]] = []
    namespaces: dict[str, tuple[str, str]] = {}
    for group, members in _groups(value):
        read = read_tools(members)
        listed = [{"type": "function", **one["function"]} for one in read]
        if group is None:
            functions += read
            shown += listed
        elif read:
            names = [one["function"]["name"] for one in read]
            flat = [flat_name(group["name"], name) for name in names]
            functions += [_renamed(one, name) for one, name in zip(read, flat, strict=True)]
            namespaces |= {own: (group["name"], name) for own, name in zip(flat, names, strict=True)}
            shown.append({**group, "tools": listed})
    # Read again as one list: of each name there may be one, and no more than the limit together.
    return Offered(read_tools(functions), shown, namespaces) if functions else None


def _groups(tools: Sequence[Any]) -> Iterator[tuple[dict[str, Any] | None, list[Any]]]:
    """Functions in a chat's form, by their namespace; None for those without."""
    for one in tools:
        if _is_hosted(one):
            continue
        if not isinstance(one, dict) or one.get("type") != "namespace":
            yield None, [_nested(one)]
            continue
        name, description, members = one.get("name"), one.get("description"), one.get("tools")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise wrong("A namespace's name should have 1 to 64 letters, digits, '_', '.' and '-'")
        if not isinstance(description, str | None) or not isinstance(members, list):
            raise wrong("A namespace should have a list of tools, and a string as its description")
        group = {"type": "namespace", "name": name, "description": description or ""}
        yield group, [_nested(each) for each in members if not _is_hosted(each)]


def _renamed(function: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {**function, "function": {**function["function"], "name": name}}


def _is_hosted(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") in HOSTED


def _nested(value: Any) -> Any:
    """`{"type": "function", "name": …}` as `{"type": "function", "function": {"name": …}}`."""
    if not isinstance(value, dict) or value.get("type") != "function" or "function" in value:
        return value
    return {"type": "function", "function": {name: one for name, one in value.items() if name != "type"}}


def read_flat_choice(value: Any) -> Any:
    """A `tool_choice`, with the names of functions beside their type."""
    if not isinstance(value, dict):
        return read_tool_choice(value)
    if _is_hosted(value):
        raise wrong("only tools of type 'function' are supported", code="unsupported_value")
    tools = value.get("tools")
    if value.get("type") == "allowed_tools" and isinstance(tools, list):
        return read_tool_choice({**value, "tools": [_chosen(one) for one in tools]})
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


class Namespace(sent.Sent):
    """Functions of one origin, such as an MCP server; calls name both."""

    type: Literal["namespace"]
    name: sent.Name
    description: str | None = None
    tools: list[FlatFunction | HostedTool]


class FlatName(sent.FunctionName):
    type: Literal["function"]
    namespace: sent.Name | None = None


class FlatAllowed(sent.Sent):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[FlatName] = Field(min_length=1, description="functions the model may call")


_Tools = Annotated[list[FlatFunction | Namespace | HostedTool], Field(max_length=MAX_TOOLS)]
FlatTools = Annotated[Offered | None, BeforeValidator(read_flat_tools, _Tools | None)]
FlatChoice = Annotated[
    ToolChoice | None, BeforeValidator(read_flat_choice, Mode | FlatName | FlatAllowed | None)
]
