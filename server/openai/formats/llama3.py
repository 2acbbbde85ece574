"""Llama 3's format: a call is a JSON object with `parameters`, bare or after a special token."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.server.openai.formats.enforce import Rules, any_of, named_json
from slipstream.server.openai.formats.format import Calls, Format, Mark, Tool
from slipstream.server.openai.formats.json_call import JsonCalls

OPEN = "<|python_tag|>"


def enforced(tools: Sequence[Tool], mark: Mark, *, many: bool) -> str:
    """The grammar of a single call, whatever `many` says: these models were not taught a way to write a second."""
    rules = Rules(mark)
    call = any_of(rules, tools, lambda rules, tool: named_json(rules, tool, "parameters"))
    return rules.source(call)


LLAMA3 = Format(
    name="llama3",
    signs=("<|start_header_id|>", '"parameters"'),
    others=("<function=", "<tool_call>"),
    # Without a marker, only a known name distinguishes a call from an answer in JSON.
    calls=Calls(OPEN, None, lambda marker, tools: JsonCalls(marker, frozenset(tools)), bare=True),
    enforced=enforced,
)
