"""The format of GLM 4.5 and later, and of Ling 3: a call is a name, then a tagged key and value per parameter."""

from __future__ import annotations

import re
from collections.abc import Sequence

from slipstream.server.openai.formats.enforce import Rules, any_of, parameter, parameters, quoted, repeated
from slipstream.server.openai.formats.format import Calls, Format, Mark, Tool
from slipstream.server.openai.formats.xml_call import Tags, XmlCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
TAGS = Tags(
    head=re.compile(r"\s*(?P<name>[^\s<]+)\s*"),
    parameter_start=KEY,
    parameter=re.compile(rf"\s*{KEY}(?P<key>.*?){KEY_END}\s*{VALUE}(?P<value>.*?){VALUE_END}", re.DOTALL),
    parameter_end=VALUE_END,
    foot=re.compile(r"\s*\Z"),
    foot_start="",
)


def enforced(tools: Sequence[Tool], mark: Mark, *, many: bool) -> str:
    """The grammar of calls. Line breaks are optional, as later versions of the model write none."""
    rules = Rules(mark)
    line = rules.add(f"{quoted(chr(10))}?")

    def function(rules: Rules, tool: Tool) -> str:
        def tag(key: str) -> str:
            name = f"{mark(KEY)} {quoted(key)} {mark(KEY_END)}"
            return f"{name} {line} {mark(VALUE)} {parameter(rules, tool, key, VALUE_END)} {line}"

        return f"{quoted(tool.name)} {line} {parameters(tool, tag)}"

    body = rules.add(f"{mark(OPEN)} {any_of(rules, tools, function)} {mark(CLOSE)}")
    return rules.source(repeated(body, line, many=many))


GLM = Format(
    name="glm",
    signs=(OPEN, KEY),
    reasoning=("<think>", "</think>"),
    calls=Calls(
        OPEN,
        CLOSE,
        lambda marker, tools: XmlCall(marker, TAGS, tools),
        begins=rf"[\w.-]{{1,64}}\s{{0,8}}(?:{KEY}|{CLOSE})",
    ),
    inside=(KEY, KEY_END, VALUE, VALUE_END),
    enforced=enforced,
)
