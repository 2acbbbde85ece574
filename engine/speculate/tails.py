"""Where an unread pass ends, worked out on the device, so that the next pass can be launched before the host reads it.

The host plans the next pass as if every draft were kept. How many were not, and what the last tokens are, follows from
the picks by the rule of verification, which the device applies too. Its result is not stored: the host judges the same
picks when it reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from slipstream.engine.batch import upload
from slipstream.engine.layers.decoder import Taps
from slipstream.kernels.verify.op import verify


class Tails:
    """The ends of the sequences that an unread pass writes, a row per slot, in the order of `slot_ids`.

    Verified when first looked at, which has to be before the next batch is built: that may use the pass's memory again.
    """

    def __init__(
        self,
        rows: Mapping[int, range],
        token_ids: Tensor,
        picks: Tensor,
        drafts: Tensor | None = None,
        streams: Taps | None = None,
    ) -> None:
        """rows: by slot id, in order, the rows that have picks, those of a certain token and of its drafts.

        token_ids: [n_rows] int64, of all rows; picks: [n_picks] int64, slot after slot, -1 where a row had NaN;
        drafts: [n_drafts] int64, slot after slot, -1 where there is none; None: as they stand in token_ids.
        streams: of all rows, if drafters read any.
        """
        self.rows, self.streams = rows, streams
        self.slot_ids: Sequence[int] = list(rows)
        self._token_ids, self._drafts = token_ids, drafts
        # A row with NaN has no token, and ends its request; what runs behind it needs a token nevertheless.
        self._picks = picks.clamp_min(0)

    @cached_property
    def _ends(self) -> tuple[Tensor, Tensor, Tensor]:
        if not self.may_lose:  # every pick is kept
            (certain,) = upload((np.array([rows[0] for rows in self.rows.values()]),), self._picks.device)
            tokens = torch.stack((self._token_ids[certain], self._picks), 1).int()
            lost = torch.zeros_like(certain)
            return tokens, (lost + 2).int(), lost
        counts = np.array([len(rows) for rows in self.rows.values()])
        n, device = len(counts), self._picks.device
        starts = np.cumsum([0, *counts]).astype(np.int32)
        firsts = np.array([rows[0] for rows in self.rows.values()])
        others = np.concatenate([np.asarray(rows[1:], np.int64) for rows in self.rows.values()])
        arrays = (starts, np.arange(n), firsts, others, counts - 1)
        span_starts, spans, certain, drafted, n_drafts = upload(arrays, device)
        tokens = torch.zeros(n, 1 + int(counts.max()), dtype=torch.int32, device=device)
        tokens[:, 0] = self._token_ids[certain]
        lengths = torch.ones(n, dtype=torch.int32, device=device)
        drafts = self._token_ids[drafted] if self._drafts is None else self._drafts
        n_accepted, _ = verify(self._picks, drafts, span_starts, spans, tokens, lengths)
        return tokens, lengths, n_drafts - n_accepted

    @property
    def tokens(self) -> Tensor:
        """[n_slots, 2 + most drafts] int32: each sequence from its last certain token on, as far as `lengths` says."""
        return self._ends[0]

    @property
    def lengths(self) -> Tensor:
        """[n_slots] int32: tokens in each row of `tokens`, at least 2."""
        return self._ends[1]

    @property
    def n_lost(self) -> Tensor:
        """[n_slots] int64: drafts of each sequence that were not kept."""
        return self._ends[2]

    @cached_property
    def last(self) -> Tensor:
        """[n_slots, 2] int64: the last two tokens of each sequence."""
        ends = torch.stack((self.lengths - 2, self.lengths - 1), 1).long()  # [n_slots, 2]
        return self.tokens.gather(1, ends).long()

    @property
    def device(self) -> torch.device:
        return self._picks.device

    @property
    def may_lose(self) -> bool:
        """Whether there were drafts at all."""
        return self._picks.shape[0] > len(self.rows)

    def picks_of(self, slot_id: int) -> Tensor:
        """[n_rows of the slot] int64."""
        starts = dict(zip(self.rows, accumulate(map(len, self.rows.values()), initial=0), strict=False))
        start = starts[slot_id]
        return self._picks[start : start + len(self.rows[slot_id])]

    def of_slots(self, slot_ids: Sequence[int]) -> Tails:
        """The same with rows for these slots alone, in this order."""
        if list(slot_ids) == list(self.slot_ids):
            return self
        (index,) = upload(
            (np.array([self.slot_ids.index(slot_id) for slot_id in slot_ids]),), self._picks.device
        )
        chosen = Tails(self.rows, self._token_ids, self._picks, self._drafts, self.streams)
        chosen.slot_ids = slot_ids
        chosen._ends = self.tokens[index], self.lengths[index], self.n_lost[index]
        return chosen
