"""The ingress' side: the runs of its requests. What happens to them comes in on one port, from all replicas."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from functools import partial

from pydantic import ValidationError

from slipstream.engine.api import Event, Failed
from slipstream.engine.errors import EngineStopped
from slipstream.engine.service.run.event_stream import Stream
from slipstream.engine.stats import EngineStats
from slipstream.server.cluster import run_frames
from slipstream.server.cluster.moving import ReplicaLost
from slipstream.server.cluster.run_frames import FRAMES, HELLO, ORDERS, Frame, Order
from slipstream.server.report.logs import logger

log = logger(__name__)

HELLO_S = 10.0  # that a connection may take to say whose it is


class Run(Stream):
    """Implements `moving.Run`. `__anext__` raises `ReplicaLost` once that is lost, behind what came before."""

    def __init__(self, name: str, runs: Runs) -> None:
        super().__init__((), "", finish=partial(runs.order, self, "finish"), cancel=self._leave)
        self.name = name
        self.replica = ""  # once it has spoken
        # Done once it is admitted; fails with what it was refused with, or with `ReplicaLost`.
        self.admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._has_begun = False
        self._runs = runs

    async def __anext__(self) -> Event:
        event = await super().__anext__()
        if isinstance(event, Failed) and isinstance(event.error, ReplicaLost):
            raise event.error
        return event

    def trust(self) -> None:
        self._runs.order(self, "trust")

    def take(self, frame: Frame, replica: str) -> None:
        """What its replica says of it."""
        self.replica = replica
        self._has_begun |= frame.begun
        event = frame.event
        if frame.admitted is not None:
            self.prompt_ids, self.prompt_tail = frame.admitted.prompt_ids, frame.admitted.prompt_tail
            if not self.admitted.done():
                self.admitted.set_result(None)
        elif frame.left:
            self.lose("it makes room, or stops", died=False)
        elif isinstance(event, Failed) and isinstance(event.error, EngineStopped):
            self.lose(str(event.error), died=True)
        elif isinstance(event, Failed) and not self.admitted.done():
            self.admitted.set_exception(event.error)
        elif event is not None:
            self.push(event)

    def lose(self, reason: str, *, died: bool) -> None:
        """Its replica is lost. died: by itself; what had not begun there cannot be the cause."""
        lost = ReplicaLost(reason, self.replica, died=died and self._has_begun)
        if not self.admitted.done():
            self.admitted.set_exception(lost)
        else:
            self.push(Failed(lost))
        self._runs.drop(self)

    def _leave(self) -> None:
        self._runs.order(self, "cancel")
        self._runs.drop(self)


class Runs:
    """All runs of an ingress. Used on one event loop."""

    def __init__(self) -> None:
        self.word = secrets.token_urlsafe(16)  # without it a connection is refused
        self.address = ("", 0)  # host and port, once `open` has been called
        self.stats: dict[str, EngineStats] = {}  # the latest of each replica that is connected
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._runs: dict[str, Run] = {}
        self._numbers = itertools.count()
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()

    async def open(self, host: str) -> None:
        """Listen on a free port for the replicas. Raises `OSError`."""
        self._server = await asyncio.start_server(self._connected, host, 0)
        self.address = host, self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Replicas notice, and end what runs for this ingress."""
        if self._server is not None:
            self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def new(self, request_id: str) -> Run:
        """A run of a request; names are never used twice."""
        run = Run(f"{request_id}/{next(self._numbers)}", self)
        self._runs[run.name] = run
        return run

    def drop(self, run: Run) -> None:
        """Nothing more is taken for the run."""
        self._runs.pop(run.name, None)

    def order(self, run: Run, verb: run_frames.Verb) -> None:
        """Order the run's replica, if it has spoken."""
        writer = self._writers.get(run.replica)
        if writer is not None:
            run_frames.write(writer, ORDERS.dump_json([Order(verb, run.name)]))

    def lose(self, replica: str, reason: str, *, died: bool) -> None:
        """All runs at the replica are lost."""
        for run in [one for one in self._runs.values() if one.replica == replica]:
            run.lose(reason, died=died)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A replica's connection, from its first words to its end."""
        try:
            async with asyncio.timeout(HELLO_S):
                hello = HELLO.validate_json(await run_frames.read(reader))
        except (EOFError, ValidationError, TimeoutError):
            writer.close()
            return
        if not secrets.compare_digest(hello.word.encode(), self.word.encode()):
            log.warning("stranger_on_the_replicas_port", peer=writer.get_extra_info("peername"))
            writer.close()
            return
        name = hello.replica
        self._writers[name] = writer
        try:
            while True:
                for frame in FRAMES.validate_json(await run_frames.read(reader)):
                    self._take(frame, name)
        except EOFError:
            log.warning("replica_lost", replica=name)
        finally:
            writer.close()
            if self._writers.get(name) is writer:
                del self._writers[name]
            self.stats.pop(name, None)
            self.lose(name, "its process has ended", died=True)

    def _take(self, frame: Frame, replica: str) -> None:
        if frame.stats is not None:
            self.stats[replica] = frame.stats
        run = self._runs.get(frame.run)
        if run is not None:
            run.take(frame, replica)
            if frame.done is not None or frame.failed is not None:
                self.drop(run)
