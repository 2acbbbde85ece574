"""Tokenizers in tiktoken's form against its algorithm, written here anew, and refusals of damaged files."""

from __future__ import annotations

import base64
import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import regex
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from slipstream.engine.errors import LoadError, UnsupportedModel
from slipstream.engine.text.byte_level import BYTE_OF
from slipstream.engine.text.tiktoken_file import FILE, PIECES
from slipstream.engine.text.tokenizer import Tokenizer
from tests.checkpoints import SENTENCES

HAN = "漢字和中文，还有更多的句子。中文和漢字！深度学习模型的中文分词。"
TEXTS = (
    *SENTENCES,
    HAN,
    "DON'T I'LL you're 12345 67",
    "a\u0301e\u0301 Ǆ ʰ ªº",
    " \t\n\r\n  x   ",
    "🙂👩‍👩‍👧 עברית ไทย",
)
NAMED = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 255: "[PAD]"}


@pytest.fixture(scope="module")
def tokens() -> list[bytes]:
    """A vocabulary by rank: all bytes, then what a trainer merges."""
    made = HFTokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=600, show_progress=False, initial_alphabet=alphabet)
    made.train_from_iterator([*SENTENCES, HAN] * 3, trainer)
    by_id = sorted(made.get_vocab().items(), key=lambda pair: pair[1])
    return [b"".join(BYTE_OF[char] for char in text) for text, _ in by_id]


def written_to(folder: Path, tokens: list[bytes], **changes: Any) -> Path:
    lines = [b"%s %d" % (base64.b64encode(token), i) for i, token in enumerate(tokens)]
    (folder / FILE).write_bytes(b"\n".join(lines) + b"\n")
    added = {str(len(tokens) + i): {"content": text, "special": True} for i, text in NAMED.items()}
    config = {
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "added_tokens_decoder": added,
        "eos_token": "[EOS]",
        **changes,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def encoded(text: str, ranks: dict[bytes, int]) -> list[int]:
    """tiktoken's algorithm: of all neighbours those merge that make the token of the lowest rank, the leftmost."""
    ids = []
    for match in regex.finditer(PIECES, text, regex.V1):
        piece = match[0].encode()
        parts = [bytes([byte]) for byte in piece]
        while piece not in ranks and len(parts) > 1:
            made = [ranks.get(a + b) for a, b in itertools.pairwise(parts)]
            known = [rank for rank in made if rank is not None]
            if not known:
                break
            at = made.index(min(known))
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [ranks[piece]] if piece in ranks else [ranks[part] for part in parts]
    return ids


def test_texts_become_the_ids_of_tiktokens_algorithm(tokens: list[bytes], tmp_path: Path) -> None:
    tokenizer = Tokenizer(written_to(tmp_path, tokens))
    ranks = {token: i for i, token in enumerate(tokens)}
    rng = random.Random(1)
    alphabet = "".join(TEXTS)
    drawn = ["".join(rng.choices(alphabet, k=rng.randint(1, 60))) for _ in range(2000)]
    for text in (*TEXTS, *drawn):
        ids = tokenizer.encode(text)
        assert ids == encoded(text, ranks), text
        assert b"".join(tokens[i] for i in ids).decode() == text
        assert tokenizer.decode(ids) == text


def test_special_tokens_lie_behind_the_vocabulary(tokens: list[bytes], tmp_path: Path) -> None:
    tokenizer, first = Tokenizer(written_to(tmp_path, tokens)), len(tokens)
    assert tokenizer.vocab_size == first + 256
    for i in range(256):
        text = NAMED.get(i, f"<|reserved_token_{first + i}|>")
        assert tokenizer.encode(text) == [first + i]
        assert tokenizer.control_ids[text] == first + i
    assert tokenizer.eos_ids == {first + 1}
    plain = tokenizer.encode("a[EOS]b", parse_special=False)
    assert first + 1 in tokenizer.encode("a[EOS]b")
    assert max(plain) < first


def test_a_tokenizer_json_comes_first(tokens: list[bytes], tmp_path: Path) -> None:
    other = HFTokenizer(models.WordLevel({"one": 0, "two": 1}, unk_token="one"))
    other.save(str(written_to(tmp_path, tokens) / "tokenizer.json"))
    assert Tokenizer(tmp_path).vocab_size == 2


def line(number: int, text: bytes) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        lines = (folder / FILE).read_bytes().splitlines()
        lines[number - 1] = text
        (folder / FILE).write_bytes(b"\n".join(lines))

    return edit


def without_a_byte(folder: Path) -> None:
    lines = (folder / FILE).read_bytes().splitlines()
    line(200, b"%s 199" % base64.b64encode(b"no such word here"))(folder)
    assert len(lines) > 256


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (line(300, b"*** 299"), r"tiktoken\.model: line 300: no token in base64"),
        (line(300, b"AAAA 300"), r"line 300: must be a token of 1 to 2048 bytes and its rank, 299"),
        (line(300, b"AAAA"), r"line 300: must be a token"),
        (line(300, b" 299"), r"line 300: must be a token"),
        (line(300, b"%s 299" % base64.b64encode(b"A")), r"line 300: the token has rank \d+ too"),
        (without_a_byte, r"tiktoken\.model: the vocabulary lacks bytes"),
        (lambda folder: (folder / FILE).write_bytes(b""), "lacks bytes, the first is 0"),
    ],
)
def test_damaged_files_are_refused(
    tokens: list[bytes], edit: Callable[[Path], Any], message: str, tmp_path: Path
) -> None:
    edit(written_to(tmp_path, tokens))
    with pytest.raises(LoadError, match=message):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"auto_map": None},
            UnsupportedModel,
            r"cuts a text is not known: only files beside tokenization_kimi\.py",
        ),
        ({"added_tokens_decoder": {"x": {"content": "y"}}}, LoadError, "'x' names no token"),
        ({"added_tokens_decoder": {"600": {"content": ""}}}, LoadError, "'600' names no token"),
        (
            {"added_tokens_decoder": {"9999": {"content": "y"}}},
            LoadError,
            "token 9999 .* not among the 256 behind",
        ),
        (
            {"added_tokens_decoder": {"600": {"content": "y"}, "601": {"content": "y"}}},
            LoadError,
            "two special tokens one text",
        ),
    ],
)
def test_what_the_config_cannot_mean_is_refused(
    tokens: list[bytes], changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        Tokenizer(written_to(tmp_path, tokens, **changes))
