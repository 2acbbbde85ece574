"""Log-probabilities in the forms of OpenAI's two endpoints: a list of objects for chat, four lists for plain text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from slipstream.engine.api import TokenLogprob

LEAST = -9999.0  # JSON has no infinity; OpenAI writes this value for the least likely tokens


def of_chat(tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
    """`choices[].logprobs` of a chat; None where there is no token."""
    if not tokens:
        return None
    content = [{**_entry(one), "top_logprobs": [_entry(other) for other in one.top]} for one in tokens]
    return {"content": content, "refusal": None}


def _entry(one: TokenLogprob) -> dict[str, Any]:
    return {
        "token": one.data.decode(errors="replace"),
        "bytes": list(one.data),
        "logprob": _finite(one.logprob),
    }


def of_text(
    tokens: Sequence[TokenLogprob | None], pieces: Sequence[str], start: int
) -> dict[str, Any] | None:
    """`choices[].logprobs` of a plain completion; None where there is no token.

    `pieces`: the text that each token added; `start`: the offset of the first in the choice's text. A token is None if
    it has no log-probability, as the first token of an echoed prompt; then only its piece is known.
    """
    if not tokens:
        return None
    offsets = accumulate((len(piece) for piece in pieces), initial=start)
    return {
        "tokens": [_name(one) if one else piece for one, piece in zip(tokens, pieces, strict=True)],
        "token_logprobs": [_finite(one.logprob) if one else None for one in tokens],
        "top_logprobs": [_likeliest(one) if one else None for one in tokens],
        "text_offset": [offset for offset, _ in zip(offsets, tokens, strict=False)],
    }


def _likeliest(one: TokenLogprob) -> dict[str, float]:
    """The likeliest tokens and, as OpenAI has it, the picked token. Of two with the same text the likelier counts."""
    told: dict[str, float] = {}
    for other in (*one.top, one):
        told.setdefault(_name(other), _finite(other.logprob))
    return told


def _name(one: TokenLogprob) -> str:
    """A token's text, as a key. A token that is a part of a character is written as bytes, or such keys would clash."""
    try:
        return one.data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in one.data)


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
