"""Drafters that say what the script says, and take the machine's time for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.engine.slot import Slot
from slipstream.engine.speculate.drafter import (
    DeviceDrafter,
    Guess,
    Guesses,
    TextDrafter,
    Want,
)
from slipstream.engine.speculate.tails import Tails
from tests.simulate.clock import Clock
from tests.simulate.machine import NetworkTimes, TextTimes
from tests.simulate.workload import NETWORK, TEXT, Script

Scripts = Mapping[int, Script]  # of the running requests, by slot id


def _guess(name: str, want: Want, scripts: Scripts) -> Guess:
    script = scripts[want.slot.id]
    return script.told[name].guess(want.n_tokens - script.n_prompt, want.n_max)


class ScriptedText(TextDrafter):
    """Finds copies where the script has some."""

    name = TEXT

    def __init__(self, times: TextTimes, clock: Clock, scripts: Scripts) -> None:
        self._times, self._clock, self._scripts = times, clock, scripts

    def guess(self, want: Want) -> Guess:
        self._clock.spend(self._times.ask_s)
        return _guess(self.name, want, self._scripts)


@dataclass(frozen=True, slots=True)
class _Read:
    """Guesses that are read already."""

    guesses: list[Guess]

    @property
    def token_ids(self) -> Tensor:
        return torch.tensor([token_id for one in self.guesses for token_id in one.token_ids])

    def read(self) -> list[Guess]:
        return self.guesses


class ScriptedNetwork(DeviceDrafter):
    """Is right where the script says so; it has to be fed the text, as a draft model has."""

    name = NETWORK

    def __init__(self, times: NetworkTimes, clock: Clock, scripts: Scripts) -> None:
        self._times, self._clock, self._scripts = times, clock, scripts
        self._fed: dict[int, int] = {}  # by slot id: tokens of the text that it has seen

    def begin(self, slot: Slot) -> None:
        self._fed[slot.id] = slot.n_past

    def draft(self, wants: Sequence[Want], tails: Tails | None = None) -> Guesses | None:
        if tails is not None:
            return None
        guesses = [_guess(self.name, want, self._scripts) for want in wants]
        times = self._times
        n_fed = sum(max(1, self.n_unfed(want.slot)) for want in wants)
        n_guessed = sum(want.n_max for want in wants)
        depth = max(want.n_max for want in wants)
        self._clock.spend(
            times.call_s + times.position_s * depth + times.slot_s * n_guessed + times.row_s * n_fed
        )
        for want, one in zip(wants, guesses, strict=True):
            script, n = self._scripts[want.slot.id], len(want.slot.tokens)
            n_right = script.told[self.name].right[n - script.n_prompt]
            # The last guess has not been fed; the others stay as far as they are right.
            self._fed[want.slot.id] = n + max(0, min(n_right, len(one) - 1))
        return _Read(guesses)

    def n_unfed(self, slot: Slot) -> int:
        return max(0, min(self._times.context, len(slot.tokens) - self._fed[slot.id]))
