"""Drafters that guess a whole block in one pass from the target's hidden states: DFlash and DSpark.

The target's states of kept tokens are keys and values of the draft network, written before a draft. A block of
the last token and masks runs once, always at its full size: its rows attend to each other, so a shorter block would be
another input than the network was trained on. Tokens are then picked from left to right. A round costs one small pass,
however many are picked. Source: DFlash (arXiv 2602.06036), DSpark (arXiv 2607.05147).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from slipstream.engine.batch import Batch, Span, upload
from slipstream.engine.cache.cache import Cache
from slipstream.engine.cache.store import Store
from slipstream.engine.frames import wanted
from slipstream.engine.models.captured import CapturedPass, Capturing
from slipstream.engine.slot import Slot
from slipstream.engine.speculate.drafter import DeviceDrafter, Guesses, Kept, Want
from slipstream.engine.speculate.network.backlog import Backlog
from slipstream.engine.speculate.network.unroll import Going, Rows, Unrolled
from slipstream.engine.speculate.tails import Tails


class BlockHead(Protocol):
    """A network that drafts blocks."""

    @property
    def taps(self) -> tuple[int, ...]: ...

    @property
    def block_size(self) -> int:
        """Rows of a block, the anchor among them."""

    @property
    def n_drafts(self) -> int:
        """Tokens that a whole block predicts: its rows, or one less if the anchor's row predicts none."""

    @property
    def mask_id(self) -> int: ...

    def inject(self, batch: Batch, features: Sequence[Tensor], store: Store) -> None:
        """Write keys and values of context rows. features: per tap [n_rows, d_target]."""

    def run(self, batch: Batch, store: Store) -> tuple[Tensor, Tensor]:
        """Blocks of anchor and masks -> logits [n_logits, vocab] float32 and states [n_logits, d_model]."""

    def correct(self, logits: Tensor, previous: Tensor) -> Tensor:
        """Logits [n_rows, vocab] once the tokens before them, [n_rows] int64, are picked."""

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor | None:
        """How likely the pick after `previous` is to be accepted if all before it are, [n_rows]; None: unknown."""


class DraftBlock(DeviceDrafter):
    """Drafts with a block network. Its store has the drafter's name and is fed when a draft is asked for."""

    def __init__(self, name: str, head: BlockHead, cache: Cache, n_context: int) -> None:
        """n_context: as for `Backlog`."""
        self.name = name
        self.taps = head.taps
        self.longest = head.n_drafts
        self._head = head
        self._backlog = Backlog(name, head.taps, cache, n_context)
        self._captured: Sequence[CapturedPass] = ()  # `inject` and `run`, where passes are captured

    def capture(self, capturing: Capturing) -> None:
        head, store = self._head, self._backlog.store

        def inject(batch: Batch, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
            head.inject(batch, inputs, store)
            return ()

        def run(batch: Batch, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
            return head.run(batch, store)

        self._captured = capturing.passes(store, (inject, [capturing.stream] * len(self.taps)), (run, ()))

    def begin(self, slot: Slot) -> None:
        self._backlog.forget(slot)

    def accept(self, kept: Sequence[Kept]) -> None:
        self._backlog.note(kept)

    def n_unfed(self, slot: Slot) -> int:
        return self._backlog.n_unfed(slot)

    def draft(self, wants: Sequence[Want], tails: Tails | None = None) -> Guesses | None:
        if tails is not None:
            return None  # a block begins with a token that the host has
        able, fed = [], []
        for i, want in enumerate(wants):
            rows = self._backlog.unfed(want.slot)
            if rows is not None and self._backlog.reserve(want.slot, rows, self._head.block_size):
                able.append(i)
                fed += [(want.slot, rows)] if rows else []
        if not able:
            return Unrolled(wants)
        if fed:
            self._feed(fed)
        device = self._backlog.store.device
        spans = [self._block(wants[i].slot) for i in able]
        logits, hidden = self._run(self._backlog.batch(spans))
        firsts = np.arange(len(able)) * self._head.n_drafts
        first_ids = np.array([span.token_ids[0] for span in spans], np.int64)
        places, anchors = upload((firsts, first_ids), device)  # [n_active] each: rows of `logits`, tokens

        def corrected(previous: Tensor) -> Rows:
            """previous: [n_active] int64, the tokens before."""
            rows = self._head.correct(logits.index_select(0, places), previous)  # [n_active, vocab]
            return rows, self._head.confidence(hidden.index_select(0, places), previous)

        def step(going: Going) -> Rows:
            nonlocal places
            places = going.of(places) + 1
            return corrected(going.token_ids)

        return Unrolled(wants).launch(able, corrected(anchors), step)

    def _feed(self, fed: Sequence[tuple[Slot, range]]) -> None:
        spans = [Span(slot.id, slot.tokens[rows.start : rows.stop], rows.start, 0, 0) for slot, rows in fed]
        batch, streams = self._backlog.batch(spans), self._backlog.states(fed)
        if batch.frame is None:
            self._head.inject(batch, streams, self._backlog.store)
        else:
            self._captured[0](batch, streams)
        for slot, _ in fed:
            self._backlog.commit(slot)

    def _run(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits [n_logits, vocab] float32 and states [n_logits, d_model] of blocks."""
        if batch.frame is None:
            return self._head.run(batch, self._backlog.store)
        logits, hidden = self._captured[1](batch)
        return wanted(batch, logits), wanted(batch, hidden)

    def _block(self, slot: Slot) -> Span:
        """The last token, and masks for what follows it."""
        n_masks = self._head.block_size - 1
        tokens = [slot.tokens[-1], *[self._head.mask_id] * n_masks]
        return Span(slot.id, tokens, slot.n_past, n_masks, self._head.n_drafts)
