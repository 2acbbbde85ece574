"""The Hermes format, a JSON object between tags per call: NousHermes, Qwen 2.5, Qwen 3, Granite 4 and many others."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.server.openai.formats.enforce import Rules, any_of, named_json, quoted, repeated
from slipstream.server.openai.formats.format import Calls, Format, Mark, Tool
from slipstream.server.openai.formats.json_call import JsonCalls

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def enforced(tools: Sequence[Tool], mark: Mark, *, many: bool) -> str:
    rules = Rules(mark)
    call = any_of(rules, tools, named_json)
    body = rules.add(f"{mark(OPEN)} {quoted(chr(10))} {call} {quoted(chr(10))} {mark(CLOSE)}")
    return rules.source(repeated(body, quoted("\n"), many=many))


HERMES = Format(
    name="hermes",
    signs=(OPEN, '"arguments'),
    others=("<arg_key>", "<parameter=", "<tool_calls>"),
    reasoning=("<think>", "</think>"),
    calls=Calls(OPEN, CLOSE, lambda marker, tools: JsonCalls(marker), begins=r"\{"),
    enforced=enforced,
)
