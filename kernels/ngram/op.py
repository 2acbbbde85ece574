"""Drafts from a slot's own text: what followed when its last tokens stood there before."""

from __future__ import annotations

from torch import Tensor

from slipstream.kernels.dispatch import op

N_MAX = 16  # last tokens that are compared


@op("cuda", "reference", any_dtype=True)
def ngram(tokens: Tensor, lengths: Tensor, slots: Tensor, n_drafts_max: int) -> tuple[Tensor, Tensor]:
    """Find the longest run of a slot's last tokens that stands in its text before, and copy what follows it there.

    tokens: [n_slots, capacity] int32, each slot's text from position 0. lengths: [n_slots] int32, tokens in it, at
    most `capacity`. slots: [n_active] int64; a negative one is padding. Runs count up to `N_MAX` tokens; of equally
    long ones the newest serves, and it may overlap the last tokens. A copy that comes to the text's end goes on into
    itself: the text is then a loop.
    Returns drafts [n_active, n_drafts_max] int32 and the length of the run [n_active] int32; where that is 0 the drafts
    are 0. After Saxena, "Prompt lookup decoding" (2023).
    """
    raise NotImplementedError
