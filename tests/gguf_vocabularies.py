"""Small vocabularies as the key-values of GGUF files, of each kind that is supported."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from tests.checkpoints import SENTENCES

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
TEXTS = (
    *(
        "",
        " ",
        "  ",
        "\n\n",
        "\t \r\n",
        "hello world",
        " Hello, y'all!",
        "def add(left, right):\n    return left",
    ),
    *(
        "Größe 漢字 😀",
        "1234567 33 3",
        "We'VE  a'lL ''''",
        "e\u0301\u200d\u202e\ufeff",
        "\x00\ufffd",
        "a" * 300,
    ),
    *("<|im_en", "<0x41> <0xZZ>", " \u00a0\u3000x", "------=======", "नमस्ते १२३ Ⅸ ﬁ"),
)


@functools.cache
def _trained() -> str:
    """A byte-level BPE of 320 tokens, as the text of tokenizer.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=320, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return str(tokenizer.to_str())


def byte_level(pre: str, added: Sequence[tuple[str, int]] = (), **more: Any) -> dict[str, Any]:
    """Key-values of a byte-level vocabulary; added: tokens behind it with their types; more: `tokenizer.ggml.` keys."""
    model = json.loads(_trained())["model"]
    own = {text for text, _ in added}
    tokens = [text for text in sorted(model["vocab"], key=model["vocab"].get) if text not in own]
    merges = [one if isinstance(one, str) else " ".join(one) for one in model["merges"]]
    given = {"model": "gpt2", "pre": pre, "tokens": tokens, "merges": merges}
    return _with(given, [NORMAL] * len(tokens), added, more)


PIECES = (
    "▁",
    *"abcdehlnortw=-.",
    "▁a",
    "he",
    "ll",
    "hell",
    "hello",
    "▁hello",
    "aa",
    "aaa",
    "aaaa",
    "==",
    "====",
)
PIECES = (
    *PIECES,
    "lo",
    "wo",
    "▁w",
    "▁wo",
    "rd",
    "▁world",
    "or",
    "ld",
    "rld",
    "▁▁",
    "▁▁▁▁",
    "===",
    "ab",
    "aba",
    "ba",
)


def sentencepiece(added: Iterable[tuple[str, int]] = (), seed: int = 1, **more: Any) -> dict[str, Any]:
    """Key-values of a sentencepiece vocabulary of which the scores are drawn; arguments as above."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(PIECES)]
    dice = random.Random(seed)
    scores = [0.0] * 259 + [-dice.random() for _ in PIECES]
    given = {"model": "llama", "pre": "default", "tokens": tokens, "scores": scores}
    return _with(given, types, added, more)


def gemma4(added: Iterable[tuple[str, int]] = (), **more: Any) -> dict[str, Any]:
    """Key-values of a vocabulary over characters that has merges instead of scores; arguments as above."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [*[CONTROL] * 4, *[BYTE] * 256, *[NORMAL] * 9]
    tokens += ["▁", "h", "e", "l", "\n", "he", "▁he", "ll", "\n\n"]
    merges = ["h e", "l l", "▁ he", "\n \n"]
    ids = {"bos_token_id": 2, "eos_token_id": 1, "unknown_token_id": 3, "padding_token_id": 0}
    return _with({"model": "gemma4", "tokens": tokens, "merges": merges, **ids}, types, added, more)


def _with(
    given: dict[str, Any], types: list[int], added: Iterable[tuple[str, int]], more: dict[str, Any]
) -> dict[str, Any]:
    for text, kind in added:
        given["tokens"].append(text)
        types.append(kind)
        if "scores" in given:
            given["scores"].append(-1000.0)
    return {f"tokenizer.ggml.{key}": value for key, value in {**given, "token_type": types, **more}.items()}
