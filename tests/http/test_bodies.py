"""Bodies that are no JSON object, or sent as something else: refused alike, wherever JSON is read."""

from __future__ import annotations

import json

import pytest

from tests.http.serving import Served, chat
from tests.http.test_malformed import CANARY, CHAT, TEXT, answered, dumped, refused

NOT_JSON = [
    pytest.param(b"", id="empty"),
    pytest.param(b"{", id="cut"),
    pytest.param(b'{"prompt": "%s' % CANARY.encode(), id="cut string"),
    pytest.param(b"[]", id="list"),
    pytest.param(b'"%s"' % CANARY.encode(), id="string"),
    pytest.param(b"null", id="null"),
    pytest.param(b"5", id="number"),
    pytest.param(b'{"prompt": "x"} {"prompt": "x"}', id="two objects"),
    pytest.param(b'{"prompt": "x",}', id="comma"),
    pytest.param(b"{'prompt': 'x'}", id="quotes"),
    pytest.param(b'{"prompt": "x", /* %s */ "n": 1}' % CANARY.encode(), id="comment"),
    pytest.param(b"\xef\xbb\xbf{}", id="byte order mark"),
    pytest.param(b"\xff\xfe{}", id="not utf-8"),
    pytest.param('{"prompt": "x"}'.encode("utf-16"), id="utf-16"),
    pytest.param(b'{"prompt": "%s\xff"}' % CANARY.encode(), id="not utf-8 in a string"),
    pytest.param(b'{"prompt": "\xc0\x80"}', id="overlong"),
    pytest.param(b'{"prompt": "\xed\xa0\x80"}', id="encoded surrogate"),
    pytest.param(b'{"prompt": "\\ud800"}', id="lone surrogate"),
    pytest.param(b'{"prompt": "\\ud800\\ud800"}', id="two high surrogates"),
    pytest.param(b'{"prompt": "a\x00b"}', id="NUL"),
    pytest.param(b'\x00{"prompt": "x"}', id="NUL in front"),
    pytest.param(b'{"prompt": "a\nb"}', id="line break in a string"),
    pytest.param(b'{"prompt": "x", "temperature": NaN}', id="NaN"),
    pytest.param(b'{"prompt": "x", "temperature": 1e999}', id="infinite"),
    pytest.param(b'{"prompt": "x", "temperature": -Infinity}', id="-Infinity"),
    pytest.param(b'{"prompt": "x", "seed": %s}' % (b"9" * 6000), id="6000 digits"),
    pytest.param(b'{"prompt": "x", "n": 01}', id="leading zero"),
    pytest.param(b'{"prompt": "x", "prompt": "%s"}' % CANARY.encode(), id="key twice"),
    pytest.param(b'{"prompt": "x", "\\u0070rompt": "y"}', id="key twice, spelt otherwise"),
    pytest.param(b'{"prompt": ["x", {"%s": 1, "%s" : 2}]}' % ((CANARY.encode(),) * 2), id="inner key twice"),
    pytest.param(b'{"prompt": ' + b"[" * 100_000, id="deep"),
    pytest.param(b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", id="deep and closed"),
    pytest.param(b'{"a": ' * 100_000 + b"1" + b"}" * 100_000, id="deep objects"),
]


@pytest.mark.parametrize("content", NOT_JSON)
@pytest.mark.parametrize("path", [TEXT, "/tokenize"])
def test_not_json(server: Served, path: str, content: bytes) -> None:
    status, error = refused(server, path, content)
    told = (status, error["type"], error["code"], error["param"])
    assert told == (400, "invalid_request_error", "invalid_json", None)
    assert error["message"].startswith("the body ")


def test_a_deep_value_is_told_short(server: Served) -> None:
    """As deep as the parser goes: the field is refused without its content."""
    for field in ("messages", "stop", "metadata", "speculative", "chat_template_kwargs"):
        content = b'{"prompt": "x", "messages": 1, "%s": %s}' % (
            field.encode(),
            b"[" * 900 + b'"%s"' % CANARY.encode() + b"]" * 900,
        )
        if field == "messages":
            content = content.replace(b'"messages": 1, ', b"")
        assert refused(server, CHAT, content)[0] == 400


def test_colons_and_escapes_are_no_keys(server: Served) -> None:
    """What looks like a key twice but is text."""
    for prompt in ('{"a":1,"a":2}', '"a": "a":', "\\", '\\":', ":", '":":'):
        for body in (json.dumps({"prompt": prompt}), json.dumps({"prompt": [prompt, prompt]}, indent=2)):
            assert answered(server, TEXT, body.encode())[0] == 200
    same = chat(metadata={"a": 1, "b": {"a": 2}}, messages=[{"role": "user", "content": "a"}] * 3)
    assert answered(server, CHAT, dumped(same))[0] == 200


def test_control_characters_are_text(server: Served) -> None:
    assert answered(server, TEXT, dumped({"prompt": "a\0b\x1b\u2028"}))[0] == 200
    assert server.engine.requests[-1].prompt == "a\0b\x1b\u2028"


@pytest.mark.parametrize(
    "kind",
    [
        "text/plain",
        "",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "application/jsonp",
        "text/json",
        CANARY,
    ],
)
def test_other_content_types(server: Served, kind: str) -> None:
    status, error = refused(server, CHAT, dumped(chat()), kind)
    assert (status, error["type"], error["code"]) == (415, "invalid_request_error", "unsupported_media_type")
    assert answered(server, CHAT, dumped(chat()), "application/json; charset=utf-8")[0] == 200


@pytest.mark.parametrize(
    ("piece", "most", "name"),
    [("[],", 2**18, "brackets"), ('{"a":1},', 2**18, "brackets"), ("7,", 2**20, "commas")],
)
def test_more_values_than_are_parsed(server: Served, piece: str, most: int, name: str) -> None:
    """By name, value and limit, before the parser has seen them; up to the limit they are parsed."""

    def body(n: int) -> bytes:
        return f'{{"prompt": "x", "other": [{piece * n}1]}}'.encode()

    status, error = refused(server, TEXT, body(most))
    assert (status, error["code"]) == (400, "body_too_complex")
    assert name in error["message"]
    assert f"at most {most} " in error["message"]
    # Not by `answered`, as its time is not the question.
    within = body(most - 2 if name == "brackets" else most - 1)
    kind = {"content-type": "application/json"}
    assert server.http.post(TEXT, content=within, headers=kind).status_code == 200


def test_a_key_twice_in_a_long_body(server: Served) -> None:
    """Read in a thread, with the same outcome: strings with any number of escapes hide no key."""
    for filling in ("\\\\", '\\"', '\\\\\\":', "\\n", "a:b,"):
        text = filling * 20_000
        assert answered(server, TEXT, f'{{"prompt": "{text}", "a": {{"prompt": 1}}}}'.encode())[0] == 200
        twice = f'{{"prompt": "{text}", "a": {{"b": "{text}", "b": 1}}}}'.encode()
        status, error = refused(server, TEXT, twice)
        assert (status, error["code"]) == (400, "invalid_json"), filling
