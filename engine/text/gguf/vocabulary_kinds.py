"""GGUF metadata -> the parts of a Hugging Face tokenizer, for each `tokenizer.ggml.model` that is supported.

transformers has converters of its own (transformers.integrations.gguf). They are not used: the engine does without
transformers, and they take any `tokenizer.ggml.pre` that they do not know for GPT-2's. Tests compare with them.

Texts are not normalised to NFC, which the tokenizer.json of some checkpoints (Qwen's) asks for: a GGUF file does not
say so, llama.cpp does not do it, and without it every text comes back as it was.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from slipstream.engine.errors import LoadError, UnsupportedModel
from slipstream.engine.text.byte_level import BYTE_OF, written
from slipstream.engine.text.gguf.key_values import KeyValues
from slipstream.engine.text.gguf.splits import read_splits
from slipstream.engine.text.gguf.token_list import (
    CONTROL,
    NORMAL,
    UNDEFINED,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    TokenList,
)

MODEL, MERGES, SCORES = "tokenizer.ggml.model", "tokenizer.ggml.merges", "tokenizer.ggml.scores"
ADD_PREFIX = "tokenizer.ggml.add_space_prefix"
_SPACE = "\u2581"  # how sentencepiece writes a space
# Types of tokens that merges by score may lead to: text never becomes a control token.
_MERGED = (UNDEFINED, NORMAL, USER_DEFINED, UNUSED)

Merges = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a text passes on its way to ids and back, but for the added tokens."""

    model: models.BPE
    decoder: decoders.Decoder
    normalizer: normalizers.Normalizer | None = None
    pre_tokenizer: pre_tokenizers.PreTokenizer | None = None
    adds_bos: bool = False  # unless tokenizer.ggml.add_bos_token says otherwise


@dataclass(frozen=True, slots=True)
class Kind:
    """How vocabularies of one `tokenizer.ggml.model` are read."""

    read: Callable[[KeyValues, TokenList, str | None], Vocabulary]  # of metadata, tokens, the unknown token
    # Ids of special tokens that the file does not name.
    defaults: Mapping[str, int] = field(default_factory=dict)
    insists_on_bos: bool = False  # whatever tokenizer.ggml.add_bos_token says


def read_merges(values: KeyValues) -> list[tuple[str, str]]:
    """The pairs of tokenizer.ggml.merges, earlier ones first. Raises `LoadError`."""
    merges: dict[tuple[str, str], None] = {}  # in order
    for i, line in enumerate(values.strings(MERGES)):
        cut = line.find(" ", 1)
        if cut < 0 or cut == len(line) - 1:
            raise values.refused(f"{MERGES}[{i}]", line, "must be two tokens with a space between")
        merges[line[:cut], line[cut + 1 :]] = None  # of two equal ones the first counts
    return list(merges)


def merges_by_score(values: KeyValues, tokens: TokenList) -> list[tuple[str, str]]:
    """Every pair of tokens that makes a third, those of higher scores first. Raises `LoadError`.

    sentencepiece (and llama.cpp's SPM) merges the pair of neighbours whose token has the highest score, the leftmost
    of equals. A BPE model does the same by the pair's place in a list, as transformers' converter of sentencepiece
    models has it. Of several pairs that make one token, the one with the longer left half comes first: where two of
    them overlap in a text, it is usually the one further left.
    """
    scores = values.numbers(SCORES, len(tokens.texts))
    ids = {text: i for text, i in tokens.ids.items() if tokens.types[i] in _MERGED}
    long = [text for text in ids if len(text) > 1]
    if len({scores[ids[text]] for text in long if tokens.types[ids[text]] == NORMAL}) == 1 < len(long):
        # Converters without sentencepiece's model file write a constant.
        raise LoadError(
            f"{values.where}: {SCORES}: all tokens have the same score, so their merges are not known"
        )
    long.sort(key=lambda text: -scores[ids[text]])
    return [
        (text[:i], text[i:])
        for text in long
        for i in range(len(text) - 1, 0, -1)
        if text[:i] in ids and text[i:] in ids
    ]


def _bpe(values: KeyValues, tokens: TokenList, merges: Merges, **more: Any) -> models.BPE:
    try:
        return models.BPE(vocab=tokens.ids, merges=merges, **more)
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception for every fault of the lists
        raise LoadError(f"{values.where}: {MERGES}: not a usable vocabulary ({error})") from None


def _byte_level(values: KeyValues, tokens: TokenList, _unknown: str | None) -> Vocabulary:
    """Byte-level BPE: every byte is written as a printable character, words are cut out of the text before."""
    splits = read_splits(values)
    cuts = [pre_tokenizers.Split(Regex(one), behavior="isolated") for one in splits.expressions]
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return Vocabulary(
        _bpe(values, tokens, read_merges(values), ignore_merges=splits.ignore_merges),
        _byte_level_decoder(tokens),
        pre_tokenizer=pre_tokenizers.Sequence([*cuts, as_bytes]),
        adds_bos=splits.adds_bos,
    )


def _byte_level_decoder(tokens: TokenList) -> decoders.Decoder:
    """Added tokens stand for their own text. One that could be bytes, such as DeepSeek's ü, has to be kept from it."""
    added = [text for _, text in tokens.of_types(USER_DEFINED, CONTROL, UNKNOWN)]
    alike = [text for text in added if not text.isascii() and all(char in BYTE_OF for char in text)]
    own = [decoders.Replace(Regex(rf"\A{re.escape(text)}\z"), written(text.encode())) for text in alike]
    return decoders.Sequence([*own, decoders.ByteLevel()]) if own else decoders.ByteLevel()


def _sentencepiece(values: KeyValues, tokens: TokenList, unknown: str | None) -> Vocabulary:
    """BPE over characters as sentencepiece has it; merges follow from the tokens' scores."""
    return _with_spaces(values, tokens, merges_by_score(values, tokens), unknown, prefix=True)


def _gemma4(values: KeyValues, tokens: TokenList, unknown: str | None) -> Vocabulary:
    """BPE over characters with merges of its own, over whole texts."""
    return _with_spaces(values, tokens, read_merges(values), unknown, prefix=False)


def _with_spaces(
    values: KeyValues, tokens: TokenList, merges: Merges, unknown: str | None, *, prefix: bool
) -> Vocabulary:
    """A vocabulary over characters, with a sign for the space; characters that it lacks are written as bytes.

    prefix: whether each text and what follows an added token begins with a space, if the file does not say.
    """
    asked = values.flag(ADD_PREFIX)
    prefix = prefix if asked is None else asked
    spaces = normalizers.Replace(" ", _SPACE)
    back = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return Vocabulary(
        _bpe(values, tokens, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True),
        decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if prefix else back),
        normalizer=normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces,
        adds_bos=True,
    )


KINDS = {
    "gpt2": Kind(_byte_level),
    "llama": Kind(_sentencepiece, {"bos_token": 1, "eos_token": 2, "unk_token": 0}),
    "gemma4": Kind(_gemma4, insists_on_bos=True),
}


def read_kind(values: KeyValues) -> Kind:
    """The kind that the file names. Raises `LoadError` if it names none, `UnsupportedModel` if it is not supported."""
    name = values.string(MODEL)
    if name is None:
        raise LoadError(f"{values.where}: {MODEL} is missing: the file has no vocabulary")
    if name not in KINDS:
        raise UnsupportedModel(
            f"{values.where}: {MODEL} = {name!r} is not supported; known: {', '.join(KINDS)}"
        )
    return KINDS[name]
