"""Streaming text: equal to decoding at once, no half characters, stop strings across tokens."""

from __future__ import annotations

import random

import pytest
from tokenizers import Regex, decoders, models
from tokenizers import Tokenizer as HFTokenizer

from slipstream.engine.text.panics import LibraryPanicked
from slipstream.engine.text.text_stream import N_CHARACTER, N_PENDING_MAX, TextStream
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.engine.text.tokenizer_source import TokenizerSource
from tests.checkpoints import write_tokenizer

TEXTS = ("hello world", "Größe 漢字 😀👩‍👩‍👧 end", "def add(left, right):\n    return left", "\ufffd!", "   ")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer(folder)


def pieces(stream: TextStream, ids: list[int]) -> list[str]:
    """What each token makes visible, and the rest."""
    return [*(stream.push(one) for one in ids), stream.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    found = pieces(TextStream(tokenizer, [], ()), ids)
    assert "".join(found) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in one for one in found)


def test_random_ids_join_to_the_decoded_text(tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    for _ in range(200):
        ids = [rng.randrange(3, 384) for _ in range(rng.randrange(1, 30))]
        if len(ids) < N_PENDING_MAX:
            assert "".join(pieces(TextStream(tokenizer, [], ()), ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("text", TEXTS)
def test_guessed_pieces_are_what_the_tokens_write(tokenizer: Tokenizer, text: str) -> None:
    """Wherever the guess begins, inside a character too. A reply may show some of it later."""
    ids = tokenizer.encode(text, add_special=False)
    stream, shown = TextStream(tokenizer, [], ()), ""
    for i, token_id in enumerate(ids):
        told = stream.guessed(ids[max(0, i - N_CHARACTER) : i], ids[i:])
        before = b"".join(map(tokenizer.token_bytes, ids[:i])).decode(errors="ignore")
        assert (before + "".join(told), len(told)) == (text, len(ids) - i)
        assert before.startswith(shown)
        shown += stream.push(token_id)
    assert shown + stream.flush() == text


def test_a_guess_of_no_text(tokenizer: Tokenizer) -> None:
    end, half = tokenizer.encode("</s>")[-1], tokenizer.encode("漢", add_special=False)[0]
    stream = TextStream(tokenizer, [], ())
    assert stream.guessed((), (end, half, tokenizer.vocab_size + 5)) == (tokenizer.token(end), "", "")
    assert stream.guessed((half,), tokenizer.encode("a", add_special=False)) == ("\ufffda",)


def test_prompt_is_context_and_not_text(tokenizer: Tokenizer) -> None:
    prompt, reply = tokenizer.encode("first part,"), tokenizer.encode(" second part")
    assert "".join(pieces(TextStream(tokenizer, prompt, ()), reply)) == " second part"


def test_character_split_between_prompt_and_reply(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("漢")
    assert len(ids) > 1, "the tokenizer must split it for this test"
    stream = TextStream(tokenizer, tokenizer.encode("x") + ids[:-1], ())
    assert stream.push(ids[-1]) == "漢"
    assert stream.push(tokenizer.encode("!")[0]) == "!"


def test_special_tokens_are_not_text(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("a"), 2, 1, *tokenizer.encode("b")]
    assert "".join(pieces(TextStream(tokenizer, [], ()), ids)) == "ab"


def test_incomplete_character_at_the_end(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, tokenizer.encode("before"), ())
    ids = tokenizer.encode("x漢")
    shown = [stream.push(one) for one in ids[:-1]]
    assert "".join(shown) == "x"
    assert set(stream.flush()) == {"\ufffd"}


def test_endless_broken_bytes_do_not_wait_for_ever(tokenizer: Tokenizer) -> None:
    first_byte = tokenizer.encode("漢")[0]
    stream = TextStream(tokenizer, [], ())
    shown = [stream.push(first_byte) for _ in range(3 * N_PENDING_MAX)]
    assert sum(map(bool, shown)) == 3
    assert "".join(shown) == "\ufffd" * (3 * N_PENDING_MAX)
    assert "".join([stream.push(one) for one in tokenizer.encode("ok")]) == "ok"


@pytest.mark.parametrize(
    ("stop", "text", "shown", "stopped"),
    [
        (("world",), "hello world, again", "hello ", "world"),
        (("lazy", "fox"), "the fox is lazy", "the ", "fox"),
        (("world!",), "hello world, again", "hello world, again", None),
        (("aab",), "aaab", "a", "aab"),
        (("abab", "ba"), "xabab", "xa", "ba"),
        (("\n\n",), "one\n\ntwo", "one", "\n\n"),
        (("漢",), "a漢b", "a", "漢"),
        (("",), "ab", "ab", None),
        (("end",), "the en", "the en", None),
        (("f", "e"), "def", "d", "e"),  # one token has both
    ],
)
def test_stop_strings(
    tokenizer: Tokenizer, stop: tuple[str, ...], text: str, shown: str, stopped: str | None
) -> None:
    bytewise = [one for char in text for one in tokenizer.encode(char)]
    for ids in (tokenizer.encode(text), bytewise):
        stream = TextStream(tokenizer, [], stop)
        assert "".join(pieces(stream, ids)) == shown
        assert stream.stopped == stopped
        whole = TextStream(tokenizer, [], stop, includes_stop=True)
        for one in (whole, whole.restarted([], [])):
            assert "".join(pieces(one, ids)) == shown + (stopped or "")
            assert one.stopped == stopped


def test_held_text_never_shows_a_stop_string(tokenizer: Tokenizer) -> None:
    rng = random.Random(1)
    for _ in range(300):
        text = "".join(rng.choice("ab") for _ in range(12))
        stop = tuple("".join(rng.choice("ab") for _ in range(rng.randrange(1, 5))) for _ in range(2))
        stream = TextStream(tokenizer, [], stop)
        found = ""
        for one in text:
            found += stream.push(tokenizer.encode(one)[0])
            assert text.startswith(found)
        found += stream.flush()
        first = min((text.find(one) for one in stop if one in text), default=None)
        assert (stream.stopped is None) == (first is None)
        # The string completed first wins, which may start later than one completed after it.
        assert not any(one in found for one in stop)


def test_nothing_comes_after_a_stop_string(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, [], ("b",))
    assert [stream.push(tokenizer.encode(one)[0]) for one in "abc"] == ["a", "", ""]
    assert stream.flush() == ""


@pytest.fixture(scope="module")
def metaspace(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer of the SentencePiece kind: spaces as ▁, unknown characters as bytes."""
    folder = tmp_path_factory.mktemp("metaspace")
    words = ["<unk>", "▁hello", "▁wor", "ld", "é", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {word: i for i, word in enumerate(words)}
    backend = HFTokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def test_leading_spaces_of_a_metaspace_tokenizer(metaspace: Tokenizer) -> None:
    assert pieces(TextStream(metaspace, [], ()), [1, 2, 3]) == ["hello", " wor", "ld", ""]
    han = [5 + byte for byte in "漢".encode()]
    assert pieces(TextStream(metaspace, [1], ()), [2, 3, *han]) == [" wor", "ld", "", "", "漢", ""]


def test_bytes_that_are_no_text_are_survived(metaspace: Tokenizer) -> None:
    """A byte-fallback decoder takes back text it gave when a later byte breaks the run; a stream cannot."""
    rng = random.Random(3)
    for _ in range(500):
        ids = [rng.randrange(1, 261) for _ in range(20)]
        stream = TextStream(metaspace, ids[:10], ())
        found = "".join(pieces(stream, [*ids[10:], 3, 1]))
        assert found.endswith("hello")


def test_a_token_costs_no_decoding_of_those_before(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = tokenizer.encode("hello world, def add(left, right): return ") * 100
    stream = TextStream(tokenizer, [], ("\n\nUser:", "<|stop|>"))
    monkeypatch.setattr(Tokenizer, "decode", lambda *_, **__: pytest.fail("decoded from the beginning"))
    assert "".join(map(stream.push, ids)).startswith("hello world, def add")


def test_a_panic_of_the_library_is_an_exception() -> None:
    """Here an expression without an end in the decoder's; it is tried anew with each token."""
    backend = HFTokenizer(models.WordLevel({"a" * 40: 0, "b": 1}, unk_token="b"))
    backend.decoder = decoders.Replace(Regex("(?:a|a)+(?!.|$)"), "")
    tokenizer = Tokenizer(TokenizerSource(lambda: backend, {}, frozenset(), dict, "here"))
    assert "".join(pieces(TextStream(tokenizer, []), [1])) == "b"
    stream = TextStream(tokenizer, [])
    for call in (
        lambda: stream.push(0),
        lambda: tokenizer.decode([0]),
        lambda: TextStream(tokenizer, [0]),
        lambda: TextStream(tokenizer, []).restarted([], [0]),
    ):
        with pytest.raises(LibraryPanicked) as caught:
            call()
        assert caught.value.__context__ is None, "the panic's own words may quote a text"
