"""draft-model: a small language model that guesses token by token, on the target's page ids.

All slots that draft share one ragged pass per position. K/V of a guess that was kept stays: `accept` only moves
the store's length over it. A slot that fell behind (long prompt, drafting switched off) catches up in chunks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.batch import Batch, Span
from engine.cache.cache import Cache
from engine.models.network import Network
from engine.sample.pick import pick
from engine.slot import Slot
from engine.speculate.drafter import Drafter, Guess, Kept, Want

STORE = "draft"


class DraftModel(Drafter):
    """Picks with the target's noise, truncation and temperature on its own logits."""

    name = "draft-model"
    is_free = False

    def __init__(self, network: Network, cache: Cache, chunk: int) -> None:
        """`chunk`: most rows of one slot that a catching-up pass may have."""
        self._network = network
        self._cache = cache
        self._chunk = chunk
        # Guesses whose rows are in the store past its length, per slot id.
        self._fed: dict[int, list[int]] = {}

    def begin(self, slot: Slot) -> None:
        self._fed.pop(slot.id, None)

    def end(self, slot: Slot) -> None:
        self._fed.pop(slot.id, None)

    def accept(self, kept: Sequence[Kept]) -> None:
        for one in kept:
            self._advance(one.slot)
        behind = [
            one.slot for one in kept if len(one.slot.tokens) - self._length(one.slot) > self._cache.page_size
        ]
        self._feed(behind)

    def draft(self, wants: Sequence[Want]) -> list[Guess]:
        drafts: dict[int, list[int]] = {want.slot.id: [] for want in wants}
        survival: dict[int, list[float]] = {want.slot.id: [] for want in wants}
        spans = {want.slot.id: list(want.slot.tokens[self._length(want.slot) :]) for want in wants}
        active = [
            want
            for want in wants
            if len(spans[want.slot.id]) <= self._chunk and self._reserve(want.slot, want.n_max)
        ]
        self._feed([want.slot for want in wants if want not in active])
        for want in active:
            self._fed[want.slot.id] = []
        while active:
            picked, probability = self._pass(active, spans, drafts)
            going_on = []
            for want, token_id, p in zip(active, picked, probability, strict=True):
                draft = drafts[want.slot.id]
                if token_id < 0 or p < want.slot.speculate.p_min:
                    continue
                draft.append(token_id)
                survival[want.slot.id].append(p)
                spans[want.slot.id] = [token_id]
                if len(draft) < want.n_max:
                    going_on.append(want)
            active = going_on
        return [Guess(drafts[want.slot.id], survival[want.slot.id]) for want in wants]

    def _pass(
        self, wants: Sequence[Want], spans: dict[int, list[int]], drafts: dict[int, list[int]]
    ) -> tuple[list[int], list[float]]:
        """One position for every active slot: feed its span, pick what follows."""
        batch_spans = []
        for want in wants:
            slot = want.slot
            draft = drafts[slot.id]
            n_past = len(slot.tokens) + len(draft) - len(spans[slot.id])
            batch_spans.append(Span(slot.id, spans[slot.id], n_past, len(draft[-1:]), 1))
        logits = self._forward(batch_spans)
        for want in wants:
            slot = want.slot
            if drafts[slot.id]:
                self._fed[slot.id].append(drafts[slot.id][-1])
            else:
                self._cache.commit(slot.id, STORE, len(slot.tokens))
        rows = [want.slot.row(drafts[want.slot.id]) for want in wants]
        choice = pick(logits, rows, want_probability=True)
        assert choice.probability is not None
        return choice.token_ids.tolist(), choice.probability.tolist()

    def _forward(self, spans: Sequence[Span]) -> torch.Tensor:  # [n_logits, vocab] float32
        tables = [self._cache.table(span.slot) for span in spans]
        batch = Batch.build(spans, tables, self._cache.page_size, self._network.device)
        return self._network.forward(batch, self._cache.stores[STORE])

    def _feed(self, slots: Sequence[Slot]) -> None:
        """Bring slots closer to their last token, one chunk each in one pass, wanting no logits."""
        spans = []
        for slot in slots:
            start = self._length(slot)
            end = min(start + self._chunk, len(slot.tokens) - 1)
            if start < end and self._cache.reserve(slot.id, STORE, start, end):
                spans.append(Span(slot.id, slot.tokens[start:end], start, 0, 0))
        if spans:
            self._forward(spans)
        for span in spans:
            self._cache.commit(span.slot, STORE, span.n_past + len(span.token_ids))

    def _advance(self, slot: Slot) -> None:
        """Move the length over guesses that became part of the sequence, whoever's draft brought them in.

        The last token stays to be fed: its row gives the next guess.
        """
        length = self._length(slot)
        for token_id in self._fed.pop(slot.id, []):
            if length >= len(slot.tokens) - 1 or slot.tokens[length] != token_id:
                break
            length += 1
        self._cache.commit(slot.id, STORE, length)

    def _reserve(self, slot: Slot, n_drafts: int) -> bool:
        return self._cache.reserve(slot.id, STORE, self._length(slot), len(slot.tokens) + n_drafts)

    def _length(self, slot: Slot) -> int:
        return self._cache.length(slot.id, STORE)
