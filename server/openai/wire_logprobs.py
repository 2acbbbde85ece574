"""Log-probabilities in the forms of OpenAI's two endpoints: a list of objects for chat, four lists for plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream.engine.api import TokenLogprob

LEAST = -9999.0  # JSON has no infinity; OpenAI writes this value for the least likely tokens


def of_chat(tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
    """`choices[].logprobs` of a chat; None where there is no token."""
    if not tokens:
        return None
    content = [{**entry(one), "top_logprobs": [entry(other) for other in one.top]} for one in tokens]
    return {"content": content, "refusal": None}


def entry(one: TokenLogprob) -> dict[str, Any]:
    """A token as chats list it, without the likeliest tokens."""
    return {
        "token": one.data.decode(errors="replace"),
        "bytes": list(one.data),
        "logprob": _finite(one.logprob),
    }


def of_text(tokens: Sequence[tuple[int, TokenLogprob | str]]) -> dict[str, Any] | None:
    """`choices[].logprobs` of a plain completion; None where there is no token.

    `tokens`: each with the offset in the choice's text at which it begins. One that has no log-probability is its text:
    the first of an echoed prompt.
    """
    if not tokens:
        return None
    known = [None if isinstance(one, str) else one for _, one in tokens]
    return {
        "tokens": [one if isinstance(one, str) else _name(one) for _, one in tokens],
        "token_logprobs": [_finite(one.logprob) if one else None for one in known],
        "top_logprobs": [_likeliest(one) if one else None for one in known],
        "text_offset": [offset for offset, _ in tokens],
    }


def of_prompt(tokens: Sequence[TokenLogprob | None], n_top: int) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: per token of the prompt, by their ids, itself and the `n_top` likeliest; None first."""
    return [None if one is None else _by_id(one, n_top) for one in tokens]


def _by_id(one: TokenLogprob, n_top: int) -> dict[str, Any]:
    ranks = {other.token_id: rank for rank, other in enumerate(one.top, 1)}
    return {
        str(each.token_id): {
            "logprob": _finite(each.logprob),
            "rank": ranks.get(each.token_id, each.rank),
            "decoded_token": each.data.decode(errors="replace"),
        }
        for each in (one, *(other for other in one.top[:n_top] if other.token_id != one.token_id))
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
