"""The engine: slots, a queue, and `step`, which moves every slot on by one pass.

No line here asks which drafter, which model family or which kind of cache. Single-threaded; the service owns
the thread.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from slipstream.engine.api import Delta, Done, Event
from slipstream.engine.cache.cache import Cache
from slipstream.engine.core import forward, plan
from slipstream.engine.core.clock import Clock
from slipstream.engine.core.finish import broken, done, echo, keep, progress, unsent
from slipstream.engine.core.flight import Flight
from slipstream.engine.core.plan import Capacity, Place, Work
from slipstream.engine.core.queue import Waiting
from slipstream.engine.core.seats import Seats
from slipstream.engine.core.warm import ENOUGH_S, warm_up
from slipstream.engine.device_loss import raise_if_lost
from slipstream.engine.drafting import Drafting
from slipstream.engine.errors import EngineError, EngineFault
from slipstream.engine.models.captured import Capturing
from slipstream.engine.models.network import Network
from slipstream.engine.slot import Ending, Slot, state_of
from slipstream.engine.speculate.acceptance import Acceptance, coupled
from slipstream.engine.speculate.chain import Chain
from slipstream.engine.speculate.decide.value import Pass
from slipstream.engine.speculate.drafter import Kept
from slipstream.engine.speculate.verify import Verdict
from slipstream.engine.stats import EngineStats

log = logging.getLogger(__name__)

_LEAST_WIDTH = 128  # rows up to which passes are measured at start, however few the slots


class Engine:
    """Continuous batching over slots; speculation on every step that pays for it.

    Its clock is its planner's (`Chain.now`): what a pass took and what a draft cost are weighed against each other.
    """

    def __init__(
        self,
        target: Network,
        cache: Cache,
        chain: Chain,
        capacity: Capacity,
        acceptance: Acceptance = coupled,
        waiting: Waiting | None = None,
    ) -> None:
        self.capacity = capacity
        self._cache = cache
        self._chain = chain
        self.now = chain.now
        self.clock = Clock(self.now)
        self.target = forward.Target(target, self.clock, acceptance, chain.taps, reads=chain.reads_streams)
        self.seats = Seats(
            cache, chain, capacity.n_slots, Waiting() if waiting is None else waiting, self.now
        )
        self._n_steps = self._n_prompt = self._n_completion = 0  # of all requests: passes, tokens
        self._flight: Flight | None = None  # launched behind a pass that was unread then
        self._read_s = 0.0  # when the last pass was read; 0: there has been nothing to do since

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.seats)

    def add(self, slot: Slot) -> None:
        """Queue a request. Free slots go to the owners in turn, to each owner's requests in order of arrival.

        One that wants a certain slot (`Request.slot`) waits for that, and holds up no other.
        """
        if not self.busy:
            self._read_s = 0.0
        self.seats.waiting.add(slot, self.now())

    def cancel(self, request_id: str) -> None:
        """Forget a request wherever it is. Unknown ids are requests that have just ended."""
        self.seats.waiting.remove(request_id)
        for slot in self.seats.of(request_id):
            self.seats.free(slot)

    def finish(self, request_id: str) -> list[tuple[str, Event]]:
        """End a request that has begun to reply, as it stands; returns its last event."""
        events: list[tuple[str, Event]] = []
        for slot in self.seats.of(request_id):
            if slot.n_decoded >= max(1, slot.n_emitted):
                with self.seats.guard(slot):
                    events.append((request_id, self._done(slot, Ending.ENOUGH)))
                    self.seats.free(slot)
        return [*events, *self.seats.failures()]

    def close(self) -> None:
        """Let the drafters write what is to outlive the process."""
        self._chain.close()

    @torch.inference_mode()
    def step(self) -> list[tuple[str, Event]]:
        """One turn of the loop: every running slot moves on. Returns events with their request's id.

        With `Capacity.overlaps` the next pass is launched before this pass is read, unless it depends on what is read.
        """
        self.clock.start()
        events: list[tuple[str, Event]] = [*self.seats.expired()]
        self.seats.fill()
        events += self._ended()
        # Of requests that have just got a slot: what is cached of their prompts.
        begun = ((one.request.id, progress(one, one.n_past, self.now())) for one in self.seats.running)
        events += [(name, far) for name, far in begun if far is not None]
        events += self.seats.failures()
        flight, self._flight = self._running_flight() or self._launch(), None
        if flight is None:
            self._read_s = 0.0
            return [*events, *self.seats.failures()]
        if self.capacity.overlaps and self._may_follow(flight):
            self._flight = self._launch(flight)
        outcomes = forward.read(self.target, self._cache, flight)
        self._n_steps += 1
        self._measure(flight)
        events += self._settle(outcomes, flight.coming)
        if self._flight is not None:
            self._flight.start_over()
        return events

    def _launch(self, unread: Flight | None = None) -> Flight | None:
        """The next pass, behind the unread pass if any; None: nothing to run, or the unread pass must be read first."""
        running = self.seats.running
        places = [Place.of(slot) for slot in running] if unread is None else unread.places(running)
        is_shared = any(place.n_gap == 1 for place in places)
        budget = self.capacity.budget(self._chain.pass_s, is_shared=is_shared)
        wants, coming = plan.wants(places, budget), plan.without_drafts(places, budget)
        tails = None
        if unread is not None:
            tails = unread.tails()
            # A slot that the unread pass does not move on has no end there to draft from.
            wants = [want for want in wants if tails is not None and want.slot.id in tails.slot_ids]
        self.clock.lap("plan")
        asked = self.now()
        drafts = self._chain.draft(wants, coming, tails)
        drafting_s = self.now() - asked
        self.clock.lap("draft")
        if drafts is None:
            return None
        works = plan.work(places, drafts.by_slot, budget, self._cache.page_size, self._next_border)
        if unread is not None:
            return self._launch_behind(unread, Flight([*works], coming, drafts, tails, self.now()))
        works = self.seats.make_room(works)
        self.clock.lap("plan")
        if not works:
            return None
        # Networks draft on the device, which does not wait then.
        if self._read_s and self.capacity.overlaps:
            self._chain.waited(self.now() - self._read_s - drafting_s)
        return forward.launch(self.target, self._cache, Flight([*works], coming, drafts, started=self.now()))

    def _launch_behind(self, unread: Flight, flight: Flight) -> Flight | None:
        """Launch the pass if there are pages for all of it: no slot gives up its pages for a pass that can wait."""
        if not flight.planned:
            return None
        if unread.is_certain:
            # Without drafts all that runs is kept, whatever the picks are, and the next batch is built upon it.
            for one in unread.works:
                if one is not None:
                    self._cache.commit(one.slot.id, forward.STORE, one.end)
        try:
            has_room = all(self.seats.has_room(one) for one in flight.planned)
        except Exception as error:
            raise_if_lost(error)
            # Planned again in the next step, it raises where its request is known.
            log.exception("no pages for a pass behind another; it waits")
            has_room = False
        if not has_room:
            flight.discard()
            return flight
        self.clock.lap("plan")
        unread.keep_streams()
        return forward.launch(self.target, self._cache, flight)

    def _may_follow(self, flight: Flight) -> bool:
        """Whether the next pass depends on nothing that only the host could do with the picks of an unread pass."""
        if self.target.acceptance is not coupled or flight.picks is None:
            return False
        if any(slot.reads_drafts or slot.prompt_logprobs is not None for slot in self.seats.running):
            return False
        if not flight.is_certain and not self._cache.stores[forward.STORE].is_positional:
            return False  # how much is kept decides what the next pass folds into its states
        # A snapshot is taken of a state before it moves on.
        works = [one for one in flight.works if one is not None]
        return not any(one.end == self._next_border(one.slot, one.start) for one in works)

    def _running_flight(self) -> Flight | None:
        """The pass that was launched in the last step, if any of its works still counts."""
        flight = self._flight
        if flight is None:
            return None
        flight.works = [self._still(one) for one in flight.works]
        if any(flight.works):
            return flight
        flight.read_drafts()  # or their drafters would count on the pass
        return None

    def _still(self, work: Work | None) -> Work | None:
        """The work, if it still counts: requests may have ended or started over since it was launched."""
        if work is None or work.slot not in self.seats.running:
            return None
        stands = work.start == work.slot.n_past and work.n_total == len(work.slot.tokens)
        return work if stands else None

    def _measure(self, flight: Flight) -> None:
        """Learn what the pass cost. A pass that was launched behind another began when that was over."""
        now = self.now()
        n_rows, seconds = flight.n_rows, now - max(flight.started, self._read_s)
        self._read_s = now
        self._chain.passed(n_rows, seconds, flight.drafts.call, is_usual=not flight.was_recorded)
        self.clock.passed(n_rows, seconds)

    def _next_border(self, slot: Slot, n_past: int) -> int | None:
        return self._cache.next_border(forward.STORE, n_past, slot.n_prompt)

    def _settle(
        self, outcomes: Sequence[tuple[Work, Verdict | EngineError]], coming: Pass
    ) -> list[tuple[str, Event]]:
        """Commit what each slot keeps, hand it to the drafters, and collect the clients' events."""
        events: list[tuple[str, Event]] = []
        kept: list[Kept] = []
        endings: dict[Slot, Ending] = {}
        for one, outcome in outcomes:
            slot = one.slot
            with self.seats.guard(slot):
                if isinstance(outcome, EngineError):
                    raise outcome
                told, ending = self._keep(one, outcome, coming)
                events += [(slot.request.id, event) for event in told]
                if ending is Ending.BROKEN:
                    self._end_or_start_over(slot)
                    continue
                if ending is not None:
                    endings[slot] = ending
                kept.append(Kept(slot, one.draft, outcome.n_accepted, one.start, outcome.streams))
        self.clock.lap("keep")
        self._chain.accept(kept)
        self.clock.lap("learn")
        over: list[Slot] = []
        for slot in (one.slot for one in kept):
            with self.seats.guard(slot):
                self._cache.publish(slot.id, slot.tokens, slot.n_prompt)
                if slot in endings:
                    events.append((slot.request.id, self._done(slot, endings[slot])))
                    over.append(slot)
        for slot in over:
            self.seats.free(slot)
        events += self.seats.failures()
        self.clock.lap("publish")
        return events

    def _keep(self, one: Work, verdict: Verdict, coming: Pass) -> tuple[list[Event], Ending | None]:
        """Append what the slot keeps of a pass and commit it: (the client's events, whether its request ends)."""
        slot = one.slot
        n_past = one.start + one.n_certain + verdict.n_accepted
        self._n_prompt += max(0, min(slot.n_prompt, n_past) - one.start)
        told = echo(slot, one.start, verdict.prompt_logprobs, is_complete=one.n_picks > 0)
        events: list[Event] = [] if told is None else [told]
        delta, ending = keep(slot, one.draft, verdict, self.capacity.eos_ids, self.now())
        slot.n_past = min(n_past, len(slot.tokens) - 1)
        # A reply of no tokens ends behind the prompt's last row, which a recurrent state has taken in.
        n_rows = max(slot.n_past, one.start + one.n_certain)
        if ending is not Ending.BROKEN and self._cache.length(slot.id, forward.STORE) < n_rows:
            self._cache.commit(slot.id, forward.STORE, n_rows)
        if (far := progress(slot, n_past, self.now())) is not None:
            events.append(far)
        if one.n_picks:
            self._count(slot, one, delta, coming)
            events += unsent(slot, delta)
        return events, ending

    def _ended(self) -> list[tuple[str, Event]]:
        """End the replies that were over when they got their slots, with the tokens of an earlier run."""
        events: list[tuple[str, Event]] = []
        for slot in [*self.seats.running]:
            if slot.ended is None:
                continue
            with self.seats.guard(slot):
                events.append((slot.request.id, self._done(slot, slot.ended)))
                self.seats.free(slot)
        return events

    def _end_or_start_over(self, slot: Slot) -> None:
        """No token could be picked. Behind pages that another request may have made, the fault may be that one's."""
        error = broken(slot)
        if not slot.is_behind_stored or not isinstance(error, EngineFault):
            raise error
        self.seats.start_over(slot)

    def _done(self, slot: Slot, ending: Ending) -> Done:
        synthetic = self.target.acceptance is not coupled
        return done(slot, ending, self.clock.rounds_s, synthetic=synthetic)

    def _count(self, slot: Slot, work: Work, delta: Delta, coming: Pass) -> None:
        """Credit a round. Accepted drafts behind an end token or stop string are not in the text and not counted.

        Drafts accepted at random are to show a chosen length, which those cut short (prompts, a request's end) cannot.
        """
        n_accepted = sum(source is not None for source in delta.sources)
        if self.target.acceptance is coupled or len(work.draft) == slot.speculate.n_max:
            slot.stats.histogram[n_accepted] += 1
        if not slot.stats.n_steps:
            slot.stats.rounds_s = self.clock.rounds_s
        slot.stats.step(len(work.draft), n_accepted, work.draft.author)
        self._n_completion += len(delta.token_ids)
        self._chain.credit(slot, work.draft, n_accepted, coming)

    @torch.inference_mode()
    def capture(self, capturing: Capturing) -> None:
        """Capture the passes of all networks; before `warm_up`, which then measures them as they will run."""
        network, store = self.target.network, self._cache.stores[forward.STORE]
        captured = capturing.forward(network.decoder, store, self.target.taps)
        self.target = replace(self.target, network=replace(network, captured=captured))
        self._chain.capture(capturing)

    @torch.inference_mode()
    def warm_up(self, n_drafts: int = 16, enough_s: float = ENOUGH_S) -> None:
        """Measure a pass at every width the engine will use, which also compiles what is compiled at first use.

        n_drafts: most of a slot.
        """
        log.info("warming up; at the very first start kernels are compiled, which may take a minute or two")
        capacity = self.capacity
        most = min(capacity.batch_size, capacity.n_ctx, max(_LEAST_WIDTH, capacity.n_slots * (1 + n_drafts)))
        warm_up(self.target, self._cache, self._chain.lengths.costs, most, n_drafts, enough_s)

    def stats(self) -> EngineStats:
        """A picture of the engine between two steps."""
        pool = self._cache.pool
        return EngineStats(
            slots=tuple(state_of(i, slot) for i, slot in enumerate(self.seats.slots)),
            n_waiting=len(self.seats.waiting),
            n_pages_free=pool.n_free,
            n_pages_cached=pool.n_cached,
            n_pages_held=pool.n_held,
            n_steps=self._n_steps,
            n_prompt_tokens=self._n_prompt,
            n_completion_tokens=self._n_completion,
            drafters={name: tally.count() for name, tally in self._chain.guard.totals.items()},
            n_preempted=self.seats.n_preempted,
            disabled_drafters=self._chain.guard.disabled,
            doubtful_drafters=self._chain.guard.doubtful,
            step_s=self.clock.totals(),
            step_average_s=self.clock.averages(),
        )

    def speculation(self) -> Drafting:
        """What drafting costs, promises and does, between two steps."""
        return self._chain.account.report(self.seats.running)
