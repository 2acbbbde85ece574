"""Slots that decode scripted texts on a scripted machine, pass by pass as `Engine.step` does it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from slipstream.engine.api import Request, Sampling
from slipstream.engine.sample.params import resolve_sampling
from slipstream.engine.slot import Slot, SpeculateParams
from slipstream.engine.speculate.drafter import Drafter
from tests.simulate.clock import Clock
from tests.simulate.drafters import ScriptedNetwork, ScriptedText
from tests.simulate.machine import Machine
from tests.simulate.planner import MOST_DRAFTED, Place, Planner, Verified, Work, outline, works_of
from tests.simulate.workload import Script, Workload

_SAMPLING = resolve_sampling(Sampling(temperature=0.0, seed=0), {}, [], 2**30)
_NO_TEXT = cast(Any, None)  # nothing here becomes characters

MakePlanner = Callable[[Sequence[Drafter], Clock], Planner]


@dataclass(frozen=True, slots=True)
class Scene:
    """What is played, but for the planner."""

    machine: Machine
    workload: Workload
    n_slots: int
    seed: int = 0
    noise: int = 0  # which of the machine's noises, of those that go with the seed


@dataclass(slots=True)
class Totals:
    """What has been played."""

    n_passes: int = 0
    n_tokens: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    seconds: float = 0.0  # virtual, without those in which the process is suspended


class World:
    """A scene under way. Requests take the slots in their order; each that ends is followed by the next."""

    def __init__(
        self, scene: Scene, make_planner: MakePlanner, start: Sequence[tuple[int, int]] = ()
    ) -> None:
        """Warms up. The first requests then begin with their prompts computed.

        start: per slot the number of its request, and how much of the reply is written; by default a different share.
        """
        self._scene = scene
        self.clock = Clock(scene.machine.trouble, scene.seed + 1000 * scene.noise)
        self._scripts: dict[int, Script] = {}
        text = ScriptedText(scene.machine.text, self.clock, self._scripts)
        self._network = ScriptedNetwork(scene.machine.network, self.clock, self._scripts)
        self.planner = make_planner([text, self._network], self.clock)
        self.totals = Totals()
        self._requests: dict[int, int] = {}  # by slot id: its request's number
        self._n_requests = 0
        most = max(128, scene.n_slots * (1 + MOST_DRAFTED))
        self.planner.warm_up(self._pass_of, min(most, scene.machine.batch_rows))
        self._started_s = self._worked_s
        self._running: list[Slot] = []  # oldest first
        for slot_id in range(scene.n_slots):
            if start:
                self._n_requests = start[slot_id][0]
            self._enter(slot_id, start[slot_id][1] if start else None, is_first=True)
        self._n_requests = 1 + max(self._requests.values())

    @property
    def places(self) -> list[tuple[int, int]]:
        """Where the slots are, as `start` has it."""
        slots = sorted(self._running, key=lambda slot: slot.id)
        return [(self._requests[slot.id], slot.n_decoded) for slot in slots]

    def play(self, *, n_passes: int = 0, n_tokens: int = 0) -> Totals:
        """Play so many passes more, or until there are so many tokens in all; returns what these passes came to."""
        before, totals = self._snapshot(), self.totals
        end = totals.n_passes + n_passes
        while totals.n_passes < end or totals.n_tokens < n_tokens:
            self._step()
        after = self._snapshot()
        return Totals(*(getattr(after, one) - getattr(before, one) for one in Totals.__slots__))

    @property
    def _worked_s(self) -> float:
        return self.clock.real_s - self.clock.stopped_s

    def _snapshot(self) -> Totals:
        return replace(self.totals, seconds=self._worked_s - self._started_s)

    def _pass_of(self, n_rows: int) -> float:
        return self.clock.spend(self._scene.machine.pass_s(n_rows, 0, n_rows), n_rows)

    def _enter(self, slot_id: int, n_written: int | None = None, *, is_first: bool = False) -> None:
        """The next request takes the slot. n_written: tokens of its reply that are there, if it is the slot's first."""
        script = self._scene.workload.script(self._scene.seed, self._n_requests)
        tokens = [0] * script.n_prompt
        if is_first:
            share = script.n_reply * slot_id // self._scene.n_slots
            tokens += script.truth[: share if n_written is None else n_written]
        types, n_max = self.planner.types, self.planner.n_max
        slot = Slot(
            slot_id,
            Request(id=str(self._n_requests), prompt=()),
            tokens,
            script.n_prompt,
            script.n_prompt + script.n_reply,
            _SAMPLING,
            SpeculateParams(types=types, n_max=n_max, n_min=0, p_min=0.0),
            _NO_TEXT,
            n_past=len(tokens) - 1 if is_first else 0,
        )
        self._requests[slot_id] = self._n_requests
        self._n_requests += 1
        self._scripts[slot_id] = script
        self._running.append(slot)
        self.planner.begin(slot)

    def _step(self) -> None:
        budget = self._scene.machine.batch_rows
        places = [Place.of(slot) for slot in self._running]
        wants, coming = outline(places, budget)
        drafts = self.planner.draft(wants, coming)
        works = works_of(places, drafts, budget)
        n_rows = sum(work.n_rows for work in works)
        n_prompt = sum(work.n_certain for work in works if work.n_certain > 1)
        seconds = self._scene.machine.pass_s(n_rows, n_prompt, sum(work.end for work in works))
        self.planner.measured(n_rows, self.clock.spend(seconds, n_rows))
        self.totals.n_passes += 1
        verified = [(work, self._keep(work)) for work in works]
        self.planner.settle(verified, coming)
        self._leave(verified)

    def _keep(self, work: Work) -> int:
        """Append what the target picks; returns how many drafts it accepted."""
        slot, n_accepted = work.slot, 0
        if work.n_picks:
            script = self._scripts[slot.id]
            at = len(slot.tokens) - slot.n_prompt
            for token_id in work.draft.token_ids:
                if token_id != script.truth[at + n_accepted]:
                    break
                n_accepted += 1
            slot.tokens += script.truth[at : at + n_accepted + 1]
            self.totals.n_tokens += n_accepted + 1
            self.totals.n_drafted += len(work.draft)
            self.totals.n_accepted += n_accepted
        slot.n_past = min(work.start + work.n_certain + n_accepted, len(slot.tokens) - 1)
        return n_accepted

    def _leave(self, verified: Sequence[Verified]) -> None:
        """Requests that are complete give their slots to the next."""
        for work, _ in verified:
            slot = work.slot
            if len(slot.tokens) >= slot.n_limit:
                self.planner.end(slot)
                self._running.remove(slot)
                self._enter(slot.id)
