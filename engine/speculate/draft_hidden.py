"""Drafters that read the target's hidden states and then their own: EAGLE-3 and MTP heads.

A head pairs the target's state at position p with the token at p + 1 and guesses the token at p + 2; for tokens it has
guessed itself it takes its own state in place of the target's (the pairing rule of EAGLE, Li et al. 2503.01840).

`accept` comes after sampling, so every kept position already has its successor: no row is deferred, and the last one
yields the first guess of the next round. Rows of guesses are scratch past the store's length; what was kept of them is
computed again with the target's true states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.batch import Batch, Span
from engine.cache.cache import Cache
from engine.cache.store import Store
from engine.slot import Slot
from engine.speculate.drafter import NO_GUESS, Drafter, Guess, Kept, Want
from engine.speculate.follower import Follower
from engine.speculate.unroll import Rows, Unrolled


class Head(Protocol):
    """A network that reads fused streams of the target, or its own states, beside tokens."""

    @property
    def taps(self) -> tuple[int, ...]: ...

    def fuse(self, taps: Sequence[Tensor]) -> Tensor:
        """[n_rows, d_target] each -> [n_rows, d_model]."""

    def run(self, batch: Batch, hidden: Tensor, store: Store) -> tuple[Tensor, Tensor]:
        """hidden: [n_rows, d_model] -> what `logits` reads and own states of wanted rows, [n_logits, d_model] each."""

    def logits(self, said: Tensor) -> Tensor:
        """[n_rows, d_model] -> [n_rows, vocab] float32."""


@dataclass(frozen=True, slots=True)
class _Ready:
    """What the head said after a slot's last kept row."""

    said: Tensor  # [d_model]: its logits are computed when a draft is asked for, as a head's matrix may be large
    hidden: Tensor  # [d_model]


class DraftHidden(Drafter):
    """Drafts with a head. Its store has the drafter's name and is fed on every pass of the target."""

    is_free = False

    def __init__(self, name: str, head: Head, cache: Cache) -> None:
        self.name = name
        self.taps = head.taps
        self._head = head
        self._follower = Follower(name, head.taps, cache)
        self._ready: dict[int, _Ready] = {}  # by slot id

    def begin(self, slot: Slot) -> None:
        self._ready.pop(slot.id, None)

    def end(self, slot: Slot) -> None:
        self._ready.pop(slot.id, None)

    def accept(self, kept: Sequence[Kept]) -> None:
        for one in kept:
            self._ready.pop(one.slot.id, None)
        fed = self._follower.take(kept)
        if fed is None:
            return
        spans = []
        for one in fed.kept:
            successors = one.slot.tokens[one.start + 1 : one.slot.n_past + 1]
            spans.append(Span(one.slot.id, successors, one.start, 0, int(self._may_draft(one.slot))))
        said, hidden = self._run(spans, self._head.fuse(fed.streams))
        for i, span in enumerate(span for span in spans if span.n_logits):
            self._ready[span.slot] = _Ready(said[i], hidden[i])
        self._follower.commit(fed)

    def draft(self, wants: Sequence[Want]) -> list[Guess]:
        able = [
            i
            for i, want in enumerate(wants)
            if want.slot.id in self._ready and self._follower.has_room(want.slot, want.n_max)
        ]
        if not able:
            return [NO_GUESS] * len(wants)
        ready = [self._ready[wants[i].slot.id] for i in able]
        hidden = torch.stack([one.hidden for one in ready])  # [n_active, d_model]
        unrolled = Unrolled(wants)

        def step(going_on: Sequence[int], rows: Sequence[int]) -> Rows:
            nonlocal hidden
            spans = []
            for i in going_on:
                slot, guesses = wants[i].slot, unrolled.tokens[i]
                spans.append(Span(slot.id, guesses[-1:], slot.n_past + len(guesses) - 1, 1, 1))
            index = torch.tensor(rows, dtype=torch.int64, device=hidden.device)
            said, hidden = self._run(spans, hidden.index_select(0, index))
            return self._head.logits(said), None

        first = self._head.logits(torch.stack([one.said for one in ready]))  # [n_able, vocab] float32
        return unrolled.run(able, (first, None), step)

    def _may_draft(self, slot: Slot) -> bool:
        """Whether a draft may be asked of the head for this slot before its next pass."""
        return slot.n_gap == 1 and slot.speculate.n_max > 0 and self.name in slot.speculate.types

    def _run(self, spans: Sequence[Span], hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self._head.run(self._follower.batch(spans), hidden, self._follower.store)
