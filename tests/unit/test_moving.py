"""Requests move between scripted replicas: what each run is asked, what the client gets, and when it is enough."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, field, replace

import pytest

from slipstream.engine.api import (
    Delta,
    Done,
    Echo,
    Event,
    Failed,
    Progress,
    Request,
    Sampling,
    Speculation,
    Timings,
    Usage,
)
from slipstream.engine.drafting import Step
from slipstream.engine.errors import EngineError, InvalidRequest, Overloaded, ReplicasFailed, TimedOut
from slipstream.server.cluster import moving
from slipstream.server.cluster.moving import MovingStream, ReplicaLost, submit
from tests.http.serving import logged

ASK = Request(id="one", prompt="x", sampling=Sampling(seed=4), slot=1)
DIED, DRAINS = ReplicaLost("killed"), ReplicaLost("leaves", died=False)
LONG = moving._HARMLESS

# What a replica does: events, then an error, or a wait for ever.
Script = list[Event | Exception | None]


def delta(*token_ids: int) -> Delta:
    pieces = tuple(f"{one} " for one in token_ids)
    return Delta("".join(pieces), token_ids, (None,) * len(token_ids), pieces)


def done(*times: float) -> Done:
    speculation = Speculation((), 0, 0, 0.0, 0, (0,), {})
    return Done("stop", None, Usage(2, 0, 3), Timings(*(times or (1.0, 2.0, 3.0, 0.25, 0.5))), speculation, 4)


@dataclass
class Scripted:
    """Implements `Run`, and begins it."""

    replica: str
    script: Script
    refuses: Exception | None = None
    prompt_ids: tuple[int, ...] = (8, 9)
    prompt_tail: str = "tail"
    asked: list[Request] = field(default_factory=list)
    n_trusted: int = 0
    n_finished: int = 0
    n_closed: int = 0

    async def submit(self, request: Request) -> Scripted:
        self.asked.append(request)
        if self.refuses is not None:
            raise self.named(self.refuses)
        return self

    def named(self, error: Exception) -> Exception:
        """The error as this replica raises it."""
        is_loss = isinstance(error, ReplicaLost)
        return ReplicaLost(str(error), self.replica, died=error.died) if is_loss else error

    def trust(self) -> None:
        self.n_trusted += 1

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        happens = self.script.pop(0) if self.script else None
        if happens is None:
            await asyncio.Event().wait()
        if isinstance(happens, Exception):
            raise self.named(happens)
        assert happens is not None
        return happens

    def finish(self) -> None:
        self.n_finished += 1

    async def aclose(self) -> None:
        self.n_closed += 1


@dataclass
class InTurn:
    """Implements `Place`: those given, one after the other."""

    left: list[Scripted]
    asked: list[tuple[set[str], bool]] = field(default_factory=list)  # (avoid, alone)

    async def __call__(self, request: Request, avoid: Collection[str], *, alone: bool) -> Scripted:
        self.asked.append((set(avoid), alone))
        return await self.left.pop(0).submit(request)


def replicas(*scripts: Script) -> tuple[InTurn, list[Scripted]]:
    made = [Scripted(name, script) for name, script in zip("abcdef", scripts, strict=False)]
    return InTurn([*made]), made


async def read(stream: MovingStream) -> list[Event]:
    return [event async for event in stream]


def error_of(events: list[Event]) -> EngineError:
    assert isinstance(events[-1], Failed)
    return events[-1].error


async def test_the_next_run_is_asked_for_what_is_missing() -> None:
    there, (a, b) = replicas([delta(1, 2), delta(3), DRAINS], [delta(4), done()])
    stream = await submit(there, replace(ASK, echo=True), 3)
    assert (stream.prompt_ids, stream.prompt_tail) == ((8, 9), "tail")
    events = await read(stream)
    assert [one.token_ids for one in events if isinstance(one, Delta)] == [(1, 2), (3,), (4,)]
    assert isinstance(events[-1], Done)
    assert a.asked == [replace(ASK, echo=True)]
    assert b.asked == [replace(ASK, echo=True, prompt=(8, 9), slot=None, emitted=(1, 2, 3))]
    assert there.asked == [(set(), False), ({"a"}, False)]
    assert [stream.n_moves, a.n_trusted, b.n_trusted] == [1, 0, 0]
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_every_run_has_the_same_seed() -> None:
    seedless = replace(ASK, sampling=Sampling())
    seeds = set()
    for _ in range(2):
        there, made = replicas([delta(1), DRAINS], [DRAINS], [done()])
        await read(await submit(there, seedless, 3))
        asked = {one.asked[0].sampling.seed for one in made}
        assert len(asked) == 1
        assert None not in asked
        seeds |= asked
    assert len(seeds) == 2, "it is drawn"
    there, made = replicas([done()])
    await read(await submit(there, seedless, 3, seed=17))
    assert made[0].asked[0].sampling.seed == 17
    there, made = replicas([done()])
    await read(await submit(there, ASK, 3, seed=17))
    assert made[0].asked[0].sampling.seed == 4


async def test_echo_and_progress_come_once() -> None:
    echo = Echo((8, 9), ("a", "b"))
    far = [Progress(2, 0, n, 0.0, 0) for n in range(3)]
    there, _ = replicas([far[0], far[1], DRAINS], [far[0], far[1], far[2], echo, DRAINS], [echo, done()])
    events = await read(await submit(there, ASK, 3))
    assert events[:-1] == [*far, echo]


async def test_steps_are_numbered_through() -> None:
    def stepped(index: int) -> Delta:
        return replace(delta(1), steps=(Step(index), Step(index + 1)))

    there, _ = replicas([stepped(0), DRAINS], [stepped(0), done()])
    events = await read(await submit(there, ASK, 3))
    assert [step.index for one in events if isinstance(one, Delta) for step in one.steps] == [0, 1, 2, 3]


async def test_it_moves_no_more_often_than_it_may() -> None:
    there, made = replicas([DRAINS], [delta(1), DRAINS], [delta(2), DRAINS], [done()])
    events = await read(await submit(there, ASK, 2))
    assert isinstance(error_of(events), ReplicasFailed)
    assert [len(one.asked) for one in made] == [1, 1, 1, 0]
    there, made = replicas([DRAINS], [delta(1), DRAINS], [delta(2), done()])
    assert isinstance((await read(await submit(there, ASK, 2)))[-1], Done)
    refusing, made = replicas([], [])
    for one in made:
        one.refuses = DRAINS
    with pytest.raises(ReplicasFailed):
        await submit(refusing, ASK, 1)


async def test_what_ran_where_a_replica_died_goes_on_alone() -> None:
    there, (_, b, c) = replicas([delta(1), DIED], [delta(2), DRAINS], [delta(3), done()])
    assert isinstance((await read(await submit(there, ASK, 3)))[-1], Done)
    assert [alone for _, alone in there.asked] == [False, True, True], "a drain acquits nobody"
    assert b.n_trusted == c.n_trusted == 0


async def test_what_kills_alone_is_failed(caplog: pytest.LogCaptureFixture) -> None:
    there, made = replicas([delta(1), DIED], [delta(2), DIED], [done()])
    events = await read(await submit(there, ASK, 3))
    assert isinstance(error_of(events), ReplicasFailed)
    assert not made[2].asked
    (told,) = logged(caplog, "request_kills_replicas")
    assert (told["request"], told["replica"]) == ("one", "b")


async def test_what_writes_enough_alone_is_suspect_no_more() -> None:
    enough = [delta(*range(i, i + 4)) for i in range(0, LONG, 4)]
    there, (_, b, c) = replicas([delta(1), DIED], [*enough, delta(7), DIED], [delta(8), done()])
    assert isinstance((await read(await submit(there, ASK, 3)))[-1], Done)
    assert [alone for _, alone in there.asked] == [False, True, True], "it is suspect of another death"
    assert [b.n_trusted, c.n_trusted] == [1, 0]
    there, (_, b, *_) = replicas([delta(1), DIED], [*enough[:-1], delta(7), DIED], [done()])
    assert isinstance(error_of(await read(await submit(there, ASK, 3))), ReplicasFailed)


async def test_a_full_queue_refuses_what_is_new_and_lets_wait_what_has_begun() -> None:
    full = Overloaded("full", 0.001)
    there, made = replicas([], [])
    made[0].refuses = full
    with pytest.raises(Overloaded):
        await submit(there, ASK, 3)
    there, made = replicas([delta(1), DRAINS], [], [], [delta(2), done()])
    made[1].refuses = made[2].refuses = full
    stream = await submit(there, ASK, 1)
    assert isinstance((await read(stream))[-1], Done)
    assert stream.n_moves == 1


async def test_a_refusal_elsewhere_ends_it() -> None:
    there, made = replicas([delta(1), DRAINS], [])
    made[1].refuses = InvalidRequest("emitted", "is wrong")
    assert isinstance(error_of(await read(await submit(there, ASK, 3))), InvalidRequest)


async def test_whoever_leaves_leaves_the_current_replica() -> None:
    there, (a, b) = replicas([delta(1), DRAINS], [delta(2)])
    stream = await submit(there, ASK, 3)
    assert [await anext(stream), await anext(stream)] == [delta(1), delta(2)]
    await stream.aclose()
    await stream.aclose()
    assert (a.n_closed, b.n_closed) == (0, 1)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_a_replica_that_is_lost_while_it_is_left_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def lost(self: Scripted) -> None:
        raise DIED

    monkeypatch.setattr(Scripted, "aclose", lost)
    there, _ = replicas([delta(1)])
    stream = await submit(there, ASK, 3)
    await anext(stream)
    await stream.aclose()


async def test_enough_is_enough_after_a_move_too() -> None:
    there, (a, b) = replicas([delta(1), DRAINS], [delta(2), delta(3), done()])
    stream = await submit(there, ASK, 3)
    stream.finish()
    await anext(stream)
    assert a.n_finished == 1, "before the first token it has no effect, then or later"
    stream.finish()
    await read(stream)
    assert (a.n_finished, b.n_finished) == (2, 2)


async def test_a_wait_that_is_cancelled_can_be_taken_up_again() -> None:
    class Late(Scripted):
        async def submit(self, request: Request) -> Scripted:
            return await asyncio.Future()

    there, _ = replicas([delta(1), DRAINS], [delta(2), done()])
    there.left.insert(1, Late("late", []))
    stream = await submit(there, ASK, 3)
    await anext(stream)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(stream), 0.01)
    assert (await read(stream))[0] == delta(2)
    assert there.asked == [(set(), False), ({"a"}, False), ({"a"}, False)]


async def test_all_runs_together_have_one_limit() -> None:
    there, (a, b) = replicas([delta(1), DRAINS], [None])
    events = await read(await submit(there, ASK, 3, request_timeout=0.05))
    assert isinstance(error_of(events), TimedOut)
    assert (a.n_closed, b.n_closed) == (0, 1)


async def test_times_are_those_of_all_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(0, 1000, 10))
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: float(next(now)))

    def stream_of(*scripts: Script) -> MovingStream:
        there, _ = replicas(*scripts)
        return MovingStream(there, ASK, 3, 0.0)

    *_, whole = [event async for event in stream_of([delta(1), done()])]
    assert isinstance(whole, Done)
    assert whole.timings == done().timings
    *_, late = [event async for event in stream_of([DRAINS], [delta(1), done()])]
    assert isinstance(late, Done)
    assert late.timings.queue_s > 10.0
    assert replace(late.timings, queue_s=1.0) == done().timings
    *_, cut = [event async for event in stream_of([delta(1), DRAINS], [delta(2), done()])]
    assert isinstance(cut, Done)
    assert cut.timings.queue_s == 0.0
    assert cut.timings.prompt_s >= 10.0
    assert cut.timings.generation_s >= 20.0
    assert (cut.timings.draft_s, cut.timings.verify_s) == (0.25, 0.5)
