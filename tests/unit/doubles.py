"""Drafters for tests: a text drafter that stands for a network, so that both sorts can be told what to say."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.engine.slot import Slot
from slipstream.engine.speculate.chain import Chain
from slipstream.engine.speculate.decide.value import Pass
from slipstream.engine.speculate.drafter import (
    DeviceDrafter,
    Draft,
    Guess,
    Guesses,
    Kept,
    TextDrafter,
    Want,
)
from slipstream.engine.speculate.tails import Tails


class Ready:
    """Guesses that are read already."""

    def __init__(self, guesses: list[Guess]) -> None:
        self._guesses = guesses

    @property
    def token_ids(self) -> Tensor:
        return torch.tensor([token_id for one in self._guesses for token_id in one.token_ids])

    def read(self) -> list[Guess]:
        return self._guesses


class AsNetwork(DeviceDrafter):
    """Says what a text drafter says, as a network that has to be read first."""

    def __init__(self, drafter: TextDrafter) -> None:
        self.name, self._drafter = drafter.name, drafter

    def begin(self, slot: Slot) -> None:
        self._drafter.begin(slot)

    def draft(self, wants: Sequence[Want], tails: Tails | None = None) -> Guesses | None:
        return Ready(self._drafter.draft(wants)) if tails is None else None

    def accept(self, kept: Sequence[Kept]) -> None:
        self._drafter.accept(kept)

    def end(self, slot: Slot) -> None:
        self._drafter.end(slot)


class Ahead(AsNetwork):
    """Guesses behind unread passes too."""

    def draft(self, wants: Sequence[Want], tails: Tails | None = None) -> Guesses | None:
        return super().draft(wants)


def read(drafter: DeviceDrafter, want: Want) -> Guess:
    """A network's guess for one want, with nothing unread before it."""
    guesses = drafter.draft([want])
    assert guesses is not None
    return guesses.read()[0]


def drafts_of(chain: Chain, wants: Sequence[Want], coming: Pass) -> list[Draft]:
    """What the chain drafts where nothing is unread, want by want."""
    drafts = chain.draft(wants, coming)
    assert drafts is not None
    return [drafts.by_slot.get(want.slot.id, Draft()) for want in wants]


class Faulty(TextDrafter):
    """Raises in one verb."""

    name = "faulty"

    def __init__(self, verb: str, error: Exception | None = None) -> None:
        self.verb, self.error = verb, error or RuntimeError(f"{verb} failed")
        self.n_calls = 0

    def _call(self, verb: str) -> None:
        if verb == self.verb:
            self.n_calls += 1
            raise self.error

    def begin(self, slot: Slot) -> None:
        self._call("begin")

    def guess(self, want: Want) -> Guess:
        self._call("draft")
        return Guess()

    def accept(self, kept: Sequence[Kept]) -> None:
        self._call("accept")

    def end(self, slot: Slot) -> None:
        self._call("end")
