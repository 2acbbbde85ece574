"""The format of Qwen3-Coder, Qwen 3.5, Nemotron 3 and Step 3.5: a call has a tag for its function and per parameter."""

from __future__ import annotations

import re
from collections.abc import Sequence

from slipstream.server.openai.formats.enforce import Rules, any_of, parameter, parameters, quoted, repeated
from slipstream.server.openai.formats.format import Calls, Format, Mark, Tool
from slipstream.server.openai.formats.xml_call import Tags, XmlCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION = "<function="
TAGS = Tags(
    head=re.compile(r"\s*<function=(?P<name>[^>\n]+)>\s*"),
    parameter_start="<parameter=",
    parameter=re.compile(r"\s*<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>", re.DOTALL),
    parameter_end="</parameter>",
    foot=re.compile(r"\s*(?:</function>)?\s*\Z"),
    foot_start="</function>",
)


def enforced(tools: Sequence[Tool], mark: Mark, *, many: bool) -> str:
    rules = Rules(mark)
    call = any_of(rules, tools, _function)
    body = rules.add(f"{mark(OPEN)} {quoted(chr(10))} {call} {quoted(chr(10))} {mark(CLOSE)}")
    return rules.source(repeated(body, quoted("\n"), many=many))


def _function(rules: Rules, tool: Tool) -> str:
    def tag(key: str) -> str:
        value = parameter(rules, tool, key, "\n</parameter>")
        return f"{quoted(f'<parameter={key}>{chr(10)}')} {value} {quoted(chr(10))}"

    head = quoted(f"<function={tool.name}>\n")
    return f"{head} {parameters(tool, tag)} {quoted('</function>')}"


QWEN3_CODER = Format(
    name="qwen3-coder",
    signs=(OPEN, FUNCTION, "<parameter="),
    others=("<seed:tool_call>",),
    reasoning=("<think>", "</think>"),
    calls=Calls(
        OPEN,
        CLOSE,
        lambda marker, tools: XmlCall(marker, TAGS, tools),
        begins=FUNCTION,
        unmarked=(FUNCTION, r">\s{0,8}(?:<parameter=|</function>)"),
    ),
    enforced=enforced,
)
