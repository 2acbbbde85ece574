"""Mistral's formats: a special token, then calls. Older models write the calls as a JSON list; newer models write a
name and JSON arguments with a special token between them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from slipstream.server.openai.formats.enforce import Rules, any_of, named_json, quoted, repeated
from slipstream.server.openai.formats.format import Calls, Format, Mark, Piece, Tool
from slipstream.server.openai.formats.json_call import HeadedJson, JsonCalls

OPEN, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
HEAD = re.compile(
    rf"\s*(?:{re.escape(OPEN)})?\s*(?P<name>[^\s\[{{]+)"
    rf"(?:{re.escape(CALL_ID)}[A-Za-z0-9_-]*)?\s*(?:{re.escape(ARGUMENTS)})?\s*"
)
SILENT = re.compile(r"\s*")


class MistralCalls:
    """Reads calls of either format: the first character decides which it is."""

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._reader: HeadedJson | JsonCalls | None = None

    @property
    def in_string(self) -> bool:
        return self._reader is not None and self._reader.in_string

    def feed(self, text: str) -> list[Piece]:
        if self._reader is None:
            if not text.strip():
                self._marker += text
                return []
            is_list = text.lstrip()[0] in "[{"
            marker = self._marker
            self._reader = JsonCalls(marker) if is_list else HeadedJson(marker, HEAD, SILENT)
        return self._reader.feed(text)

    def close(self, marker: str) -> list[Piece]:
        return (self._reader or JsonCalls(self._marker)).close(marker)


def enforced(tools: Sequence[Tool], mark: Mark, *, many: bool) -> str:
    def call(rules: Rules, tool: Tool) -> str:
        return f"{mark(OPEN)} {quoted(tool.name)} {mark(ARGUMENTS)} {rules.arguments(tool)}"

    rules = Rules(mark)
    return rules.source(repeated(any_of(rules, tools, call), "", many=many))


def enforced_list(tools: Sequence[Tool], mark: Mark, *, many: bool) -> str:
    rules = Rules(mark)
    calls = repeated(any_of(rules, tools, named_json), quoted(", "), many=many)
    return rules.source(f"{mark(OPEN)} {quoted('[')} {calls} {quoted(']')}")


CALLS = Calls(OPEN, None, lambda marker, tools: MistralCalls(marker))
MISTRAL = Format(
    name="mistral",
    signs=(OPEN, ARGUMENTS),
    reasoning=("[THINK]", "[/THINK]"),
    calls=CALLS,
    inside=(ARGUMENTS, CALL_ID),
    enforced=enforced,
)
MISTRAL_LIST = Format(
    name="mistral-list",
    signs=(OPEN,),
    others=(ARGUMENTS,),
    reasoning=("[THINK]", "[/THINK]"),
    calls=CALLS,
    enforced=enforced_list,
)
