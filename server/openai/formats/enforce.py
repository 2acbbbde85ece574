"""Parts of the grammars that force tool calls, in llguidance's Lark dialect. Each format puts its own grammar together.

A grammar writes text exactly as chat templates show it, so that most of a call is forced and costs next to nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.engine.constraints import JSON_STYLE
from slipstream.server.openai.formats.format import Mark, Tool
from slipstream.server.openai.formats.schemas import (
    check_members,
    choices_of,
    members_of,
    parameter_of,
    refuse_others,
    required_of,
    resolved,
    text_body,
)
from slipstream.server.openai.formats.value_types import types_of

DEFINITIONS = ("$defs", "definitions")


def quoted(text: str) -> str:
    """`text` as a Lark string."""
    return json.dumps(text)


def as_rule(schema: Mapping[str, Any]) -> str:
    """A JSON schema as the body of a Lark rule."""
    return "%json " + json.dumps({**schema, "x-guidance": dict(JSON_STYLE)})


@dataclass
class Rules:
    """The rules of a grammar, collected while it is put together."""

    mark: Mark
    texts: list[str] = field(default_factory=list)

    def add(self, body: str, attributes: str = "") -> str:
        """A new rule; returns its name."""
        name = f"r{len(self.texts)}"
        self.texts.append(f"{name}{attributes}: {body}")
        return name

    def text(self, body: str, closing: str, *, is_literal: bool) -> str:
        """Lark text of a text up to and with `closing`; if that is literal text, up to where it first occurs.

        `body`: patterns of the text, joined by `&`.
        """
        if "&" in body:  # which only terminals may have
            name = f"T{len(self.texts)}"
            self.texts.append(f"{name}: {body}")
            body = name
        return self.add(body, f"[suffix={closing}]") if is_literal else f"{self.add(body)} {closing}"

    def arguments(self, tool: Tool) -> str:
        """A rule for a tool's arguments as one JSON object."""
        return self.add(as_rule({"type": "object", **tool.parameters}))

    def source(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self.texts]) + "\n"


def any_of(rules: Rules, tools: Sequence[Tool], call: Callable[[Rules, Tool], str]) -> str:
    """The name of a new rule: a call of any of the tools."""
    return rules.add(" | ".join(rules.add(call(rules, tool)) for tool in tools))


def repeated(call: str, between: str, *, many: bool) -> str:
    """A call, or (`many`) several with `between` between them. All are Lark text."""
    return f"{call} ({between} {call})*" if many else call


def named_json(rules: Rules, tool: Tool, key: str = "arguments") -> str:
    """Lark text of `{"name": "f", "arguments": {…}}`, with `key` in place of "arguments"."""
    head = f'{{"name": {json.dumps(tool.name)}, "{key}": '
    return f"{quoted(head)} {rules.arguments(tool)} {quoted('}')}"


def parameter(rules: Rules, tool: Tool, key: str, end: str) -> str:
    """Lark text of a parameter's value up to and with the tag `end`: strings without quotes, all else as JSON.

    Raises `Refused` for a string whose schema cannot be enforced.
    """
    schema = schema_of(tool, key)
    closing = rules.mark(end)
    if types_of(schema, tool.parameters) != {"string"}:
        shared = {name: tool.parameters[name] for name in DEFINITIONS if name in tool.parameters}
        return f"{rules.add(as_rule({**shared, **schema}))} {closing}"
    values = choices_of(schema)
    if values is not None:
        refuse_others(schema, {"enum", "type"} if "enum" in schema else {"const", "type"}, "string")
        return f"({' | '.join(quoted(one) for one in values if isinstance(one, str))}) {closing}"
    return rules.text(text_body(schema), closing, is_literal=closing == quoted(end))


def schema_of(tool: Tool, key: str) -> Mapping[str, Any]:
    """The schema of a tool's parameter, with what it refers to."""
    return resolved(parameter_of(tool, key), tool.parameters)


def parameters(tool: Tool, tag: Callable[[str], str]) -> str:
    """Lark text of all parameters in the schema's order; those not required are optional. `tag` makes a parameter's.

    Raises `Refused` if the schema has more to say of its parameters.
    """
    check_members(tool.parameters)
    names = [one for one, schema in members_of(tool.parameters).items() if schema is not False]
    needed = set(required_of(tool.parameters))
    return " ".join(tag(one) if one in needed else f"({tag(one)})?" for one in names)


def or_json(calls: str, schema: str) -> str:
    """A grammar of replies that follow the grammar `calls`, or else are JSON of `schema` (given as JSON text)."""
    return f"start: calls | answer\nanswer: {as_rule(json.loads(schema))}\n" + calls.replace(
        "start:", "calls:", 1
    )
