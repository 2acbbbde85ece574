"""Replies that are not quite in their format, and values that hold the format's markers: what can be told is told, and
arguments of a call that is told as ended are JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from slipstream.engine.api import Delta
from slipstream.engine.text.text_stream import TextStream
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.server.openai.formats.format import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Format,
    Reasoning,
    Tool,
    joined,
)
from slipstream.server.openai.formats.known import BY_NAME
from slipstream.server.openai.formats.reading import Known, parser_of
from slipstream.server.openai.reply_text import Reading
from tests.unit.test_derived_formats import DEMO, call, found, reply
from tests.unit.test_formats import calls_of, sum_of

STRING = {"type": "string"}
PROPERTIES = {"path": STRING, "content": STRING}
WRITE = Tool("write", {"type": "object", "properties": PROPERTIES, "required": ["content"]})
TOOLS = {one.name: one for one in (WRITE, Tool("ping", {"type": "object", "properties": {}}))}


def pieces(name: str, parts: Sequence[str], tail: str = "", **more: Any) -> list[Any]:
    """What the parts of a reply are told as, neighbours joined."""
    return read(BY_NAME[name], parts, tail, **more)


def read(format_: Format, parts: Sequence[str], tail: str = "", **more: Any) -> list[Any]:
    parser = parser_of(format_, TOOLS, tail, **more)
    return joined([*(piece for part in parts for piece in parser.feed(part)), *parser.finish()])


def written(name: str, arguments: dict[str, str]) -> str:
    """A call of `write` in a format of tags."""
    if name == "glm":
        inner = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments.items()
        )
        return f"<tool_call>write\n{inner}</tool_call>"
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function=write>\n{inner}</function>\n</tool_call>"


MARKED = [
    *(("qwen3-coder", mark) for mark in ("</tool_call>", "</parameter>", "</function>", "<tool_call>")),
    ("qwen3-coder", "<parameter=x>1</parameter> or </tool_call> <tool_call> </tool_call>"),
    ("qwen3-coder", "<function=f> </function> or </tool_call>"),
    ("glm", "</tool_call>"),
    ("glm", "</arg_value>"),
]
MARKED_DERIVED = [
    *(("a tag for each parameter", mark) for mark in ("</invoke>", "</parameter>", "</invoke>\n</m:calls>")),
    ("tagged keys and values", "</call:x>"),
    ("tagged keys and values", "</value:x> or </call:x> <call:x>"),
    ("a type in each tag", "<|close|>call<|sep|>"),
    ("values on lines of their own", "</call>"),
    ("values on lines of their own", "</parameter>"),
]


def holds(format_: Format, text: str, arguments: dict[str, str]) -> None:
    """Whether the text is read as a call of `write`, however it is split, and as none that has ended if it is cut."""
    whole = read(format_, [text])
    assert [(name, json.loads(told)) for name, told in calls_of(whole)] == [("write", arguments)]
    assert sum_of(whole, Content) == ""
    assert isinstance(whole[-1], CallEnd)
    assert read(format_, list(text)) == whole
    for i in range(1, len(text)):
        assert read(format_, [text[:i], text[i:]]) == whole, i
        for name, told in calls_of(ended(read(format_, [text[:i]]))):
            assert (name, json.loads(told)) == ("write", arguments), i


def ended(told: Sequence[Any]) -> Sequence[Any]:
    """The pieces if their call has ended, else nothing."""
    return told if any(isinstance(one, CallEnd) for one in told) else []


@pytest.mark.parametrize(("name", "mark"), MARKED)
def test_markers_in_parameters_are_text(name: str, mark: str) -> None:
    for arguments in ({"path": "a", "content": f"END = '{mark}'\nprint(END)\n"}, {"content": f"{mark} b"}):
        holds(BY_NAME[name], written(name, arguments), arguments)


@pytest.mark.parametrize(("name", "mark"), MARKED_DERIVED)
def test_markers_in_parameters_of_a_template_are_text(name: str, mark: str) -> None:
    tokenizer = Tokenizer(DEMO)
    arguments = {"path": "a", "content": f"END = '{mark}'\nprint(END)\n"}
    holds(found(name, tokenizer), reply(name, tokenizer, call("write", arguments)), arguments)


@pytest.mark.parametrize(
    ("name", "text", "arguments", "content"),
    [
        ("qwen3-coder", "<parameter=path>a</parameter></function>", {"path": "a"}, ""),
        ("qwen3-coder", "<parameter=path>\na\n</parameter>\n", {"path": "a"}, ""),
        (
            "qwen3-coder",
            "<parameter=path>\na\n</parameter>\noops</function>",
            {"path": "a"},
            "oops</function></tool_call>",
        ),
        (
            "qwen3-coder",
            "<parameter=path>\na\n</parameter>\n<parameter=content>\nb\n</function>\n",
            {"path": "a"},
            "<parameter=content>\nb\n</function>\n</tool_call>",
        ),
        (
            "qwen3-coder",
            "<parameter=path>\na\n<parameter=content>\nb\n</parameter>\n</function>\n",
            {"path": "a\n<parameter=content>\nb"},
            "",
        ),
    ],
)
def test_tags_that_are_missing(name: str, text: str, arguments: dict[str, str], content: str) -> None:
    text = f"<tool_call>\n<function=write>\n{text}</tool_call>"
    for parts in ([text], list(text)):
        told = pieces(name, parts)
        assert [(one, json.loads(said)) for one, said in calls_of(told)] == [("write", arguments)]
        assert sum_of(told, Content) == content
        assert ended(told)


def test_a_call_follows_one_without_an_end_tag() -> None:
    faulty = "<tool_call>\n<function=write>\n<parameter=path>\na\n</function>\n</tool_call>"
    told = pieces("qwen3-coder", [f"{faulty}\n{written('qwen3-coder', {'path': 'b'})}"])
    assert calls_of(told) == [("write", '{"path": "b"}')]
    assert sum_of(told, Content) == faulty


UNMARKED = [
    *(mark for name, mark in MARKED if name == "qwen3-coder"),
    "\n<function=write>\n<parameter=path>\na\n</parameter>\n",
    "\n<function=ping>\n</function>\n",
]


def every_split(name: str, text: str, tail: str = "") -> list[Any]:
    """What a reply is told as; the same however it is split."""
    whole = pieces(name, [text], tail)
    assert pieces(name, list(text), tail) == whole
    for i in range(1, len(text)):
        assert pieces(name, [text[:i], text[i:]], tail) == whole, i
    return whole


@pytest.mark.parametrize("mark", UNMARKED)
def test_calls_without_their_marker(mark: str) -> None:
    for arguments in ({"path": "a", "content": f"END = '{mark}'\nprint(END)\n"}, {"content": f"{mark} b"}):
        text = written("qwen3-coder", arguments).removeprefix("<tool_call>\n")
        holds(BY_NAME["qwen3-coder"], text, arguments)
        holds(BY_NAME["qwen3-coder"], text.removesuffix("\n</tool_call>"), arguments)


@pytest.mark.parametrize("between", ["\n</tool_call>\n", "\n"])
def test_several_calls_without_their_markers(between: str) -> None:
    call_text = (
        written("qwen3-coder", {"path": "a"}).removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    )
    ping = "<function=ping>\n</function>"
    reply_text = f"So.</think>Ok.\n{between.join([call_text, ping, ping, call_text])}\n</tool_call>\n"
    told = every_split("qwen3-coder", reply_text, "<think>\n")
    assert (sum_of(told, Reasoning), sum_of(told, Content)) == ("So.", "Ok.")
    write = ("write", '{"path": "a"}')
    assert calls_of(told) == [write, ("ping", "{}"), ("ping", "{}"), write]
    assert sum(isinstance(one, CallEnd) for one in told) == 4
    assert calls_of(every_split("qwen3-coder", f"So.</think>{ping}", "<think>")) == [("ping", "{}")]
    assert calls_of(
        every_split("qwen3-coder", f"{ping}\n</tool_call>\n<tool_call>\n{ping}\n</tool_call>")
    ) == ([("ping", "{}")] * 2)


@pytest.mark.parametrize(
    "text",
    [
        "Write <function=write>\n<parameter=path>\na\n</parameter>\n</function>",
        "So:\n<function=write> begins a call,\n<function=ping>, too.",
        "So:\n<function=foo>\n<parameter=path>\na\n</parameter>\n</function>",
        "So:\n<function=write",
        "So:\n<function=writer>\n<parameter=path>",
    ],
)
def test_a_mention_of_a_function_is_content(text: str) -> None:
    assert every_split("qwen3-coder", text) == [Content(text)]
    told = every_split("qwen3-coder", f"{text}\n{written('qwen3-coder', {'path': 'b'})}")
    assert calls_of(told) == [("write", '{"path": "b"}')]
    assert sum_of(told, Content) == text


def test_calls_without_their_marker_that_are_none() -> None:
    cut = "So:\n<function=write>\n<parameter=path>\na"
    assert every_split("qwen3-coder", cut) == [Content(cut)]
    parser = parser_of(BY_NAME["qwen3-coder"], {}, "")
    whole = f"{cut}\n</parameter>\n</function>"
    assert joined([*parser.feed(whole), *parser.finish()]) == [Content(whole)]


LINES = '{"path": "a", "content": "l1\nl2\t' + "\\\n" + r"l3 it\'s \d \\n \u00e9" + '"}'
REPAIRED = {"path": "a", "content": "l1\nl2\t\nl3 it's \\d \\n é"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", f'<tool_call>\n{{"name": "write", "arguments": {LINES}}}\n</tool_call>'),
        ("hermes", f'<tool_call>\n{{"arguments": {LINES}, "name": "write"}}\n</tool_call>'),
        (
            "hermes",
            f'<tool_call>\n{{"name": "write", "arguments": {json.dumps(LINES)}}}\n</tool_call>',
        ),
        ("llama3", f'{{"name": "write", "parameters": {LINES}}}'),
        ("mistral", f"[TOOL_CALLS]write[ARGS]{LINES}"),
        ("deepseek-v3.1", f"<｜tool▁call▁begin｜>write<｜tool▁sep｜>{LINES}<｜tool▁call▁end｜>"),
        ("harmony", f"<|channel|>commentary to=functions.write <|constrain|>json<|message|>{LINES}"),
    ],
)
def test_strings_of_json_are_put_right(name: str, text: str) -> None:
    holds(BY_NAME[name], text, REPAIRED)


@pytest.mark.parametrize(
    "more", ['"reason": "because {"', '"a": {"b": [1, "</tool_call>"]}, "c": null', '"d":2 ']
)
def test_further_keys_of_a_call_say_nothing(more: str) -> None:
    path = {"path": "a"}
    for inner in (
        f'"name": "write", "arguments": {json.dumps(path)}',
        f'"arguments": {json.dumps(path)}, "name": "write"',
    ):
        text = f"<tool_call>\n{{{inner}, {more}}}\n</tool_call>"
        holds(BY_NAME["hermes"], text, path)
        second = '\n<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
        assert calls_of(pieces("hermes", [text + second])) == [("write", json.dumps(path)), ("ping", "{}")]


def test_a_call_that_is_cut_in_a_further_key() -> None:
    text = '<tool_call>\n{"name": "write", "arguments": {}, "reason": "bec'
    for i in range(text.index("}") + 1, len(text)):
        told = pieces("hermes", [text[:i]])
        assert (calls_of(told), sum_of(told, Content)) == ([("write", "{}")], ""), i


EMPTY = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>"


def test_a_call_of_harmony_without_arguments() -> None:
    for text in (EMPTY.format("ping"), EMPTY.format("ping") + "\n<|call|>", EMPTY.format("any") + "<|call|>"):
        for parts in ([text], list(text)):
            told = pieces("harmony", parts)
            assert [json.loads(said) for _, said in calls_of(told)] == [{}]
            assert ended(told)
    assert not ended(pieces("harmony", [EMPTY.format("any")])), "it may have been cut"
    assert not ended(pieces("harmony", [EMPTY.format("write")])), "it needs arguments"


@pytest.mark.parametrize(
    ("inner", "arguments"),
    [
        (
            '"path":<|"|>a<|"|>,"content":"b, {c}: \\"d\\"\n <tool_call|>"',
            {"path": "a", "content": 'b, {c}: "d"\n <tool_call|>'},
        ),
        ('path:"a" , content:"b" and "c"', {"path": "a", "content": '"b" and "c"'}),
        ('path:"a\\d"', {"path": "a\\d"}),
        ("path:a<b,content:<i>c</i>", {"path": "a<b", "content": "<i>c</i>"}),
        ("path:http://x.y/z?a=1,content:c:d", {"path": "http://x.y/z?a=1", "content": "c:d"}),
        ('path:<|"|>a<|"|>,,', {"path": "a"}),
        ("list:[1,2,],more:{a:1,}", {"list": [1, 2], "more": {"a": 1}}),
    ],
)
def test_other_spellings_of_gemma(inner: str, arguments: dict[str, Any]) -> None:
    holds(BY_NAME["gemma4"], f"<|tool_call>call:write{{{inner}}}<tool_call|>", arguments)


def test_brackets_of_gemma_that_are_missing() -> None:
    told = pieces("gemma4", ['<|tool_call>call:write{path:<|"|>a<|"|>,more:{a:[1}<tool_call|>'])
    assert [json.loads(said) for _, said in calls_of(told)] == [{"path": "a", "more": {"a": [1]}}]
    for cut in ("{path:<tool_call|>", '{path:a,content:<|"|><tool_call|>', '{path:"a"<tool_call|>'):
        assert not ended(pieces("gemma4", [f"<|tool_call>call:write{cut}"])), "this is no JSON"


THINKING = [
    ("hermes", "<think>\n", "</think>", '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'),
    ("qwen3-coder", "<think>\n", "</think>", "<tool_call>\n<function=ping>\n</function>\n</tool_call>"),
    ("glm", "<think>", "</think>", "<tool_call>ping</tool_call>"),
    ("gemma4", "<|channel>thought\n", "<channel|>", "<|tool_call>call:ping{}<tool_call|>"),
    ("mistral", "[THINK]", "[/THINK]", "[TOOL_CALLS]ping[ARGS]{}"),
    (
        "deepseek-v3.1",
        "<think>",
        "</think>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>ping<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
]
THOUGHT = [
    Reasoning("So <tool_call>{ it is.\n<tool_call> ends"),
    CallStart("ping"),
    CallArguments("{}"),
    CallEnd(),
]


@pytest.mark.parametrize(("name", "opener", "closer", "text"), THINKING)
def test_a_call_ends_thinking(name: str, opener: str, closer: str, text: str) -> None:
    thought = "So <tool_call>{ it is.\n<tool_call> ends\n"
    for tail, reply_text in (("", opener + thought + text), (opener, thought + text)):
        for parts in ([reply_text], list(reply_text)):
            assert pieces(name, parts, tail) == THOUGHT
        for i in range(1, len(reply_text)):
            assert pieces(name, [reply_text[:i], reply_text[i:]], tail) == THOUGHT, i
    assert pieces(name, [text], opener) == THOUGHT[1:], "there was no thinking"
    assert pieces(name, [thought + closer + text], opener) == THOUGHT
    aloud = pieces(name, [thought + text], opener, thinks_aloud=True)
    assert aloud == [Content(thought + closer), *THOUGHT[1:]]
    without = parser_of(BY_NAME[name], {}, opener)
    assert sum_of([*without.feed(thought + text), *without.finish()], Reasoning).startswith(
        thought + text[:9]
    )


@pytest.mark.parametrize(("name", "opener", "closer", "text"), THINKING)
def test_a_draft_of_a_forced_call_is_thinking(name: str, opener: str, closer: str, text: str) -> None:
    thought = f"I could call\n{text}"
    for parts in ([thought + closer + text], list(thought + closer + text)):
        assert pieces(name, parts, opener, is_forced=True) == [Reasoning(thought), *THOUGHT[1:]]


def test_a_call_ends_thinking_in_a_format_of_a_template() -> None:
    tokenizer = Tokenizer(DEMO)
    for name in (
        "an object between tags",
        "tagged keys and values",
        "a tag for each parameter",
        "an id before a name",
    ):
        text = "<think>So.\n" + reply(name, tokenizer, call("ping", {})).strip()
        for parts in ([text], list(text)):
            assert read(found(name, tokenizer), parts) == [Reasoning("So."), *THOUGHT[1:]], name


def test_a_parameter_is_told_when_the_next_one_begins() -> None:
    parser = parser_of(BY_NAME["qwen3-coder"], TOOLS, "")
    parser.feed("<tool_call>\n<function=write>\n<parameter=path>\na\n</parameter>\n")
    assert [type(one) for one in parser.feed("<parameter=")][:1] == [CallStart]


@pytest.mark.parametrize("stop", [(), ("\n\nUser:",), ("i\nx", "<|stop"), ("Hi\n<|x",)])
def test_an_unused_control_token_is_left_out_behind_text_that_was_held(stop: tuple[str, ...]) -> None:
    tokenizer = Tokenizer(DEMO)
    known = Known(BY_NAME["hermes"], controls=frozenset(tokenizer.control_ids))
    text = Reading(known=known, tools=TOOLS, silent=known.silent)("")
    stream = TextStream(tokenizer, (), stop, skip_special=False)
    ids = tokenizer.encode("Hi\n<|endoftext|><|im_start|>there<", add_special=False)
    tokens = [(one, stream.push(one)) for one in ids] + [(0, stream.flush())]
    told = [piece for one, shown in tokens for piece in text.feed(Delta(shown, (one,), (None,), (shown,)))]
    assert joined([*told, *text.finish()]) == [Content("Hi\nthere<")]
