"""Drafts from a slot's own text: what followed when its last tokens stood there before."""

from __future__ import annotations

from torch import Tensor

from slipstream.kernels.dispatch import op

N_MAX = 16


@op("cuda", "reference", any_dtype=True)
def ngram(
    tokens: Tensor, lengths: Tensor, slots: Tensor, n_match: Tensor, n_drafts_max: int
) -> tuple[Tensor, Tensor]:
    """Find the newest earlier occurrence of a slot's last tokens and copy the tokens after it.

    tokens: [n_slots, capacity] int32, each slot's text from position 0. lengths: [n_slots] int32, tokens in it, at
    most `capacity`. slots: [n_active] int64; a negative one is padding. n_match: [n_active] int32, how many last
    tokens must match, 1 to 16; a row with another number drafts nothing. An occurrence may overlap the last tokens.
    Returns drafts [n_active, n_drafts_max] int32, zeros behind the true number, and that number [n_active] int32:
    0 where nothing matches, less than n_drafts_max where the text ends. After Saxena, "Prompt lookup decoding" (2023).
    """
    raise NotImplementedError
