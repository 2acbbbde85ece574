"""Verification by coupled match, and the commit of what was kept, without the host."""

from __future__ import annotations

from torch import Tensor

from slipstream.kernels.dispatch import op


@op("cuda", "reference", any_dtype=True)
def verify(
    picks: Tensor, drafts: Tensor, span_starts: Tensor, slots: Tensor, tokens: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """Accept the longest prefix of every span's drafts that the target picked too; append it and the next pick.

    picks: [n_rows] int64, the target's pick of every row; -1 where the row had none (NaN). span_starts: [n_spans + 1]
    int32, ascending: span i is rows span_starts[i] to span_starts[i + 1], the first that of a certain token, the others
    those of its drafts. drafts: [n_rows - number of spans with rows] int64, span after span; a negative one is padding
    and never accepted. slots: [n_spans] int64, whose text it is, each at most once; a negative one is padding.

    tokens: [n_slots, capacity] int32 and lengths: [n_slots] int32 are changed in place: accepted drafts and the next
    token are appended to the slot's text. What would stand beyond the capacity is not written, only counted.
    Returns n_accepted [n_spans] int32 and the next token [n_spans] int64: the pick of the row behind the accepted
    drafts; where that is -1 nothing but the drafts is appended. Spans without rows or slot: 0 and -1, and no change.
    """
    raise NotImplementedError
