"""draft-assistant: a network without keys and values of its own, which reads those of the target (Gemma 4).

Of a sequence it needs the target's state at the last position that the target has computed, and nothing else: no token
is fed to it, no row is cached, and what the target rolls back it has never had. Every guess of a draft is made at that
position, with the guess before as its token and the state that it left.
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
from slipstream.engine.speculate.drafter import UNREAD, DeviceDrafter, Guesses, Kept, Want
from slipstream.engine.speculate.network.unroll import Going, Rows, Unrolled
from slipstream.engine.speculate.tails import Tails


class AssistantHead(Protocol):
    """The network."""

    @property
    def taps(self) -> tuple[int, ...]:
        """One of the target's streams."""

    def run(self, batch: Batch, states: Tensor, store: Store) -> tuple[Tensor, Tensor]:
        """[n_rows, d_target] -> what `logits` reads, [n_rows, d_model], and the next states, [n_rows, d_target]."""

    def logits(self, said: Tensor) -> Tensor:
        """[n_rows, d_model] -> [n_rows, vocab] float32."""


class DraftAssistant(DeviceDrafter):
    """Drafts over the target's store."""

    name = "draft-assistant"

    def __init__(self, head: AssistantHead, cache: Cache) -> None:
        self.taps = head.taps
        self._head = head
        self._cache = cache
        # Per slot id: tokens that the target had computed when its state was kept.
        self._known: dict[int, int] = {}
        self._states: Tensor | None = None  # [n_slots, d_target]
        self._captured: CapturedPass | None = None

    @property
    def _store(self) -> Store:
        return self._cache.stores[self._cache.primary]

    def capture(self, capturing: Capturing) -> None:
        """Over the frames of the target's store, which have been made."""
        self._captured = CapturedPass(
            lambda batch, inputs: self._head.run(batch, inputs[0], self._store),
            self._store.frames,
            capturing.capture,
            (capturing.stream,),
            capturing.affords,
        )

    def begin(self, slot: Slot) -> None:
        self._known.pop(slot.id, None)

    def accept(self, kept: Sequence[Kept]) -> None:
        """Keep the state of the last token that the pass added."""
        rows, places, taps = [], [], None
        for one in kept:
            if one.streams is None or one.slot.n_past <= one.start:
                continue
            taps = one.streams.taps
            rows.append(one.streams.first + one.slot.n_past - 1 - one.start)
            places.append(one.slot.id)
            self._known[one.slot.id] = one.slot.n_past
        if taps is None:
            return
        (stream,) = taps.of(self.taps)  # [n_rows of the pass, d_target]
        if self._states is None:
            self._states = stream.new_zeros((self._store.sizes.n_slots, stream.shape[1]))
        row, place = upload((np.asarray(rows), np.asarray(places)), stream.device)
        self._states.index_copy_(0, place, stream.index_select(0, row))

    def draft(self, wants: Sequence[Want], tails: Tails | None = None) -> Guesses | None:
        if tails is not None:
            return None  # which of the target's pages are within a window the host plans
        able = [i for i, want in enumerate(wants) if self._known.get(want.slot.id) == want.slot.n_past]
        if not able:
            return Unrolled(wants)
        slots = [wants[i].slot for i in able]
        assert self._states is not None  # they are known
        (place,) = upload((np.asarray([slot.id for slot in slots]),), self._states.device)
        (newest,) = upload((np.asarray([slot.tokens[-1] for slot in slots]),), self._states.device)
        said, states = self._run(slots, newest, self._states.index_select(0, place))

        def step(going: Going) -> Rows:
            nonlocal states
            said, states = self._run([wants[i].slot for i in going.wants], going.token_ids, going.of(states))
            return self._head.logits(said), None

        return Unrolled(wants).launch(able, (self._head.logits(said), None), step)

    def _run(self, slots: Sequence[Slot], token_ids: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """The row of each slot. token_ids: [n_slots] int64. states: [n_slots, d_target]. Returns as `run` does."""
        spans = [Span(slot.id, (UNREAD,), slot.n_past - 1, 0, 1) for slot in slots]
        batch = self._cache.batch(self._cache.primary, spans, token_ids)
        if batch.frame is None or self._captured is None:
            return self._head.run(batch, states, self._store)
        said, states = self._captured(batch, (states,))
        return wanted(batch, said), wanted(batch, states)
