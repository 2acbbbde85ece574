"""The replica's side: an engine runs requests for ingresses and sends each its events, over one connection to each.

Ray carries the requests and counts them; their events would cost it a call each, so they have their own way.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field, replace

from slipstream.engine.api import AsyncEngine, EventStream, Failed
from slipstream.engine.errors import EngineError, EngineFault, EngineStopped
from slipstream.engine.stats import EngineStats
from slipstream.server.cluster import run_frames
from slipstream.server.cluster.run_frames import (
    FRAMES,
    HELLO,
    ORDERS,
    Admitted,
    Assignment,
    Ending,
    Frame,
    Hello,
    Order,
)
from slipstream.server.report.logs import logger

log = logger(__name__)

STATS_S = 0.5  # between two reports of what the engine is doing
ROOM_S = 5.0  # that a request which must run alone waits for those that run; then they go on elsewhere


@dataclass(eq=False)
class _Guest:
    """A request that runs here, or waits to run alone."""

    assignment: Assignment
    link: _Link
    task: asyncio.Task[None] = field(init=False)
    stream: EventStream | None = None
    has_begun: bool = False
    is_alone: bool = False  # nobody else is let in, from when it comes
    holds: bool = False  # it is its turn to have the replica to itself
    leaves: bool = False  # goes on elsewhere


class _Link:
    """The connection to one ingress. What is sent within one turn of the loop goes out as one message."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.listening: asyncio.Task[None] | None = None
        self._waiting: list[Frame] = []

    async def send(self, frame: Frame, *, at_once: bool = False) -> None:
        """Send a frame; waits while the ingress is slow to read. To an ingress that is gone nothing is sent.

        at_once: not at the end of the loop's turn; the system has it, should this process die in the turn's rest.
        """
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting.append(frame)
        if at_once:
            self._flush()
        with contextlib.suppress(OSError):
            await self.writer.drain()

    def _flush(self) -> None:
        found, self._waiting = self._waiting, []
        if found and not self.writer.is_closing():
            run_frames.write(self.writer, FRAMES.dump_json(found, exclude_defaults=True))


class Host:
    """An engine that runs requests for ingresses. Used on one event loop."""

    def __init__(self, engine: AsyncEngine, name: str) -> None:
        self.engine = engine
        self._name = name
        self._links: dict[tuple[str, int], asyncio.Task[_Link]] = {}
        self._guests: dict[str, _Guest] = {}
        # Requests that must run alone take turns; while there are any, no others are let in.
        self._turn = asyncio.Lock()
        self._has_left = asyncio.Event()

    async def run(self, assignment: Assignment) -> Ending:
        """Run a request until it ends, by itself or by its ingress' order. Raises `OSError` if that is out of reach.

        All that happens to it is said in frames, refusals too.
        """
        if assignment.fingerprint not in ("", self.engine.info.fingerprint):
            return Ending(self._name, "another_model")
        link = await self._link(assignment)
        # Asked last: while a connection was made another may have come that wants to be alone.
        if self.is_held and not assignment.alone:
            return Ending(self._name, "busy")
        guest = _Guest(assignment, link, is_alone=assignment.alone)
        guest.task = asyncio.create_task(self._host(guest))
        self._guests[assignment.run] = guest
        try:
            await asyncio.wait({guest.task})
        finally:
            guest.task.cancel()
        return Ending(self._name, "over")

    @property
    def is_held(self) -> bool:
        """Whether a request has it to itself, or waits for that."""
        return any(one.is_alone for one in self._guests.values())

    @property
    def running(self) -> list[str]:
        """The runs that have begun."""
        return [name for name, one in self._guests.items() if one.has_begun]

    async def close(self) -> None:
        """Break the connections off. Their ingresses take it for this process' end."""
        for task in list(self._links.values()):
            task.cancel()
            if task.done() and not task.cancelled() and task.exception() is None:
                task.result().writer.close()

    async def _host(self, guest: _Guest) -> None:
        run, last = guest.assignment.run, Frame(guest.assignment.run, left=True)
        try:
            if guest.is_alone:
                await self._hold(guest)
            await self._answer(guest)
            return
        except asyncio.CancelledError:
            if not guest.leaves:
                return  # by the ingress, which waits for nothing
        except EngineStopped as error:
            if self.engine.status == "failed":
                last = run_frames.frame_of(run, Failed(error))
        except EngineError as error:
            last = run_frames.frame_of(run, Failed(error))
        except Exception:
            log.exception("run_failed", run=run)
            last = run_frames.frame_of(run, Failed(EngineFault("the replica has failed; its log says why")))
        finally:
            self._guests.pop(run, None)
            self._share(guest)
            self._has_left.set()
        await guest.link.send(last)

    async def _answer(self, guest: _Guest) -> None:
        """Run it and send what happens. Raises `EngineError`; `EngineStopped` also while it runs."""
        run, link = guest.assignment.run, guest.link
        guest.has_begun = True
        await link.send(Frame(run, begun=True), at_once=True)
        # By the run's name: the engine may still be leaving an earlier run of the same request.
        stream = await self.engine.submit(replace(guest.assignment.request, id=run))
        guest.stream = stream
        try:
            await link.send(Frame(run, admitted=Admitted(tuple(stream.prompt_ids), stream.prompt_tail)))
            async for event in stream:
                if isinstance(event, Failed) and isinstance(event.error, EngineStopped):
                    raise event.error
                await link.send(run_frames.frame_of(run, event))
        finally:
            await stream.aclose()

    async def _hold(self, guest: _Guest) -> None:
        """Wait until nothing else runs; nothing will before `_share`."""
        await self._turn.acquire()
        guest.holds = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ROOM_S):
                await self._emptied()
        for name in self.running:
            self._guests[name].leaves = True
            self._guests[name].task.cancel()
        await self._emptied()

    def _share(self, guest: _Guest) -> None:
        """Let others run beside the guest, if it had the replica to itself."""
        guest.is_alone = False
        if guest.holds:
            guest.holds = False
            self._turn.release()

    async def _emptied(self) -> None:
        while self.running:
            self._has_left.clear()
            await self._has_left.wait()

    async def _link(self, assignment: Assignment) -> _Link:
        """The connection to the request's ingress, made if there is none. Raises `OSError`."""
        task = self._links.get(assignment.ingress)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = asyncio.create_task(self._connected(assignment.ingress, assignment.word))
            self._links[assignment.ingress] = task
        return await asyncio.shield(task)

    async def _connected(self, ingress: tuple[str, int], word: str) -> _Link:
        link = _Link(*await asyncio.open_connection(*ingress))
        run_frames.write(link.writer, HELLO.dump_json(Hello(word, self._name)))
        link.listening = asyncio.create_task(self._listen(ingress, link))
        return link

    async def _listen(self, ingress: tuple[str, int], link: _Link) -> None:
        """Carry out an ingress' orders, and report to it, until it is gone; what runs for it ends with it."""
        reporting = asyncio.create_task(self._report(link))
        try:
            while True:
                for order in ORDERS.validate_json(await run_frames.read(link.reader)):
                    self._obey(order)
        except EOFError:
            log.info("ingress_left", ingress=f"{ingress[0]}:{ingress[1]}")
        finally:
            reporting.cancel()
            del self._links[ingress]
            link.writer.close()
            for guest in list(self._guests.values()):
                if guest.link is link:
                    guest.task.cancel()

    def _obey(self, order: Order) -> None:
        guest = self._guests.get(order.run)
        if guest is None:
            return
        if order.verb == "cancel":
            guest.task.cancel()
        elif order.verb == "trust":
            self._share(guest)
        elif guest.stream is not None:
            guest.stream.finish()

    async def _report(self, link: _Link) -> None:
        """Send what the engine is doing, now and then, where it has changed."""
        sent: EngineStats | None = None
        while True:
            stats = self.engine.stats()
            if stats != sent:
                await link.send(Frame(stats=stats))
                sent = stats
            await asyncio.sleep(STATS_S)
