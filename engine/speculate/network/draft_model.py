"""draft-model: a small language model that guesses token by token, on the target's page ids.

All slots that draft share one ragged pass per position. K/V of a guess that was kept stays: `accept` only moves
the store's length over it. What a slot lacks is fed when a draft is asked for; if that is much, its last tokens alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from slipstream.engine.batch import Batch, Span
from slipstream.engine.cache.cache import Cache
from slipstream.engine.models.captured import Capturing, Forward
from slipstream.engine.models.network import Network
from slipstream.engine.slot import Slot
from slipstream.engine.speculate.drafter import UNREAD, DeviceDrafter, Guesses, Kept, Want
from slipstream.engine.speculate.network.lanes import Lanes
from slipstream.engine.speculate.network.unroll import Going, Loop, Rows, Step, Unrolled
from slipstream.engine.speculate.tails import Tails
from slipstream.kernels.choose.op import RowParams

STORE = "draft"


class DraftModel(DeviceDrafter):
    """Picks with the target's noise, truncation and temperature on its own logits."""

    name = "draft-model"

    def __init__(self, network: Network, cache: Cache, chunk: int, n_context: int) -> None:
        """chunk: most rows of one slot in a pass. n_context: tokens before a guess that are fed at least."""
        self._run: Forward = network.forward
        self._cache = cache
        self._chunk = chunk
        self._n_context = n_context
        self._lanes: Lanes | None = None  # where passes are captured
        # Picks whose rows are in the store past its length, per slot id.
        self._fed: dict[int, list[int]] = {}
        self._unread: Counter[int] = Counter()  # per slot id, drafts that are unread

    def capture(self, capturing: Capturing) -> None:
        store, forward = self._cache.stores[STORE], self._run
        if store.device != capturing.stream.device:
            return  # a draft model on another device is not captured
        self._run = capturing.forward(forward, store)
        if store.is_positional and capturing.captures_loops:
            self._lanes = Lanes(lambda batch, _: [forward(batch, store, None)], store, capturing.capture)

    def begin(self, slot: Slot) -> None:
        self._fed.pop(slot.id, None)
        self._unread.pop(slot.id, None)

    def follows(self, slot: Slot) -> bool:
        return slot.id in self._fed

    def accept(self, kept: Sequence[Kept]) -> None:
        for one in kept:
            self._advance(one.slot)

    def n_unfed(self, slot: Slot) -> int:
        return max(0, len(slot.tokens) - max(self._length(slot), self._restart(slot)))

    def draft(self, wants: Sequence[Want], tails: Tails | None = None) -> Guesses | None:
        if tails is not None and not self._goes_on_behind(tails):
            return None
        n_lost = None if tails is None else tails.n_lost
        self._catch_up([want.slot for want in wants if self._may_catch_up(want, tails)], tails)
        able = [i for i, want in enumerate(wants) if self._is_near(want, tails) and self._reserve(want)]
        if tails is not None and len(able) < len(wants):
            return None

        def when_read(picked: Sequence[Sequence[int]]) -> None:
            for i in able:
                self._know(wants[i].slot, picked[i], is_late=tails is not None)

        unrolled = Unrolled(wants, n_lost, when_read)
        if not able:
            return unrolled
        first = self._first([wants[i] for i in able], tails)  # [n_able, vocab] float32
        unrolled.launch(able, (first, None), *self._loops(wants, n_lost))
        if tails is not None:
            self._unread.update(want.slot.id for want in wants)
        return unrolled

    def _is_near(self, want: Want, tails: Tails | None) -> bool:
        """Whether the rows that are missing can be fed with the pass that makes the first guess."""
        slot, n_missing = want.slot, len(want.slot.tokens) - self._length(want.slot)
        if tails is None:
            return n_missing <= self._chunk
        # Rows have to be there for all but the last two tokens behind the unread pass, however many drafts it keeps.
        if self._unread[slot.id]:
            return True
        drafts, fed = list(want.after[:-1]), self._fed.get(slot.id, [])
        return n_missing <= 1 if not drafts else n_missing == 0 and fed[: len(drafts) - 1] == drafts[:-1]

    def _goes_on_behind(self, tails: Tails) -> bool:
        store = self._cache.stores[STORE]
        return store.is_positional and store.device == tails.device

    def _first(self, wants: Sequence[Want], tails: Tails | None) -> Tensor:  # [n_wants, vocab] float32
        """Feed what each slot has gained; the logits of the first guesses."""
        store = self._cache.stores[STORE]
        if tails is not None:
            # The last two tokens, whichever they are: the rows of all tokens before them are there.
            spans = [_span(want.slot, (UNREAD,) * 2, want.n_tokens - 2, 0, 1) for want in wants]
            return self._run(self._batch(spans, tails.last.flatten(), tails.n_lost), store, None)
        slots = [want.slot for want in wants]
        # The last token at least, though its row may be there already: after a draft that no pass has verified.
        starts = [min(self._length(slot), len(slot.tokens) - 1) for slot in slots]
        spans = [
            _span(slot, slot.tokens[start:], start, 0, 1) for slot, start in zip(slots, starts, strict=True)
        ]
        logits = self._run(self._batch(spans), store, None)
        for slot in slots:
            self._cache.commit(slot.id, STORE, len(slot.tokens))
            self._fed.pop(slot.id, None)
        return logits

    def _know(self, slot: Slot, picked: Sequence[int], *, is_late: bool) -> None:
        """A draft is read: the rows of all its picks but the last are fed."""
        if is_late:
            if not self._unread[slot.id]:
                return  # another sequence is in the slot
            self._unread[slot.id] -= 1
            self._cache.commit(slot.id, STORE, len(slot.tokens))
        self._fed[slot.id] = list(picked[:-1])

    def _loops(self, wants: Sequence[Want], n_lost: Tensor | None) -> tuple[Step, Loop]:
        """How guesses after the first are made. n_lost: as for `Unrolled`."""
        store = self._cache.stores[STORE]

        def batch(going: Going) -> Batch:
            nonlocal n_lost
            n_lost = None if n_lost is None else going.of(n_lost)
            spans = [
                _span(wants[i].slot, (UNREAD,), wants[i].n_tokens + going.n_made - 1, 1, 1)
                for i in going.wants
            ]
            return self._batch(spans, going.token_ids, n_lost)

        def step(going: Going) -> Rows:
            return self._run(batch(going), store, None), None

        def loop(going: Going, params: RowParams, limits: Sequence[int]) -> tuple[Tensor, Tensor] | None:
            if self._lanes is None or not self._lanes.takes(len(limits)):
                return None
            return self._lanes(batch(going), params, limits)

        return step, loop

    def _batch(
        self, spans: Sequence[Span], token_ids: Tensor | None = None, n_lost: Tensor | None = None
    ) -> Batch:
        """token_ids: [n_tokens] int64, if they are only on the device; n_lost: as for `Batch.move_back`."""
        batch = self._cache.batch(STORE, spans, token_ids)
        if n_lost is not None:
            batch.move_back(n_lost, self._cache.page_size)
        return batch

    def _restart(self, slot: Slot) -> int:
        """Where a slot's rows are to begin at the latest: a page border with the context before the guess behind it."""
        size = self._cache.page_size
        return max(0, len(slot.tokens) - self._n_context) // size * size

    def _may_catch_up(self, want: Want, tails: Tails | None) -> bool:
        """Whether its rows end with those of certain tokens, so that more can be fed."""
        return tails is None or (len(want.after) == 1 and not self._unread[want.slot.id])

    def _catch_up(self, slots: Sequence[Slot], tails: Tails | None) -> None:
        """Feed all but what the pass that makes the first guess can take, in chunks, as far as there are pages."""
        n_left = self._chunk if tails is None else 1
        for slot in slots:
            if self._restart(slot) > self._length(slot):
                self._cache.restart(slot.id, STORE, self._restart(slot))
                self._fed.pop(slot.id, None)
        while True:
            spans = []
            for slot in slots:
                start, n = self._length(slot), len(slot.tokens)
                end = min(start + self._chunk, n - 1)
                if n - start > n_left and self._cache.reserve(slot.id, STORE, start, end):
                    spans.append(_span(slot, slot.tokens[start:end], start, 0, 0))
            if not spans:
                return
            self._run(self._batch(spans), self._cache.stores[STORE], None)
            for span in spans:
                self._cache.commit(span.slot, STORE, span.n_past + len(span.token_ids))

    def _advance(self, slot: Slot) -> None:
        """Move the length over guesses that became part of the sequence, whichever draft brought them in.

        The last token stays to be fed: its row gives the next guess.
        """
        length = self._length(slot)
        for token_id in self._fed.pop(slot.id):
            if length >= len(slot.tokens) - 1 or slot.tokens[length] != token_id:
                break
            length += 1
        self._cache.commit(slot.id, STORE, length)

    def _reserve(self, want: Want) -> bool:
        slot, end = want.slot, want.n_tokens + want.n_max
        return self._cache.reserve(slot.id, STORE, self._length(slot), end, want.n_max)

    def _length(self, slot: Slot) -> int:
        return self._cache.length(slot.id, STORE)


def _span(slot: Slot, token_ids: Sequence[int], n_past: int, n_drafts: int, n_logits: int) -> Span:
    """Tokens of a slot, with the images of its prompt as far as the draft model sees any.

    A model that sees none reads the tokens that stand for them: it has their places, and not what they show.
    """
    return Span(slot.id, token_ids, n_past, n_drafts, n_logits, slot.draft_images)
