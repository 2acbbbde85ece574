"""Formats read from chat templates: a template's own calls come back as calls, are what is forced, and no more is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Vocabulary

from slipstream.engine.api import AsyncEngine, Chat
from slipstream.engine.text.chat import ChatTemplate
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.server.openai.formats.call_shape import MARK
from slipstream.server.openai.formats.derived import calls_of, derived, thinking
from slipstream.server.openai.formats.format import CallEnd, Content, Format, Piece, Reasoning, Tool, joined
from slipstream.server.openai.formats.known import format_of
from slipstream.server.openai.formats.parser import Parser
from slipstream.server.openai.formats.renderings import Renderings, renderings
from tests.http.fake import INFO
from tests.unit.test_formats import accepts, known_of

DEMO = Path(__file__).parents[2] / "demo" / "target"
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "wet": {"type": "boolean"},
        "more": {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}},
    },
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [Tool("get_weather", PARAMETERS), Tool("ping", {"type": "object", "properties": {}})]
ARGUMENTS = {"city": 'Oslo é\n"x" <b', "days": -2, "wet": True, "more": {"a": [1, 2]}}


@dataclass(frozen=True)
class Family:
    """A template in its parts, as Jinja: texts around calls, and what is written of a call's arguments."""

    before: str = ""
    open: str = ""
    middle: str = ""
    arguments: str = "{{ f.arguments | tojson }}"
    close: str = ""
    between: str = ""
    after: str = ""
    think: tuple[str, str] = ("<think>", "</think>")
    says: tuple[str, str] = ("", "")  # around content
    ends: str = ""  # written behind all of a turn
    many: bool = True

    @property
    def source(self) -> str:
        calls = "m.tool_calls" if self.many else "m.tool_calls[:1]"
        return (
            "{% if tools %}<|tools|>{{ tools | tojson }}<|end|>{% endif %}"
            "{% for m in messages %}<|{{ m.role }}|>\n"
            f"{{% if m.reasoning_content %}}{self.think[0]}{{{{ m.reasoning_content }}}}{self.think[1]}{{% endif %}}"
            f"{{% if m.content %}}{self.says[0]}{{{{ m.content }}}}{self.says[1]}{{% endif %}}"
            f"{{% if m.tool_calls %}}{self.before}{{% for c in {calls} %}}{{% set f = c.function %}}"
            f"{{% if not loop.first %}}{self.between}{{% endif %}}"
            f"{self.open}{{{{ f.name }}}}{self.middle}{self.arguments}{self.close}{{% endfor %}}{self.after}"
            f"{{% endif %}}{{% if m.role == 'assistant' %}}{self.ends}{{% endif %}}<|end|>\n{{% endfor %}}"
            "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
        )


def tagged(key: str, value: str, end: str, between: str = "") -> str:
    """A parameter after the other: Jinja of what stands before a key, before its value, and behind that."""
    text = "{{ v if v is string else v | tojson }}"
    gap = f"{{% if not loop.first %}}{between}{{% endif %}}"
    return f"{{% for k, v in f.arguments.items() %}}{gap}{key}{{{{ k }}}}{value}{text}{end}{{% endfor %}}"


FAMILIES = {
    "an object between tags": Family(
        open='<call>\n{"name": "', middle='", "arguments": ', close="}\n</call>", between="\n"
    ),
    "an object with keys of its own": Family(
        open='<|call|>{"call_no": {{ loop.index }}, "tool": "', middle='", "input": ', close="}<|done|>"
    ),
    "a list between tags": Family(
        before="<calls>[",
        open='{"name": "',
        middle='", "arguments": ',
        close="}",
        between=", ",
        after="]</calls>",
    ),
    "lines between tags": Family(
        before="<calls>\n", open='{"name": "', middle='", "arguments": ', close="}\n", after="</calls>"
    ),
    "a name as a key": Family(
        before="<|calls|>[", open='{"', middle='": ', close="}", between=", ", after="]<|done|>"
    ),
    "a name before JSON": Family(
        before="<|calls|>",
        open="<|call|>functions.",
        middle=":{{ loop.index0 }}<|arguments|>",
        close="<|done|>",
        after="<|calls_done|>",
    ),
    "an id before a name": Family(
        open="<|call|>{{ c.id }}<|name|>", middle="<|arguments|>", close="<|done|>", after="<|calls|>"
    ),
    "a name in a tag": Family(open="<function=", middle=">", close="</function>"),
    "no end of a call": Family(open="[CALL]", middle="[WITH]"),
    "one call at most": Family(open='<|call|>{"name": "', middle='", "arguments": ', close="}", many=False),
    "a tag for each parameter": Family(
        before="\n<m:calls>\n",
        open='<invoke name="',
        middle='">\n',
        arguments=tagged('<parameter name="', '">', "</parameter>\n"),
        close="</invoke>\n",
        after="</m:calls>",
    ),
    "a type in each tag": Family(
        open='<|open|>call tool="',
        middle='" index="{{ loop.index }}"<|sep|>',
        arguments=tagged(
            '<|open|>argument key="',
            '" type="{% if v is string %}string{% else %}other{% endif %}"<|sep|>',
            "<|close|>argument<|sep|>",
        ),
        close="<|close|>call<|sep|>",
    ),
    "tagged keys and values": Family(
        before="<calls:x>\n",
        open="<call:x>",
        middle="<sep:x>\n",
        arguments=tagged("<key:x>", "</key:x>\n<value:x>", "</value:x>\n"),
        close="</call:x>\n",
        after="</calls:x>",
    ),
    "values on lines of their own": Family(
        open="<call>\n<function=",
        middle=">\n",
        arguments=tagged("<parameter=", ">\n", "\n</parameter>\n"),
        close="</function>\n</call>",
        between="\n",
    ),
    "turns in tags of two tokens": Family(
        before="<|open|>tools<|sep|>",
        open='<|open|>call tool="',
        middle='"<|sep|>',
        close="<|close|>call<|sep|>",
        after="<|close|>tools<|sep|>",
        says=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
        ends="<|close|>message<|sep|>",
        think=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ),
    "a message of its own": Family(
        open='<|end|>\n<|function|>\n{"name": "', middle='", "arguments": ', close="}", many=False
    ),
    "strings in CDATA": Family(
        open='<function name="',
        middle='">',
        arguments=tagged(
            '<param name="',
            "\">{% if '<' in v | string %}<![CDATA[{% endif %}",
            "{% if '<' in v | string %}]]>{% endif %}</param>",
        ),
        close="</function>",
        between="\n",
    ),
    "thinking that is empty before calls": Family(
        before="{% if not m.reasoning_content %}<think></think>{% endif %}<|calls|>",
        open="<|call|>",
        middle="<|arguments|>",
        close="<|done|>",
        after="<|calls_done|>",
    ),
    "content in tags": Family(
        open='<|call|>{"name": "',
        middle='", "arguments": ',
        close="}<|done|>",
        says=("<|text|>", "<|text_end|>"),
    ),
    "other tags around thinking": Family(
        open='<call>{"name": "',
        middle='", "arguments": ',
        close="}</call>",
        think=("<|thinks|>\n", "\n<|thought|>"),
    ),
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(DEMO)


def rendered(source: str, tokenizer: Tokenizer) -> Renderings:
    """What the engine's renderer makes of the conversations."""
    template = ChatTemplate({"default": source}, tokenizer, "")

    class Rendering:
        async def render(self, chat: Chat) -> str:
            return template.render(chat)

    return asyncio.run(renderings(cast(AsyncEngine, Rendering())))


def found(name: str, tokenizer: Tokenizer, tokens: tuple[str, ...] = ()) -> Format:
    made = derived(rendered(FAMILIES[name].source, tokenizer), tokens, ("<|end|>",))
    assert made is not None
    return made


def call(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": "abcdefghi", "type": "function", "function": function}


def reply(
    name: str, tokenizer: Tokenizer, *calls: dict[str, Any], content: str = "", thought: str = ""
) -> str:
    """What the family's template writes between the start and the end of the assistant's turn."""
    template = ChatTemplate({"default": FAMILIES[name].source}, tokenizer, "")
    asked = {"role": "user", "content": "x"}
    more = {"reasoning_content": thought} if thought else {}
    turn = {"role": "assistant", "content": content, "tool_calls": list(calls), **more}
    text = template.render(Chat([asked, turn], add_generation_prompt=False))
    return text[len(template.render(Chat([asked]))) :].removesuffix("\n").removesuffix("<|end|>")


def forced_text(name: str, tokenizer: Tokenizer, *calls: dict[str, Any]) -> str:
    """What the template writes of calls alone."""
    return (
        reply(name, tokenizer, *calls)
        .removesuffix(FAMILIES[name].ends)
        .replace("<think></think>", "")
        .strip()
    )


def read(format_: Format, parts: list[str]) -> list[Piece]:
    parser = Parser(format_, {one.name: one for one in TOOLS}, "")
    return joined([*(piece for part in parts for piece in parser.feed(part)), *parser.finish()])


def text_of(told: list[Piece], kind: type) -> str:
    return "".join(getattr(one, "text", "") for one in told if isinstance(one, kind))


@pytest.mark.sampled(keep=8)
@pytest.mark.parametrize("name", FAMILIES)
def test_what_the_template_writes_comes_back(name: str, tokenizer: Tokenizer) -> None:
    calls = [call("get_weather", ARGUMENTS), call("ping", {})][: 2 if FAMILIES[name].many else 1]
    wanted = [("get_weather", ARGUMENTS), ("ping", {})][: len(calls)]
    text = reply(name, tokenizer, *calls, content="Let me see.", thought="I think\nso")
    format_ = found(name, tokenizer)
    whole = read(format_, [text])
    assert calls_of(whole) == wanted
    assert len([one for one in whole if isinstance(one, CallEnd)]) == len(wanted)
    assert text_of(whole, Reasoning) == "I think\nso"
    assert text_of(whole, Content) == "Let me see."
    for i in range(1, len(text)):
        assert read(format_, [text[:i], text[i:]]) == whole, i
    assert read(format_, list(text)) == whole


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_without_calls_is_content(name: str, tokenizer: Tokenizer) -> None:
    format_, text = found(name, tokenizer), reply(name, tokenizer, content="Let me see.", thought="So.")
    for parts in ([text], list(text)):
        assert read(format_, parts) == [Reasoning("So."), Content("Let me see.")]
    parser = Parser(format_, {}, "")
    assert joined([*parser.feed(text), *parser.finish()]) == [Reasoning("So."), Content("Let me see.")]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_cut_call_does_not_end(name: str, tokenizer: Tokenizer) -> None:
    text, format_ = reply(name, tokenizer, call("get_weather", ARGUMENTS)), found(name, tokenizer)
    for i in range(len(text)):
        told = read(format_, [text[:i]])
        if any(isinstance(one, CallEnd) for one in told):
            assert calls_of(told) == [("get_weather", ARGUMENTS)], i


@pytest.mark.sampled(keep=6)
@pytest.mark.parametrize("as_tokens", ["none", "plain", "control"])
@pytest.mark.parametrize("name", FAMILIES)
def test_what_the_template_writes_is_what_is_forced(name: str, as_tokens: str, tokenizer: Tokenizer) -> None:
    family, arguments = FAMILIES[name], {**ARGUMENTS, "city": "Oslo é"}
    used = Vocabulary.from_file(str(DEMO / "tokenizer.json"))
    marks = sorted({one for one in MARK.findall(family.source) if " " not in one and "{" not in one})
    if as_tokens != "none":
        special = as_tokens == "control"
        used.add_tokens([AddedToken(one, special=special, normalized=False) for one in marks])
    format_ = found(name, tokenizer, () if as_tokens == "none" else tuple(marks))
    known = known_of(format_, used)
    one, two = call("get_weather", arguments), call("ping", {})
    forced = known.forced(TOOLS, many=False)
    text = forced_text(name, tokenizer, one)
    assert accepts(forced, text, used)
    assert calls_of(read(format_, [text])) == [("get_weather", arguments)]
    without = {key: value for key, value in arguments.items() if key != "city"}
    for wrong in (call("rm_rf", arguments), call("get_weather", without)):
        assert not accepts(forced, forced_text(name, tokenizer, wrong), used)
    for text in ("", "Hello", forced_text(name, tokenizer, one) + "Hello"):
        assert not accepts(forced, text, used), text
    both = forced_text(name, tokenizer, one, two)
    if not family.many:
        text = forced_text(name, tokenizer, one)
        assert not accepts(known.forced(TOOLS, many=True), text + text, used)
    else:
        assert not accepts(forced, both, used)
        assert accepts(known.forced(TOOLS, many=True), both, used)


SCRAPS = st.sampled_from(
    [
        *("<call>", "</call>", "<|call|>", "<|done|>", '{"name": "ping"', ', "arguments": {}}', "ping", "["),
        *("<function=", ">", "</function>", "<key:x>", "<call:x>", "</call:x>", "<think>", "</think>", "]"),
        *(
            '<invoke name="',
            '">',
            "</invoke>",
            "</parameter>",
            "[CALL]",
            "[WITH]",
            "{}",
            "<calls>",
            "</calls>",
        ),
        *("words", "\n", '"'),
    ]
)


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(sorted(FAMILIES)),
    scraps=st.lists(SCRAPS, max_size=12),
    cuts=st.lists(st.integers(1, 40), max_size=8),
)
def test_any_text_split_anywhere(name: str, scraps: list[str], cuts: list[int]) -> None:
    format_ = found(name, Tokenizer(DEMO)) if name not in _FOUND else _FOUND[name]
    _FOUND[name] = format_
    text = rest = "".join(scraps)
    parts = []
    for cut in cuts:
        parts.append(rest[:cut])
        rest = rest[cut:]
    whole = read(format_, [text])
    assert read(format_, [*parts, rest]) == whole
    if all(isinstance(one, Content) for one in whole):
        silent = (*format_.between, *format_.around, *(format_.reasoning or ()))
        assert squeezed(text_of(whole, Content), silent) == squeezed(text, silent)


_FOUND: dict[str, Format] = {}


def squeezed(text: str, without: tuple[str, ...]) -> str:
    for one in without:
        text = text.replace(one, "")
    return "".join(text.split())


UNREADABLE = {
    "no calls": "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{{ tools }}",
    "no markers": replace(
        FAMILIES["an object between tags"], open='{"name": "', close="}", between="; "
    ).source,
    "arguments as in Python": Family(
        open="<call>[", middle="(", arguments=tagged("", "=", ", "), close=")]</call>"
    ).source,
    "arguments are cut": Family(
        open="<call>", middle=" ", arguments="{{ (f.arguments | tojson)[:90] }}", close="</call>"
    ).source,
    "values without an end": Family(open="<call>", arguments=tagged("<p>", "=", "")).source,
    "the name is not shown": Family(open="<call>", close="</call>")
    .source.replace("{{ f.name }}", "")
    .replace("{{ f.arguments | tojson }}", "{}"),
    "calls are refused": "{{ tools }}{% for m in messages %}{% if m.tool_calls %}{{ raise_exception('no') }}{% endif %}"
    "{{ m.content }}{% endfor %}",
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_cannot_be_read_is_not_guessed(name: str, tokenizer: Tokenizer) -> None:
    seen = rendered(UNREADABLE[name], tokenizer)
    assert derived(seen, (), ()) is None
    assert format_of(replace(INFO, chat_template=UNREADABLE[name]), "auto", seen).name == "generic"


def test_nothing_is_read_without_renderings() -> None:
    assert derived(Renderings(), (), ()) is None
    assert thinking(Renderings()) is None


def test_the_proof_counts(tokenizer: Tokenizer) -> None:
    """A template that writes difficult arguments otherwise than easy ones has no format."""
    lossy = "{{ f.arguments | tojson | replace('é', 'e') }}"
    family = replace(FAMILIES["an object between tags"], arguments=lossy)
    assert derived(rendered(family.source, tokenizer), (), ()) is None


def test_a_family_comes_first_unless_it_is_asked_otherwise(tokenizer: Tokenizer) -> None:
    source = Family(
        open='<tool_call>\n{"name": "', middle='", "arguments": ', close="}\n</tool_call>", between="\n"
    ).source
    info, seen = replace(INFO, chat_template=source), rendered(source, tokenizer)
    assert format_of(info, "auto", seen).name == "hermes"
    own = format_of(info, "template", seen)
    assert (own.name, own.calls and own.calls.open) == ("template", "<tool_call>")
    assert format_of(info, "hermes", seen).name == "hermes"


def test_thinking_shown_only_with_calls_is_found(tokenizer: Tokenizer) -> None:
    source = FAMILIES["content in tags"].source.replace(
        "{% if m.reasoning_content %}", "{% if m.reasoning_content and m.tool_calls %}"
    )
    assert thinking(rendered(source, tokenizer)) == ("<think>", "</think>")


def test_calls_shown_by_their_ids_alone_are_read_as_if_these_named_them(tokenizer: Tokenizer) -> None:
    """Kimi K2's template: ids are those of `with_naming_ids`, as the model writes them."""
    name = "a name before JSON"
    named = FAMILIES[name].source
    source = named.replace("functions.{{ f.name }}:{{ loop.index0 }}", "{{ c.id }}")
    assert source != named
    seen = rendered(source, tokenizer)
    assert seen.by_id
    assert not rendered(named, tokenizer).by_id
    assert not rendered(FAMILIES["an id before a name"].source, tokenizer).by_id
    format_ = format_of(replace(INFO, chat_template=source), "auto", seen)
    assert format_.name == "template"
    text = reply(name, tokenizer, call("get_weather", ARGUMENTS), call("ping", {}), content="So.")
    whole = read(format_, [text])
    assert calls_of(whole) == [("get_weather", ARGUMENTS), ("ping", {})]
    assert text_of(whole, Content) == "So."
