"""Scores of a sentencepiece vocabulary -> merges in an order, which is what a BPE model takes."""

from __future__ import annotations

from slipstream.engine.errors import LoadError
from slipstream.engine.text.gguf.key_values import KeyValues
from slipstream.engine.text.gguf.token_list import NORMAL, UNDEFINED, UNUSED, USER_DEFINED, TokenList

SCORES = "tokenizer.ggml.scores"
# Types of tokens that merges may lead to: text never becomes a control token.
_MERGED = (UNDEFINED, NORMAL, USER_DEFINED, UNUSED)


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
