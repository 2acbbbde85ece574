"""llama.cpp's own vocabularies: the ids that it expects for its texts, and random texts there and back.

GGUF_VOCABS names the folder that has them, `models/` of its repository: ggml-vocab-NAME.gguf with .inp and .out beside.

    GGUF_VOCABS=llama.cpp/models python -m pytest -m slow tests/oracle/test_gguf_vocabularies.py
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.engine.text.gguf.gguf_text import gguf_source
from slipstream.engine.text.tokenizer import Tokenizer

FOLDER = os.environ.get("GGUF_VOCABS")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(FOLDER is None, reason="GGUF_VOCABS names no folder of vocabularies"),
]
NAMES = (
    *("llama-bpe", "llama-spm", "qwen2", "qwen35", "deepseek-llm", "deepseek-coder", "gemma-4"),
    *("gpt-2", "mpt", "phi-3", "starcoder", "refact", "command-r"),
)
NO_F1 = ("starcoder", "refact")  # have no token for the byte 0xF1, so no characters from U+40000 to U+7FFFF
SEPARATOR = "\n__ggml_vocab_test__\n"
N_TEXTS = 100_000
Vocabulary = tuple[Path, dict[str, Any], Tokenizer]  # file, metadata


@pytest.fixture(scope="module", params=NAMES)
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    gguf = pytest.importorskip("gguf")
    path = Path(str(FOLDER)) / f"ggml-vocab-{request.param}.gguf"
    fields = gguf.GGUFReader(path).fields
    metadata = {name: field.contents() for name, field in fields.items() if name.startswith("tokenizer.")}
    return path, metadata, Tokenizer(gguf_source(metadata, path.name))


def test_ids_are_those_that_llama_cpp_expects(vocabulary: Vocabulary) -> None:
    path, _, tokenizer = vocabulary
    texts = Path(f"{path}.inp").read_bytes().decode().removesuffix(SEPARATOR).split(SEPARATOR)
    expected = [[int(one) for one in line.split()] for line in Path(f"{path}.out").read_text().splitlines()]
    assert len(texts) == len(expected) > 40
    assert tokenizer.encode_all(texts, add_special=False, parse_special=False) == expected


def test_random_texts_come_back(vocabulary: Vocabulary) -> None:
    path, metadata, tokenizer = vocabulary
    if any(name in path.name for name in NO_F1):
        pytest.skip("the vocabulary cannot write all characters")
    has_prefix = metadata["tokenizer.ggml.model"] == "llama" and metadata.get(
        "tokenizer.ggml.add_space_prefix", True
    )
    prefix = b" " if has_prefix else b""
    is_byte_level = metadata["tokenizer.ggml.model"] == "gpt2"
    for texts in batches(random.Random(1), N_TEXTS):
        # Vocabularies over characters take U+2581 for a space.
        given = texts if is_byte_level else [text.replace("\u2581", "") for text in texts]
        for ids, text in zip(tokenizer.encode_all(given, add_special=False), given, strict=True):
            assert tokenizer.decode(ids, skip_special=False) == text
            assert b"".join(map(tokenizer.token_bytes, ids)).removeprefix(prefix) == text.encode()


def batches(dice: random.Random, n: int) -> Iterator[list[str]]:
    """Texts of up to 23 characters: ASCII, spaces, scripts, anything that Unicode has room for."""
    for _ in range(n // 1000):
        yield ["".join(character(dice) for _ in range(dice.randrange(24))) for _ in range(1000)]


def character(dice: random.Random) -> str:
    kind = dice.randrange(10)
    if kind < 3:
        return chr(dice.randrange(0x20, 0x7F))
    if kind == 3:
        return dice.choice(" \t\n\r ")
    code = dice.randrange((0x600, 0x3000, 0x110000)[kind % 3])
    return chr(code) if not 0xD800 <= code < 0xE000 else "\ufffd"
