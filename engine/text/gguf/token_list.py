"""The tokens of a GGUF file with their ids and types: which are plain, which are cut out of a text as a whole."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from slipstream.engine.errors import LoadError
from slipstream.engine.text.gguf.key_values import KeyValues

TOKENS, TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
# The values of tokenizer.ggml.token_type: sentencepiece's types of pieces.
UNDEFINED, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(7)
# Characters of a token. The longest in checkpoints are runs of 256 spaces; work on a token grows with its square.
LONGEST = 2048
_PADDING = re.compile(r"\[PAD([0-9]+)\]")


@dataclass(frozen=True, slots=True)
class TokenList:
    """A vocabulary as the file lists it."""

    texts: list[str]  # by id
    types: list[int]  # by id
    ids: dict[str, int]  # of every token but paddings

    def of_types(self, *types: int) -> Iterator[tuple[int, str]]:
        """Id and text of the tokens of these types, in the order of their ids."""
        return ((i, text) for text, i in self.ids.items() if self.types[i] in types)


def read_tokens(values: KeyValues) -> TokenList:
    """The vocabulary. Raises `LoadError`.

    Converters fill the ids between the tokenizer's last token and the last row of the embedding with texts such as
    [PAD151700], and an id may have no text at all. Neither is a token: the checkpoint's own tokenizer has none there.
    """
    texts = values.strings(TOKENS)
    types = values.integers(TYPES, len(texts))
    ids: dict[str, int] = {}
    for i, text in enumerate(texts):
        if not UNDEFINED <= types[i] <= BYTE:
            raise values.refused(f"{TYPES}[{i}]", types[i], f"must be {UNDEFINED} to {BYTE}")
        if not text or _is_padding(i, text, types[i]):
            continue
        if len(text) > LONGEST:
            raise values.refused(f"{TOKENS}[{i}]", text, f"has {len(text)} characters, at most {LONGEST}")
        if ids.setdefault(text, i) != i:
            raise values.refused(f"{TOKENS}[{i}]", text, f"is token {ids[text]} too")
    if not ids:
        raise LoadError(f"{values.where}: {TOKENS}: the vocabulary is empty")
    return TokenList(texts, types, ids)


def _is_padding(token_id: int, text: str, kind: int) -> bool:
    """Old converters gave paddings any type, but numbered them by their ids; some newer ones count from 1."""
    found = _PADDING.fullmatch(text)
    return found is not None and (kind == UNUSED or int(found[1]) == token_id)
