"""DeepSeek's formats: a call is a name and JSON between special tokens. R1 and V3 put the JSON into a code fence; V3.1
does not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from slipstream.server.openai.formats.enforce import Rules, any_of, quoted, repeated
from slipstream.server.openai.formats.format import Calls, Enforce, Format, Mark, Tool
from slipstream.server.openai.formats.json_call import HeadedJson

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
OPEN, CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
FENCE = "```json"
HEAD = re.compile(
    rf"\s*(?:function\s*{SEPARATOR})?\s*(?P<name>[^\s{{<]+)\s*(?:{SEPARATOR})?\s*(?:```(?:json)?)?\s*"
)
SILENT = re.compile(r"\s*(?:```)?\s*")


def _enforced(call: Callable[[Rules, Tool], str], between: str) -> Enforce:
    def enforced(tools: Sequence[Tool], mark: Mark, *, many: bool) -> str:
        rules = Rules(mark)
        body = rules.add(f"{mark(OPEN)} {any_of(rules, tools, call)} {mark(CLOSE)}")
        return rules.source(f"{mark(BEGIN)} {repeated(body, between, many=many)} {mark(END)}")

    return enforced


def _fenced(rules: Rules, tool: Tool) -> str:
    head = f"{quoted('function')} {rules.mark(SEPARATOR)} {quoted(f'{tool.name}{chr(10)}{FENCE}{chr(10)}')}"
    return f"{head} {rules.arguments(tool)} {quoted(chr(10) + '```')}"


def _plain(rules: Rules, tool: Tool) -> str:
    return f"{quoted(tool.name)} {rules.mark(SEPARATOR)} {rules.arguments(tool)}"


CALLS = Calls(OPEN, CLOSE, lambda marker, tools: HeadedJson(marker, HEAD, SILENT))
DEEPSEEK = Format(
    name="deepseek",
    signs=(BEGIN, FENCE),
    reasoning=("<think>", "</think>"),
    calls=CALLS,
    between=(BEGIN, END),
    inside=(SEPARATOR,),
    enforced=_enforced(_fenced, quoted("\n")),
)
DEEPSEEK_V31 = Format(
    name="deepseek-v3.1",
    signs=(BEGIN,),
    others=(FENCE,),
    reasoning=("<think>", "</think>"),
    calls=CALLS,
    between=(BEGIN, END),
    inside=(SEPARATOR,),
    enforced=_enforced(_plain, ""),
)
