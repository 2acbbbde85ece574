"""Plays an MTP drafter by hand over slots whose target runs on whole texts, and holds its logits against an oracle."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import pytest
import torch
from torch import Tensor

from slipstream.engine.api import Request, Sampling
from slipstream.engine.cache.cache import Cache
from slipstream.engine.cache.need import Sizes
from slipstream.engine.cache.store import Store
from slipstream.engine.core.slot_factory import Prepared, SlotFactory
from slipstream.engine.layers.decoder import Taps
from slipstream.engine.models.heads.mtp import Mtp
from slipstream.engine.models.network import Network
from slipstream.engine.settings import Settings
from slipstream.engine.slot import Slot
from slipstream.engine.speculate.drafter import NO_DRAFT, Guess, Kept, Streams, Want
from slipstream.engine.speculate.network import unroll
from slipstream.engine.speculate.network.draft_hidden import DraftHidden
from tests.oracle.head_rounds import CPU, N_CTX, PAGE, VOCAB, streams_of, worst

NAME = "draft-mtp"


class Oracle(Protocol):
    """A head over a whole text."""

    def logits(self, ids: Sequence[int], guesses: Sequence[int], hidden: Tensor) -> list[Tensor]:
        """Of each guess, [vocab]. ids: x_0 … x_n; hidden: the target's states at 0 … n - 1, [n, d_model]."""


@dataclass
class Stage:
    """A drafter over a head, and slots whose target is run on whole texts."""

    head: Mtp
    target: Network
    oracle: Oracle
    n_window_pages: int = 64  # of the head
    worst: float = 0.0
    n_compared: int = 0
    slots: list[Slot] = field(default_factory=list)

    def __post_init__(self) -> None:
        stores = {
            name: Store(
                needs, Sizes(n_slots=4, n_pages=64, page_size=PAGE, n_window_pages=n), torch.float32, CPU
            )
            for name, needs, n in (
                ("target", self.target.needs, 64),
                (NAME, self.head.needs, self.n_window_pages),
            )
        }
        for tensor in (t for layer in stores[NAME].layers for t in (layer.keys, layer.values)):
            tensor.fill_(float("nan"))  # what nobody wrote must not be read
        self.cache = Cache(stores, 4, 64, PAGE)
        self.drafter = DraftHidden(NAME, self.head, self.cache, N_CTX)

    def add(self, ids: Sequence[int]) -> Slot:
        sampling = Sampling(temperature=0.8, seed=len(ids))
        request = Request(id=str(len(self.slots)), prompt=tuple(ids), sampling=sampling)
        factory = SlotFactory(Settings(draft_max=5), (NAME,), N_CTX, VOCAB, frozenset())
        slot = factory.resolve(request, Prepared(ids, None))  # type: ignore[arg-type]
        slot.id = len(self.slots)
        self.slots.append(slot)
        self.begin(slot)
        return slot

    def begin(self, slot: Slot) -> None:
        slot.n_past = self.cache.begin(slot.id, slot.tokens, "")
        self.drafter.begin(slot)

    def accept(self, gains: dict[int, int]) -> None:
        """One pass of the target over the next tokens of each slot, all of them kept. gains: tokens by slot id."""
        taps, kept, parts = Taps(self.head.taps), [], []
        for slot in (self.slots[i] for i in gains):
            start, slot.n_past = slot.n_past, slot.n_past + gains[slot.id]
            assert self.cache.reserve(slot.id, "target", start, slot.n_past)
            self.cache.commit(slot.id, "target", slot.n_past)
            kept.append(Kept(slot, NO_DRAFT, 0, start, Streams(taps, sum(map(len, parts)))))
            parts.append(self.states(slot)[start:])
        taps.put(self.head.taps[0], torch.cat(parts))
        with torch.inference_mode():
            self.drafter.accept(kept)
        for slot in (self.slots[i] for i in gains):
            self.cache.publish(slot.id, slot.tokens, slot.n_prompt)

    def guesses(self, wants: Sequence[Want]) -> list[Guess]:
        guesses = self.drafter.draft(wants)
        assert guesses is not None
        return guesses.read()

    def states(self, slot: Slot) -> Tensor:
        return streams_of(self.target, slot.tokens[: slot.n_past], self.head.taps)[0]

    def draft(self, depths: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> dict[int, Sequence[int]]:
        """Drafts of some slots, every row of logits compared with the formula. depths: tokens by slot id."""
        seen: list[Tensor] = []

        def pick(logits: Tensor, rows: Sequence, **options: object) -> object:
            seen.append(logits.clone())
            return original(logits, rows, **options)  # type: ignore[arg-type]

        original = unroll.pick
        with monkeypatch.context() as patch, torch.inference_mode():
            patch.setattr(unroll, "pick", pick)
            made_now = self.guesses([Want(self.slots[i], depth) for i, depth in depths.items()])
        row = Counter[int]()
        for (i, depth), guess in zip(depths.items(), made_now, strict=True):
            assert len(guess) == depth
            slot = self.slots[i]
            start = self.cache.start(
                i, NAME
            )  # turned by as much, rows that see nothing before are those of a text
            expected = self.oracle.logits(slot.tokens[start:], guess.token_ids, self.states(slot)[start:])
            for j, theirs in enumerate(expected):
                assert theirs.std() > 0.3, "logits must be large enough to show a difference"
                self.worst = max(self.worst, worst(seen[j][row[j]], theirs))
                row[j] += 1
                self.n_compared += 1
        return {i: guess.token_ids for i, guess in zip(depths, made_now, strict=True)}

    def go_on(self, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
        """Rounds of three slots: drafts of other depths, not of all slots, of which any number is kept."""
        for step in range(7):
            order = rng.sample([0, 1, 2], 3)
            drafts = self.draft({i: rng.randint(1, 5) for i in order[: 3 - step % 2]}, monkeypatch)
            gains = {}
            for slot in (self.slots[i] for i in rng.sample(order, 3 - (step == 3))):
                draft = drafts.get(slot.id, ())
                n_accepted = rng.randint(0, len(draft))
                slot.tokens += [*draft[:n_accepted], rng.randrange(VOCAB)]
                gains[slot.id] = 1 + n_accepted
            self.accept(gains)
