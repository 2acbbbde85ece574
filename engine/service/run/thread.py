"""`AsyncEngine` over one engine thread: an inbox of commands, an outbox of events.

Everything of the engine lives on its thread, everything of a stream on the event loop. Between them go plain
data and one `call_soon_threadsafe` per step. Requests are prepared beside both (`preparing`).
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TypeVar

from slipstream.engine.api import Chat, Done, Event, Failed, ModelInfo, Prompt, Request, SlotFile, Status
from slipstream.engine.batch import use_device
from slipstream.engine.core.engine import Engine
from slipstream.engine.core.slot_factory import SlotFactory
from slipstream.engine.device_loss import device_loss, raise_if_lost
from slipstream.engine.drafting import Drafting
from slipstream.engine.errors import (
    DeviceLost,
    EngineStopped,
    RankLost,
    StepFailed,
    Unsupported,
)
from slipstream.engine.service.run.admission import Places, check_request
from slipstream.engine.service.run.event_stream import Stream
from slipstream.engine.service.run.picture import Picture
from slipstream.engine.service.run.preparing import Preparing, Text
from slipstream.engine.service.run.rank_processes import RankProcesses
from slipstream.engine.service.run.showing import without_pixels
from slipstream.engine.service.run.slot_files import SlotFiles
from slipstream.engine.settings import Settings
from slipstream.engine.stats import EngineStats

log = logging.getLogger(__name__)

_WATCH_S = 1.0  # between a waiting thread's looks whether the engine's thread still lives

T = TypeVar("T")


class ThreadEngine:
    """Implements `engine.api.AsyncEngine`."""

    def __init__(
        self,
        engine: Engine,
        text: Text,
        info: ModelInfo,
        settings: Settings,
        slot_files: SlotFiles | None = None,
        processes: RankProcesses | None = None,
    ) -> None:
        """processes: that compute a part of the target; they end with the engine, and the engine with any of them."""
        self._engine = engine
        self._processes = processes
        self._info = info
        self._settings = settings
        self._status: Status = "ready"
        self._lost: DeviceLost | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, Stream] = {}
        self._places = Places(info.n_slots + settings.max_queue)
        self._n_preparing: Counter[str] = Counter()  # by owner
        self._step_since_s: float | None = None  # when the running step began; written by the engine's thread
        self._loop: asyncio.AbstractEventLoop | None = None
        self._idle = asyncio.Event()
        self._picture = Picture(engine)
        self._slots = SlotFactory(
            settings,
            info.drafters,
            info.n_ctx,
            info.vocab_size,
            text.tokenizer.eos_ids,
            info.sampling_defaults,
            text.suppressed,
        )
        self.clock = engine.clock  # of the steps; it belongs to the engine's thread
        self._preparing = Preparing(text, info, settings.request_timeout)
        self._slot_files = slot_files
        # One at a time, so that host memory holds one saved slot.
        self._filing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="slot-files")
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        if processes is not None:
            processes.watch(self._end_of_rank)

    # --- the event loop's side ---

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def status(self) -> Status:
        """Asked on the event loop, by probes and twice a second: here a step that hangs is noticed."""
        limit_s = self._settings.step_timeout
        if self._status != "failed" and limit_s and self.step_age_s > limit_s:
            log.error("a step has taken more than %g s; --step-timeout sets the limit", limit_s)
            self._fail(TimeoutError())
        return self._status

    @property
    def device_loss(self) -> DeviceLost | None:
        return self._lost

    @property
    def step_age_s(self) -> float:
        since_s = self._step_since_s
        return 0.0 if since_s is None else self._engine.now() - since_s

    def stats(self) -> EngineStats:
        return self._picture.stats

    async def speculation(self) -> Drafting:
        # Not by the workers, which prepare requests.
        return await asyncio.to_thread(self.on_thread, self._engine.speculation)

    async def submit(self, request: Request) -> Stream:
        """Check and admit a request. Raises `RequestError`, `Overloaded` or `EngineStopped`."""
        self._check_open()
        streams = Counter(stream.owner for stream in self._streams.values())
        self._places.check(request.owner, self._n_preparing + streams)
        self._loop = asyncio.get_running_loop()
        self._n_preparing[request.owner] += 1
        try:
            prepared, tail = await self._preparing.prepared(request, self._engine.now())
            check_request(request, self._info)
            slot = await self._preparing.resolved(
                partial(self._slots.resolve, without_pixels(request), prepared), len(request.emitted)
            )
        finally:
            self._n_preparing[request.owner] -= 1
        self._check_open()
        stream = Stream(
            prepared.token_ids,
            tail,
            owner=request.owner,
            finish=lambda: self._inbox.put(lambda: self._finish(request.id)),
            cancel=lambda: self._cancel(request.id),
        )
        self._streams[request.id] = stream
        self._inbox.put(lambda: self._engine.add(slot))
        return stream

    async def prompt_ids(self, prompt: Prompt) -> list[int]:
        return await self._preparing.prompt_ids(prompt)

    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return await self._preparing.tokenize(text, add_special=add_special, parse_special=parse_special)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return await self._preparing.detokenize(token_ids)

    async def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        return await self._preparing.token_bytes(token_ids)

    async def render(self, chat: Chat) -> str:
        return await self._preparing.render(chat)

    async def save_slot(self, slot_id: int, filename: str, tenant: str) -> SlotFile:
        files = self._files()
        path = files.path(filename, tenant)

        def save() -> tuple[int, int]:
            saved = self.on_thread(lambda: self._engine.seats.remembered.save(slot_id, tenant))
            return len(saved.tokens), files.write(path, saved)

        return await self._filed(save)

    async def restore_slot(self, slot_id: int, filename: str, tenant: str) -> SlotFile:
        files = self._files()
        path = files.path(filename, tenant)

        def restore() -> tuple[int, int]:
            saved, n_bytes = files.read(path)
            return self.on_thread(
                lambda: self._engine.seats.remembered.restore(slot_id, saved, tenant)
            ), n_bytes

        return await self._filed(restore)

    async def erase_slot(self, slot_id: int, tenant: str) -> int:
        self._check_open()
        work = partial(self.on_thread, lambda: self._engine.seats.remembered.erase(slot_id, tenant))
        return await asyncio.get_running_loop().run_in_executor(self._filing, work)

    async def _filed(self, work: Callable[[], tuple[int, int]]) -> SlotFile:
        """Run work on a file, which returns (tokens, bytes)."""
        self._check_open()
        started = self._engine.now()
        n_tokens, n_bytes = await asyncio.get_running_loop().run_in_executor(self._filing, work)
        return SlotFile(n_tokens, n_bytes, self._engine.now() - started)

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, let the others finish, fail what is left after `timeout_s`."""
        if self._status == "ready":
            self._status = "draining"
        self._idle.clear()
        if self._streams:
            try:
                await asyncio.wait_for(self._idle.wait(), timeout_s)
            except TimeoutError:
                self._fail_all(EngineStopped("the server is shutting down"))

    async def close(self) -> None:
        """Stop the thread. Requests that are still open fail. A thread in a step that hangs ends with the process."""
        self._status = "draining" if self._status == "ready" else self._status
        self._fail_all(EngineStopped("the server is shutting down"))
        self._inbox.put(None)
        limit_s = _WATCH_S if self._status == "failed" else self._settings.step_timeout or None
        await asyncio.to_thread(self._thread.join, limit_s)
        if not self._thread.is_alive():
            self._engine.close()
        if self._processes is not None:
            self._processes.close()
        self._preparing.close()
        self._filing.shutdown(wait=False)

    def _check_open(self) -> None:
        if self._lost is not None:
            raise self._lost
        if self._status != "ready":
            raise EngineStopped(
                "the server is shutting down"
                if self._status == "draining"
                else "the engine has failed; its log says why"
            )

    def _files(self) -> SlotFiles:
        if self._slot_files is None:
            raise Unsupported("slot_save_path", "is not set, so slots cannot be saved")
        return self._slot_files

    def on_thread(self, work: Callable[[], T]) -> T:
        """Run work on the engine's thread between two steps, and wait for it on another thread.

        Raises what the work raises, and `EngineStopped` if the thread ends before it gets there.
        """
        result: Future[T] = Future()

        def command() -> None:
            try:
                result.set_result(work())
            except Exception as error:  # noqa: BLE001 - raised where it is awaited
                result.set_exception(error)
                raise_if_lost(error)

        self._inbox.put(command)
        while not wait([result], timeout=_WATCH_S).done and self._thread.is_alive():
            pass
        if not result.done():
            raise EngineStopped("the engine has stopped")
        return result.result()

    def _cancel(self, request_id: str) -> None:
        if self._streams.pop(request_id, None) is not None:
            self._inbox.put(lambda: self._engine.cancel(request_id))
            self._note_idle()

    def _fail_all(self, error: EngineStopped) -> None:
        for request_id, stream in list(self._streams.items()):
            self._push(request_id, stream, Failed(error))
            self._cancel(request_id)

    def _note_idle(self) -> None:
        if not self._streams:
            self._idle.set()

    def _deliver(self, events: Sequence[tuple[str, Event]]) -> None:
        """Hand a step's events to their streams. A cancelled request has no stream any more."""
        for request_id, event in events:
            stream = self._streams.get(request_id)
            if stream is None:
                continue
            self._push(request_id, stream, event)
            if isinstance(event, Done | Failed):
                self._streams.pop(request_id, None)
        self._note_idle()

    def _push(self, request_id: str, stream: Stream, event: Event) -> None:
        """Hand over an event. If that fails, its request ends, and the others hear of theirs."""
        try:
            stream.push(event)
        except Exception:
            log.exception("delivery failed request=%s", request_id)
            stream.break_off(Failed(StepFailed("an event could not be delivered")))
            self._cancel(request_id)

    def _fail(self, cause: BaseException) -> None:
        self._status = "failed"
        self._fail_all(self._lost or EngineStopped(f"the engine has failed: {type(cause).__name__}"))

    def _end_of_rank(self, error: RankLost) -> None:
        """In a thread that watches a rank. The engine may sleep, or be in a pass that breaks off by itself."""

        def end() -> None:
            raise error

        self._inbox.put(end)

    # --- the engine's thread ---

    def _finish(self, request_id: str) -> None:
        self._post(partial(self._deliver, self._engine.finish(request_id)))

    def _run(self) -> None:
        try:
            use_device(self._engine.target.network.device)
            while self._take_commands():
                self._step_since_s = self._engine.now()
                events = self._engine.step()
                self._step_since_s = None
                self._picture.renew()
                self._post(partial(self._deliver, events))
                self._engine.clock.lap("tell")
        except BaseException as cause:  # must be passed on, or all streams wait for ever
            log.exception("the engine has stopped")
            # At once, as there may be no loop yet, and a probe must not find a dead engine ready.
            self._lost, self._status = device_loss(cause), "failed"
            self._post(partial(self._fail, cause))

    def _take_commands(self) -> bool:
        """Run what waits in the inbox; sleep while there is nothing to compute. False ends the thread."""
        while True:
            try:
                command = self._inbox.get(block=not self._engine.busy)
            except queue.Empty:
                return True
            if command is None:
                return False
            self._step_since_s = self._engine.now()  # a device may hang here too
            command()
            self._step_since_s = None
            if not self._engine.busy:
                self._picture.renew()

    def _post(self, call: Callable[[], None]) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(call)
