"""Where tokens begin in a reply's text, and which of them the client has seen text of."""

from __future__ import annotations

import random

import pytest

from slipstream.engine.text.text_stream import N_PENDING_MAX, TextStream
from slipstream.engine.text.token_places import TokenPlaces, begins_of
from slipstream.engine.text.tokenizer import Tokenizer
from tests.checkpoints import write_tokenizer

BEGIN, END = 1, 2  # control tokens


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer(folder)


def steps(
    stream: TextStream, ids: list[int], *, n_left_out: int = 0
) -> list[tuple[str, list[tuple[int, int]]]]:
    """What each token and the end make visible: text, and (number, offset) of tokens with text."""
    found = []
    for one in ids:
        text = stream.push(one)
        found.append((text, stream.begun()))
    text = stream.flush(n_left_out=n_left_out)
    found.append((text, stream.begun()))
    return [(text, [(one.number, one.offset) for one in begun if one.has_text]) for text, begun in found]


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    by_byte = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}
    return [by_byte[bytes([one])] for one in data]


@pytest.mark.parametrize(
    ("parts", "begins"),
    [
        ([b"a", b"bc", b"d"], [0, 1, 3]),
        (["é".encode()[:1], "é".encode()[1:] + b"x", b"y"], [0, 0, 2]),
        (["漢".encode()[:1], "漢".encode()[1:] + "字".encode()[:2], "字".encode()[2:]], [0, 0, 1]),
        ([b"\xc3", b"a", b"b"], [0, 1, 2]),  # the first is no character: U+FFFD
        ([b"", b"a", b"", b"b"], [0, 0, 1, 1]),
        ([b"\x82", b"\x82a", b"b"], [0, 1, 3]),
    ],
)
def test_parts_of_a_text_begin_in_characters(parts: list[bytes], begins: list[int]) -> None:
    assert begins_of(parts) == begins
    if b"\xc3" not in parts:
        text = b"".join(parts).decode(errors="replace")
        assert all(at <= len(text) for at in begins)


def test_a_token_waits_with_its_text(tokenizer: Tokenizer) -> None:
    ids = byte_ids(tokenizer, "a漢b".encode())
    stream = TextStream(tokenizer, [], ("bc",), with_places=True)
    assert steps(stream, ids) == [
        ("a", [(0, 0)]),
        ("", []),
        ("", []),
        ("漢", [(1, 1), (2, 1), (3, 1)]),
        ("", []),  # it could become the stop string
        ("b", [(4, 2)]),
    ]


@pytest.mark.parametrize(
    ("n_visible", "numbers"), [(0, []), (1, [0, 1, 2]), (2, [0, 1, 2, 3]), (3, [0, 1, 2, 3, 4])]
)
def test_a_cut_drops_what_begins_behind_it(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, n_visible: int, numbers: list[int]
) -> None:
    data = "漢字!".encode()
    # The third token begins inside the first character and ends inside the second.
    parts = [data[:1], data[1:2], data[2:5], data[5:6], data[6:]]
    monkeypatch.setattr(tokenizer, "token_bytes", lambda token_id: parts[token_id - 100])
    places = TokenPlaces(tokenizer, skip_special=True)
    places.add([100, 101, 102, 103, 104], data.decode(), 5)
    assert [one.number for one in places.take(n_visible, is_complete=False)] == numbers
    assert [one.number for one in places.take(n_visible, is_complete=False)] == []


def test_tokens_left_out_of_the_text_have_no_text(tokenizer: Tokenizer) -> None:
    a, b = byte_ids(tokenizer, b"ab")
    for skips in (True, False):
        stream = TextStream(tokenizer, [], skip_special=skips, with_places=True)
        shown = [stream.push(one) for one in (a, BEGIN, b)] + [stream.flush(n_left_out=1)]
        places = stream.begun()
        assert [one.number for one in places] == [0, 1, 2, 3]
        assert [one.has_text for one in places] == [True, not skips, True, False]
        assert places[-1].offset == stream.n_visible == len("".join(shown))
        assert ("".join(shown) == "ab") == skips


def test_the_end_token_behind_a_stop_string_has_no_place(tokenizer: Tokenizer) -> None:
    a, b = byte_ids(tokenizer, b"ab")
    stream = TextStream(tokenizer, [], ("b",), with_places=True)
    assert steps(stream, [a, b], n_left_out=1) == [("a", [(0, 0)]), ("", []), ("", [])]
    assert stream.begun() == []


def test_any_bytes_have_places_in_their_text(tokenizer: Tokenizer) -> None:
    """Broken characters and endless ones too; and a stream that is cut back goes on as if it had not been."""
    rng = random.Random(5)
    bytes_ = byte_ids(tokenizer, bytes([0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x61]))
    for number in range(200):
        pool = bytes_[: 6 if number % 10 == 0 else None]
        ids = [rng.choice([*pool, END] if number % 3 == 0 else pool) for _ in range(rng.randrange(1, 70))]
        stream = TextStream(tokenizer, [], ("a\u20ac",), with_places=True)
        text, begun = "", []
        for i, one in enumerate(ids):
            text += stream.push(one)
            begun += stream.begun()
            assert all(place.offset < len(text) for place in begun)
            if number % 2 and rng.random() < 0.1:
                stream = stream.restarted([], ids[: i + 1])
                assert stream.n_visible == len(text)
        text += stream.flush()
        begun += stream.begun()
        assert [one.offset for one in begun] == sorted(one.offset for one in begun)
        numbers = [one.number for one in begun]
        assert numbers == list(range(len(numbers)))
        if stream.stopped is None:
            assert len(numbers) == len(ids)
            if len(ids) < N_PENDING_MAX and END not in ids:
                parts = [tokenizer.token_bytes(one) for one in ids]
                assert [one.offset for one in begun] == begins_of(parts)


def test_nothing_is_noted_unasked(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, [])
    stream.push(byte_ids(tokenizer, b"a")[0])
    assert stream.begun() == []
