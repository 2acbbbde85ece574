"""ngram-device: the slots' texts on the device, searched there: a draft from the text without a look at the host.

The text behind an unread pass is completed with what that pass picked, and the pass behind it takes the guess as it
lies. What is found is what followed the longest earlier run of a slot's last tokens, the newest of equals.

Source: prompt lookup decoding (Saxena 2023), on the device as in vLLM's `ngram_proposer_gpu`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from slipstream.engine.batch import Download, upload
from slipstream.engine.slot import Slot
from slipstream.engine.speculate.drafter import DeviceDrafter, Guess, Guesses, Want
from slipstream.engine.speculate.tails import Tails
from slipstream.kernels.ngram.op import ngram

# Estimate of a token by how many tokens agree before the draft, from 0 on. Rough: what they are worth is learnt.
_SURE = (0.1, 0.3, 0.5, 0.7, 0.7, 0.8, 0.8, 0.8, *(0.9,) * 8, 0.96)


class Found:
    """Continuations that were found, as many tokens for each slot as it wants. Where none was, they are token 0.

    Those are guesses like others, for what the drafter promises before anybody has read whether there is a match.
    """

    def __init__(self, wants: Sequence[Want], drafts: Tensor, n_matched: Tensor) -> None:
        """drafts: [n_wants, most n_max] int32; n_matched: [n_wants] int32."""
        self._n_max = [want.n_max for want in wants]
        self._drafts = drafts
        self._on_host = Download(torch.cat((n_matched[:, None], drafts), 1))  # [n_wants, 1 + n_max]

    @property
    def token_ids(self) -> Tensor:
        flat, width = self._drafts.flatten().long(), self._drafts.shape[1]
        if min(self._n_max) == width:
            return flat
        places = [np.arange(n) + i * width for i, n in enumerate(self._n_max)]
        (index,) = upload((np.concatenate(places),), flat.device)
        return flat[index]

    def read(self) -> list[Guess]:
        rows = zip(self._on_host.read().tolist(), self._n_max, strict=True)
        return [Guess(token_ids[:n], (_SURE[n_matched],) * n) for (n_matched, *token_ids), n in rows]


class NgramDevice(DeviceDrafter):
    """Copies what followed the last tokens where they stood before."""

    name = "ngram-device"
    reads_text = True

    def __init__(self, n_slots: int, n_ctx: int, device: torch.device) -> None:
        # Each slot's text, certain tokens first; behind them what unread passes have added. [n_slots, capacity]
        capacity = n_ctx + self.longest + 2
        self._tokens = torch.zeros(n_slots, capacity, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(n_slots, dtype=torch.int32, device=device)  # [n_slots]
        self._n_known = [0] * n_slots  # certain tokens that are there

    def begin(self, slot: Slot) -> None:
        self._n_known[slot.id] = 0

    def follows(self, slot: Slot) -> bool:
        return False  # it reads what a slot has gained when it is asked

    def draft(self, wants: Sequence[Want], tails: Tails | None = None) -> Guesses | None:
        slot_ids = self._bring_up_to_date(wants)
        if tails is not None:
            self._add(slot_ids, tails)
        drafts, n_matched = ngram(self._tokens, self._lengths, slot_ids, max(want.n_max for want in wants))
        return Found(wants, drafts, n_matched)

    def _bring_up_to_date(self, wants: Sequence[Want]) -> Tensor:
        """Copy the certain tokens that the device lacks; the slots' ids, [n_wants] int64."""
        capacity, slots = self._tokens.shape[1], [want.slot for want in wants]
        spans = [range(self._n_known[slot.id], len(slot.tokens)) for slot in slots]
        places = [
            slot.id * capacity + np.arange(one.start, one.stop)
            for slot, one in zip(slots, spans, strict=True)
        ]
        values = [slot.history[one.start :] for slot, one in zip(slots, spans, strict=True)]
        lengths = np.array([one.stop for one in spans], np.int32)
        ids = np.array([slot.id for slot in slots])
        arrays = (np.concatenate(places), np.concatenate(values), ids, lengths)
        index, tokens, slot_ids, n_tokens = upload(arrays, self._tokens.device)
        self._tokens.view(-1).index_copy_(0, index, tokens)
        self._lengths.index_copy_(0, slot_ids, n_tokens)
        for slot in slots:
            self._n_known[slot.id] = len(slot.tokens)
        return slot_ids

    def _add(self, slot_ids: Tensor, tails: Tails) -> None:
        """Add what an unread pass has written. It begins with the last certain token, which is there."""
        lengths = self._lengths[slot_ids] - 1  # [n_wants]
        steps = torch.arange(tails.tokens.shape[1], device=lengths.device)  # [n_written]
        self._tokens[slot_ids[:, None], lengths[:, None] + steps] = tails.tokens
        self._lengths.index_copy_(0, slot_ids, lengths + tails.lengths)
