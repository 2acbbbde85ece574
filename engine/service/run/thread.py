"""`AsyncEngine` over one engine thread: an inbox of commands, an outbox of events.

Everything of the engine lives on its thread, everything of a stream on the event loop. Between them go plain
data and one `call_soon_threadsafe` per step. Templates and tokenising run in a small worker pool.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from slipstream.engine.api import (
    Chat,
    Delta,
    Echo,
    EngineStats,
    Event,
    Failed,
    Infill,
    ModelInfo,
    Prompt,
    Request,
    SlotFile,
    Status,
)
from slipstream.engine.core.engine import Engine
from slipstream.engine.core.slot_factory import Prepared, SlotFactory
from slipstream.engine.drafting import Drafting
from slipstream.engine.errors import ContextTooLong, EngineStopped, InvalidRequest, Overloaded, Unsupported
from slipstream.engine.service.run.admission import check_request, n_chars_of
from slipstream.engine.service.run.event_stream import Stream
from slipstream.engine.service.run.picture import Picture
from slipstream.engine.service.run.slot_files import SlotFiles
from slipstream.engine.settings import Settings
from slipstream.engine.text.chat import ChatTemplate
from slipstream.engine.text.grammar import Grammars
from slipstream.engine.text.text_stream import TextStream
from slipstream.engine.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_RETRY_AFTER_S = 1.0
_N_TAIL = 64  # tokens of a prompt that say how it ends
_SHORT_TEXT = 1 << 15  # characters, tokenised in some 20 ms
# What may be tokenised and made text at once beyond the context's size, for instance to count a document's tokens.
_TEXT_BYTES, _TEXT_TOKENS = 1 << 20, 1 << 16
_WATCH_S = 1.0  # between a waiting thread's looks whether the engine's thread still lives

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Text:
    """The text side of a loaded checkpoint."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    grammars: Grammars


class ThreadEngine:
    """Implements `engine.api.AsyncEngine`."""

    def __init__(
        self,
        engine: Engine,
        text: Text,
        info: ModelInfo,
        settings: Settings,
        slot_files: SlotFiles | None = None,
    ) -> None:
        self._engine = engine
        self._text = text
        self._info = info
        self._settings = settings
        self._status: Status = "ready"
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, Stream] = {}
        self._n_preparing = 0
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
        )
        self.clock = engine.clock  # of the steps; it belongs to the engine's thread
        self._workers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="prepare")
        self._long_workers = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prepare-long")
        self._slot_files = slot_files
        # One at a time, so that host memory holds one saved slot.
        self._filing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="slot-files")
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # --- the event loop's side ---

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def status(self) -> Status:
        return self._status

    def stats(self) -> EngineStats:
        return self._picture.stats

    async def speculation(self) -> Drafting:
        # Not by the workers, which prepare requests.
        return await asyncio.to_thread(self.on_thread, self._engine.speculation)

    async def submit(self, request: Request) -> Stream:
        """Check and admit a request. Raises `RequestError`, `Overloaded` or `EngineStopped`."""
        self._check_open()
        n_open = len(self._streams) + self._n_preparing
        if n_open >= self._info.n_slots + self._settings.max_queue:
            raise Overloaded(
                f"{n_open - self._info.n_slots} requests are waiting already; --max-queue sets the limit",
                _RETRY_AFTER_S,
            )
        self._loop = asyncio.get_running_loop()
        self._n_preparing += 1
        try:
            admitted_s = time.perf_counter()
            n_chars = n_chars_of(request.prompt) + len(request.prediction or "")
            prepared, tail = await self._in_worker(lambda: self._prepare(request, admitted_s), n_chars)
            check_request(request, self._info)
            new_slot = self._slots.resolve(request, prepared)
        finally:
            self._n_preparing -= 1
        self._check_open()
        stream = Stream(
            prepared.token_ids,
            tail,
            finish=lambda: self._inbox.put(lambda: self._finish(request.id)),
            cancel=lambda: self._cancel(request.id),
        )
        self._streams[request.id] = stream
        self._inbox.put(lambda: self._engine.add(request.id, new_slot))
        return stream

    async def prompt_ids(self, prompt: Prompt) -> list[int]:
        return await self._in_worker(lambda: self._prompt_ids(prompt), n_chars_of(prompt))

    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        tokenizer = self._text.tokenizer
        n_tokens = max(self._info.n_ctx, _TEXT_BYTES // tokenizer.longest)
        tokenizer.check_size("content", text, n_tokens)
        return await self._in_worker(
            lambda: tokenizer.encode(text, add_special=add_special, parse_special=parse_special), len(text)
        )

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        most = max(self._info.n_ctx, _TEXT_TOKENS)
        if len(token_ids) > most:
            raise InvalidRequest("tokens", f"{len(token_ids)} at once; at most {most} (--ctx-size, if more)")
        return await self._in_worker(lambda: self._text.tokenizer.decode(token_ids, skip_special=False))

    async def render(self, chat: Chat) -> str:
        return await self._in_worker(
            lambda: self._template().render(chat, self._info.n_ctx), n_chars_of(chat)
        )

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
        started = time.perf_counter()
        n_tokens, n_bytes = await asyncio.get_running_loop().run_in_executor(self._filing, work)
        return SlotFile(n_tokens, n_bytes, time.perf_counter() - started)

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
        """Stop the thread. Requests that are still open fail."""
        self._status = "draining" if self._status == "ready" else self._status
        self._fail_all(EngineStopped("the server is shutting down"))
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)
        self._engine.close()
        self._workers.shutdown(wait=False)
        self._long_workers.shutdown(wait=False)
        self._filing.shutdown(wait=False)

    def _check_open(self) -> None:
        if self._status != "ready":
            raise EngineStopped(
                "the server is shutting down"
                if self._status == "draining"
                else "the engine has failed; its log says why"
            )

    async def _in_worker(self, work: Callable[[], T], n_chars: int = 0) -> T:
        """Run work on a text of so many characters. Long texts wait for each other, short ones for none of them."""
        pool = self._workers if n_chars <= _SHORT_TEXT else self._long_workers
        return await asyncio.get_running_loop().run_in_executor(pool, work)

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
            stream.push(Failed(error))
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
            stream.push(event)
            if not isinstance(event, Delta | Echo):
                del self._streams[request_id]
        self._note_idle()

    def _fail(self, cause: BaseException) -> None:
        self._status = "failed"
        self._fail_all(EngineStopped(f"the engine has failed: {type(cause).__name__}"))

    # --- preparing a request, on a worker ---

    def _template(self) -> ChatTemplate:
        if self._text.template is None:
            raise InvalidRequest("messages", "this model has no chat template; use /v1/completions")
        return self._text.template

    def _prepare(self, request: Request, admitted_s: float) -> tuple[Prepared, str]:
        """What the request's texts are to the engine, and how its prompt ends."""
        tokenizer, token_ids = self._text.tokenizer, self._prompt_ids(request.prompt)
        tail = tokenizer.decode(token_ids[-_N_TAIL:], skip_special=False)
        constraint = None
        if request.grammar is not None:
            constraint = self._text.grammars.constraint(request.grammar, tail)
        text = TextStream(tokenizer, token_ids, request.stop, skip_special=request.skip_special)
        return Prepared(token_ids, text, self._prediction_ids(request), constraint, admitted_s), tail

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        tokenizer, n_ctx = self._text.tokenizer, self._info.n_ctx
        if isinstance(prompt, Chat):
            token_ids = self._template().encode(prompt, n_ctx)
        elif isinstance(prompt, Infill):
            tokenizer.check_size("prompt", prompt.prefix + prompt.suffix, n_ctx)
            token_ids = tokenizer.infill(prompt.prefix, prompt.suffix)
        elif isinstance(prompt, str):
            tokenizer.check_size("prompt", prompt, n_ctx)
            token_ids = tokenizer.encode(prompt, add_special=True, parse_special=True)
        else:
            if len(prompt) >= n_ctx:
                raise ContextTooLong(len(prompt), n_ctx)
            token_ids = list(prompt)
            for token_id in token_ids:
                if not 0 <= token_id < self._info.vocab_size:
                    raise InvalidRequest(
                        "prompt", f"token {token_id} is not in the vocabulary of {self._info.vocab_size}"
                    )
        if not token_ids:
            raise InvalidRequest("prompt", "is empty")
        if len(token_ids) >= n_ctx:
            raise ContextTooLong(len(token_ids), n_ctx)
        return token_ids

    def _prediction_ids(self, request: Request) -> tuple[int, ...]:
        """The predicted text's tokens. They are never computed, only compared, but a longer reply cannot come."""
        if not request.prediction:
            return ()
        tokenizer, n_ctx = self._text.tokenizer, self._info.n_ctx
        tokenizer.check_size("prediction", request.prediction, n_ctx)
        token_ids = tokenizer.encode(request.prediction, add_special=False, parse_special=False)
        if len(token_ids) > n_ctx:
            raise InvalidRequest(
                "prediction", f"has {len(token_ids)} tokens, the context holds {n_ctx}; --ctx-size sets it"
            )
        return tuple(token_ids)

    # --- the engine's thread ---

    def _finish(self, request_id: str) -> None:
        self._post(partial(self._deliver, self._engine.finish(request_id)))

    def _run(self) -> None:
        try:
            while self._take_commands():
                events = self._engine.step()
                self._picture.renew()
                self._post(partial(self._deliver, events))
                self._engine.clock.lap("tell")
        except BaseException as cause:  # must be passed on, or all streams wait for ever
            log.exception("the engine has stopped")
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
            command()
            if not self._engine.busy:
                self._picture.renew()

    def _post(self, call: Callable[[], None]) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(call)
