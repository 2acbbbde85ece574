"""Tokenizers kept in tiktoken's form: a `tiktoken.model` of tokens and ranks, as Kimi's checkpoints have it.

A line is a token's bytes in base64 and its rank, which is its id; two neighbours merge where what they make has the
lowest rank (github.com/openai/tiktoken). A byte-level BPE model does the same by a list of pairs in the order of those
ranks. How a text is cut before that stands in Python code beside the file, which is not run: the cuts here are those
of moonshotai's `tokenization_kimi.py`.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as HFTokenizer

from slipstream.engine.errors import LoadError, UnsupportedModel
from slipstream.engine.text.byte_level import written
from slipstream.engine.text.json_file import check_regular, read_object

FILE, CODE = "tiktoken.model", "tokenization_kimi"
N_RESERVED = 256  # ids behind the vocabulary, for special tokens; those without a name are reserved ones
MOST_TOKENS, LONGEST = 2_000_000, 2048  # of a file; bytes of a token
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PIECES = "|".join(
    (
        r"[\p{Han}]+",
        rf"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def open_tiktoken(folder: Path) -> HFTokenizer:
    """The tokenizer of a checkpoint folder with such a file. Raises `LoadError`, `UnsupportedModel`."""
    path = folder / FILE
    config = read_object(folder / "tokenizer_config.json")
    if CODE not in str(config.get("auto_map")):
        raise UnsupportedModel(
            f"{path}: how its vocabulary cuts a text is not known: only files beside {CODE}.py are read"
        )
    ranks = read_ranks(path)
    try:
        tokenizer = HFTokenizer(models.BPE(vocab=ranks, merges=merges_by_rank(ranks), ignore_merges=True))
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception for every fault of the lists
        raise LoadError(f"{path}: not a usable vocabulary ({error})") from None
    cuts = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for added in special_tokens(config, len(ranks), path):
        tokenizer.add_special_tokens([added])
    return tokenizer


def read_ranks(path: Path) -> dict[str, int]:
    """The tokens as a byte-level vocabulary writes them, with their ranks: 0, 1, 2 … Raises `LoadError`."""
    check_regular(path)
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise LoadError(f"{path}: not readable ({error})") from None
    if len(lines) > MOST_TOKENS:
        raise LoadError(f"{path}: has {len(lines)} lines, at most {MOST_TOKENS}")
    ranks: dict[str, int] = {}
    for i, line in enumerate(lines):
        text, _, rank = line.partition(b" ")
        try:
            token = base64.b64decode(text, validate=True)
        except binascii.Error as error:
            raise LoadError(f"{path}: line {i + 1}: no token in base64 ({error})") from None
        if not 1 <= len(token) <= LONGEST or rank.strip() != b"%d" % i:
            raise LoadError(
                f"{path}: line {i + 1}: must be a token of 1 to {LONGEST} bytes and its rank, {i}"
            )
        if ranks.setdefault(written(token), i) != i:
            raise LoadError(f"{path}: line {i + 1}: the token has rank {ranks[written(token)]} too")
    missing = [byte for byte in range(256) if written(bytes([byte])) not in ranks]
    if missing:
        raise LoadError(f"{path}: the vocabulary lacks bytes, the first is {missing[0]}")
    return ranks


def merges_by_rank(ranks: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every pair of tokens that makes a third, those of lower ranks first."""
    return [
        (text[:i], text[i:])
        for text in ranks
        for i in range(1, len(text))
        if text[:i] in ranks and text[i:] in ranks
    ]


def special_tokens(config: Mapping[str, Any], first: int, path: Path) -> list[AddedToken]:
    """The tokens behind the vocabulary, by id: named in tokenizer_config.json, or reserved. Raises `LoadError`."""
    listed = config.get("added_tokens_decoder")
    named: dict[int, str] = {}
    for key, one in (listed if isinstance(listed, dict) else {}).items():
        text = one.get("content") if isinstance(one, dict) else None
        if not key.isdecimal() or not isinstance(text, str) or not text:
            raise LoadError(f"{path}: added_tokens_decoder of tokenizer_config.json: {key!r} names no token")
        if not first <= int(key) < first + N_RESERVED:
            raise LoadError(
                f"{path}: token {key} of tokenizer_config.json is not among the {N_RESERVED} behind its {first}"
            )
        named[int(key)] = text
    texts = [named.get(i, f"<|reserved_token_{i}|>") for i in range(first, first + N_RESERVED)]
    if len(set(texts)) != len(texts):
        raise LoadError(f"{path}: tokenizer_config.json gives two special tokens one text")
    return [AddedToken(text, special=True, normalized=False) for text in texts]
