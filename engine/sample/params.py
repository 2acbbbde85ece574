"""Sampling parameters of a request, with every default filled in."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.engine.api import Sampling
from slipstream.engine.errors import InvalidRequest
from slipstream.engine.ranges import SAMPLING_RANGES

# OpenAI's defaults; the repeat window is llama.cpp's.
FALLBACK: Mapping[str, float | int] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repeat_penalty": 1.0,
    "repeat_last_n": 64,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a request's rows are turned into tokens."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    repeat_last_n: int
    presence_penalty: float
    frequency_penalty: float
    bias: Mapping[int, float]
    seed: int
    n_min: int = 0  # output tokens before which none of `end_ids` may come
    end_ids: Sequence[int] = ()
    allowed: NDArray[np.int32] | None = None  # [n_words]: bits of the tokens that may come; None: all
    # Tokens, two or more, that may not follow each other in the output.
    bad_words: Sequence[tuple[int, ...]] = ()

    @property
    def counts_output(self) -> bool:
        """Whether output tokens have to be counted."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def repeats(self) -> bool:
        """Whether recent tokens are penalised."""
        return self.repeat_penalty != 1.0 and self.repeat_last_n > 0

    @property
    def counts_drafts(self) -> bool:
        """Whether a row's logits depend on the tokens drafted before it, or on how many they are."""
        return self.counts_output or self.repeats or self.n_min > 0 or bool(self.bad_words)

    @property
    def edits(self) -> bool:
        """Whether logits change before truncation."""
        return bool(self.bias) or self.counts_drafts or self.allowed is not None


def resolve_sampling(
    sampling: Sampling, defaults: Mapping[str, float | int], eos_ids: Sequence[int], vocab_size: int
) -> SamplingParams:
    """Fill in what the request left open. Raises `InvalidRequest` for values outside their bounds.

    `defaults` holds the flags' and the checkpoint's values. `ignore_eos` bans every end token.
    Biases of texts and bad words, which have to be tokenised, are left out.
    """
    values: dict[str, float | int] = {}
    for name, fallback in FALLBACK.items():
        given = getattr(sampling, name)
        value = given if given is not None else defaults.get(name, fallback)
        _check_range(name, value)
        values[name] = type(fallback)(value)
    asked = dict(sampling.logit_bias)
    bias = {token_id: amount for token_id, amount in asked.items() if isinstance(token_id, int)}
    for token_id, amount in bias.items():
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest("logit_bias", f"token {token_id} is not in the vocabulary of {vocab_size}")
        if amount != -math.inf:
            _check_range("logit_bias", amount)
    if sampling.ignore_eos:
        bias.update(dict.fromkeys(eos_ids, -math.inf))
    if sum(amount == -math.inf for amount in bias.values()) >= vocab_size:
        raise InvalidRequest("logit_bias", "bans every token of the vocabulary")
    seed = sampling.seed if sampling.seed is not None else int(defaults.get("seed", secrets.randbits(63)))
    _check_range("seed", seed)
    allowed = _mask(sampling.allowed_token_ids, vocab_size)
    return SamplingParams(bias=bias, seed=seed, allowed=allowed, **values)  # type: ignore[arg-type]


def _mask(token_ids: Sequence[int] | None, vocab_size: int) -> NDArray[np.int32] | None:
    """[n_words]: the bits of these tokens; None: of all."""
    if token_ids is None:
        return None
    ids = np.array(token_ids, np.int64)
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        raise InvalidRequest(
            "allowed_token_ids", f"token {outside[0]} is not in the vocabulary of {vocab_size}"
        )
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[ids] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _check_range(name: str, value: float) -> None:
    least, most = SAMPLING_RANGES[name]
    if not least <= value <= most:
        raise InvalidRequest(name, f"{value} is not between {least} and {most}")
