"""Where a pass ends that nobody has read: what the next pass has to know of it, on the device.

The host plans that next pass as if every draft were kept. How many were not, and what the last tokens are, follows from
the picks by the rule of verification, which the device applies for itself. Nothing of it lasts: the host judges the
same picks when it reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from slipstream.engine.batch import upload
from slipstream.engine.layers.decoder import Taps
from slipstream.kernels.verify.op import verify


@dataclass(frozen=True, slots=True)
class Ran:
    """What a pass has left on the device, read or not."""

    rows: Mapping[
        int, range
    ]  # by slot id, in order: the rows that have picks, a certain token's and its drafts'
    token_ids: Tensor  # [n_rows] int64, of all rows
    picks: Tensor  # [n_picks] int64, slot after slot; -1 where a row had NaN
    drafts: Tensor | None = (
        None  # [n_drafts] int64, slot after slot; -1: none; None: as they stand in token_ids
    )
    streams: Taps | None = None  # that drafters read

    def picks_of(self, slot_id: int) -> Tensor:
        """[n_rows of the slot] int64, where a row with NaN has any token: it ends its request."""
        starts = dict(zip(self.rows, accumulate(map(len, self.rows.values()), initial=0), strict=False))
        start = starts[slot_id]
        return self.picks[start : start + len(self.rows[slot_id])].clamp_min(0)


@dataclass(frozen=True, slots=True)
class Tails:
    """Where a pass leaves some slots' sequences, one row each."""

    ran: Ran
    slot_ids: Sequence[int]
    last: Tensor  # [n, 2] int64: the last two tokens
    n_lost: Tensor  # [n] int64: drafts that were not kept

    @classmethod
    def of(cls, ran: Ran) -> Tails:
        """Of all slots that have picks."""
        device, n = ran.picks.device, len(ran.rows)
        counts = np.array([len(rows) for rows in ran.rows.values()])
        starts = np.cumsum([0, *counts]).astype(np.int32)
        firsts = np.array([rows[0] for rows in ran.rows.values()])
        others = np.concatenate([np.asarray(rows[1:], np.int64) for rows in ran.rows.values()])
        arrays = (starts, np.arange(n), firsts, others, counts - 1)
        span_starts, spans, certain, drafted, n_drafts = upload(arrays, device)
        tokens = torch.zeros(n, 1 + int(counts.max()), dtype=torch.int32, device=device)
        tokens[:, 0] = ran.token_ids[certain]
        lengths = torch.ones(n, dtype=torch.int32, device=device)
        drafts = ran.token_ids[drafted] if ran.drafts is None else ran.drafts
        # A row with NaN has no token, and ends its request; what runs behind it needs one nevertheless.
        n_accepted, _ = verify(ran.picks.clamp_min(0), drafts, span_starts, spans, tokens, lengths)
        ends = torch.stack((lengths - 2, lengths - 1), 1).long()  # [n, 2]
        return cls(ran, list(ran.rows), tokens.gather(1, ends).long(), n_drafts - n_accepted)

    def of_slots(self, slot_ids: Sequence[int]) -> Tails:
        """Those of some slots."""
        (index,) = upload((np.array([self.slot_ids.index(one) for one in slot_ids]),), self.last.device)
        return Tails(self.ran, slot_ids, self.last[index], self.n_lost[index])
