"""Where the time of a loaded engine goes: requests played without HTTP, plainly and with drafts, for one slot and all.

Each set of requests runs twice: once as it is, for the parts of the steps (`engine.core.clock`) and the passes by rows,
and once in an engine that captures no passes, whose replay would call no op, with every op under a clock of its own. On
a GPU an op's call is its launch. What the device did is in the trace, which torch's profiler writes.
"""

from __future__ import annotations

import asyncio
import functools
import gzip
import itertools
import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, record_function

from slipstream.engine.api import Delta, Failed, Prompt, Request, Sampling, Speculate
from slipstream.engine.core.clock import Clock
from slipstream.engine.models.reading.documents import text_source
from slipstream.engine.naming import NO_DRAFTER
from slipstream.engine.service.run.thread import ThreadEngine
from slipstream.engine.service.start.launch import launch
from slipstream.engine.settings import Settings
from slipstream.engine.text.tokenizer import Tokenizer, by_id
from slipstream.kernels.dispatch import watched

PLAIN, DRAFTS = "plain", "drafts"
_N_PROMPT = 128  # tokens of a built-in prompt
_MARK = "slipstream clock"  # an event of the trace at a known time of the engine's clock

_ids = itertools.count()


class TraceNotWritten(Exception):
    """The file of a trace cannot be written; its text says which, and why."""


@dataclass(slots=True)
class OpTime:
    """The calls of an op."""

    n_calls: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """A set of requests that was played."""

    kind: str  # PLAIN or DRAFTS
    n_slots: int  # requests at a time
    n_tokens: int
    seconds: float  # from the first request to the end of the last step
    n_steps: int
    parts: Mapping[str, float]  # part of the steps -> seconds
    passes: Mapping[int, tuple[int, float]]  # rows, rounded up to a power of two -> (passes, seconds)
    ops: Mapping[str, OpTime] = field(default_factory=dict)  # of all networks, in the second playing
    ops_steps: int = 0  # steps of that
    ops_steps_s: float = 0.0  # and their seconds


@dataclass(frozen=True, slots=True)
class Profile:
    """What `slipstream profile` reports."""

    model: str
    n_params: int
    dtype: str
    device: str
    threads: int  # of the CPU
    drafters: Sequence[str]
    runs: Sequence[Run]


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be played."""

    prompts: Sequence[Prompt] | None  # in turn; None: random prompts
    n_tasks: int  # requests in each way of running them
    n_tokens: int  # most of a reply
    trace: Path | None = None  # file to write a trace to


@dataclass(frozen=True, slots=True)
class _Tasks:
    prompts: Sequence[Prompt]
    n_tokens: int


def profiled(settings: Settings, order: Order) -> Profile:
    """Load the engine, play in every way there is, close it.

    Raises `LoadError`, what `submit` raises for a prompt, what a request failed with, and `TraceNotWritten`.
    """
    if order.trace is not None:
        _check_temporary_folder(order.trace)
    with _launched(settings) as engine:
        prompts = order.prompts or random_prompts(engine, order.n_tasks)
        tasks = _Tasks([*itertools.islice(itertools.cycle(prompts), order.n_tasks)], order.n_tokens)
        found = _profile(engine, tasks)
        if order.trace is not None:
            _trace(engine, tasks, order.trace)
    with _launched(replace(settings, capture_passes=False), warns=False) as engine:
        _play(engine, _Tasks(tasks.prompts[:1], tasks.n_tokens), DRAFTS, 1)
        return replace(found, runs=[_with_ops(engine, tasks, run) for run in found.runs])


def _check_temporary_folder(trace: Path) -> None:
    """torch's profiler and its file need one. Raises `TraceNotWritten`."""
    try:
        tempfile.gettempdir()
    except OSError as error:
        raise TraceNotWritten(
            f"{trace}: no folder for temporary files: {error.strerror}; TMPDIR may name one that can be written to"
        ) from error


@contextmanager
def _launched(settings: Settings, *, warns: bool = True) -> Iterator[ThreadEngine]:
    """warns: not the second time, as both would warn of the same."""
    logging.disable(logging.NOTSET if warns else logging.WARNING)
    try:
        engine = launch(settings)
    finally:
        logging.disable(logging.NOTSET)
    try:
        yield engine
    finally:
        asyncio.run(engine.close())


def random_prompts(engine: ThreadEngine, n: int) -> list[Prompt]:
    """Prompts for any model: random words of its vocabulary, the same each time; the second half repeats the first."""
    tokenizer = Tokenizer(text_source(Path(engine.info.path)))
    words = [i for i, token in sorted(by_id(tokenizer).items()) if token not in tokenizer.added_tokens]
    words = [i for i in words if i < engine.info.vocab_size]
    n_words = max(1, min(_N_PROMPT, engine.info.n_ctx // 2) // 2)
    draw = np.random.default_rng(0)
    return [(*said, *said) for said in (tuple(draw.choice(words, n_words).tolist()) for _ in range(n))]


def _profile(engine: ThreadEngine, tasks: _Tasks) -> Profile:
    info = engine.info
    _play(engine, _Tasks(tasks.prompts[:1], tasks.n_tokens), DRAFTS, 1)  # what is compiled at first use
    runs = [
        _run(engine, tasks, kind, n_slots) for n_slots in _widths(engine, tasks) for kind in _kinds(engine)
    ]
    return Profile(
        model=info.name,
        n_params=info.n_params,
        dtype=info.dtype,
        device=info.device,
        threads=torch.get_num_threads(),
        drafters=info.drafters,
        runs=runs,
    )


def _trace(engine: ThreadEngine, tasks: _Tasks, path: Path) -> None:
    """Play the tasks once more in the widest way, under torch's profiler; write its Chrome trace, compressed for `.gz`.

    The parts of the engine's steps have a row of their own; ops are ranges; kernels are what torch saw of the device.
    """
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities):
        pass  # torch prepares itself on the main thread
    profiler = torch.profiler.profile(activities=activities)
    laps = _Laps()
    engine.on_thread(functools.partial(_start, profiler, engine.clock, laps))
    try:
        with watched(_ranges):
            _play(engine, tasks, _kinds(engine)[-1], _widths(engine, tasks)[-1])
    finally:
        engine.on_thread(functools.partial(_stop, profiler, engine.clock))
    try:
        _write_trace(profiler, laps, path)
    except OSError as error:
        raise TraceNotWritten(f"{error.filename or path}: {error.strerror or error}") from error


def _write_trace(profiler: torch.profiler.profile, laps: _Laps, path: Path) -> None:
    """Raises `OSError`, and leaves no part of a file behind."""
    # torch only logs that a disk is full, and leaves what it has written beside its path.
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(own))
        told = json.loads(own.read_text(encoding="utf-8"))
    told["traceEvents"] += laps.events(told["traceEvents"])
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "wt", encoding="utf-8") as file:
            json.dump(told, file)
    except OSError:
        path.unlink(missing_ok=True)
        raise


@dataclass(slots=True)
class _Laps:
    """The laps of a clock, to be shown beside what torch's profiler has seen."""

    laps: list[tuple[str, float, float]] = field(default_factory=list)  # part, start, end
    marked_s: float = 0.0

    def __call__(self, part: str, start: float, end: float) -> None:
        self.laps.append((part, start, end))

    def events(self, others: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Events of the laps on the time axis of the others, which hold the mark."""
        mark = [one for one in others if one.get("name") == _MARK][-1]
        row = {"pid": mark["pid"], "tid": "steps"}
        return [
            {"ph": "M", "name": "thread_name", "args": {"name": "steps of the engine"}, **row},
            *(
                {
                    "ph": "X",
                    "cat": "step",
                    "name": part,
                    "ts": mark["ts"] + 1e6 * (start - self.marked_s),
                    "dur": 1e6 * (end - start),
                    **row,
                }
                for part, start, end in self.laps
            ),
        ]


def _start(profiler: torch.profiler.profile, clock: Clock, laps: _Laps) -> None:
    """On the engine's thread, as torch's profiler sees the thread that starts it."""
    profiler.start()
    for _ in range(2):  # the first is slow
        laps.marked_s = time.perf_counter()
        with record_function(_MARK):
            pass
    clock.watch = laps


def _stop(profiler: torch.profiler.profile, clock: Clock) -> None:
    clock.watch = None
    profiler.stop()


def _ranges(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def ranged(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return function(*args, **kwargs)

    return ranged


def _kinds(engine: ThreadEngine) -> list[str]:
    return [PLAIN, DRAFTS] if engine.info.drafters else [PLAIN]


def _widths(engine: ThreadEngine, tasks: _Tasks) -> list[int]:
    """Numbers of requests at a time."""
    return sorted({1, min(engine.info.n_slots, len(tasks.prompts))})


@dataclass(frozen=True, slots=True)
class _Figures:
    """A clock's totals, read between two steps; or their difference."""

    n_steps: int
    parts: Mapping[str, float]
    passes: Mapping[int, tuple[int, float]]

    @classmethod
    def of(cls, engine: ThreadEngine) -> _Figures:
        clock = engine.clock
        return engine.on_thread(lambda: cls(clock.n_steps, clock.totals(), clock.passes()))

    def since(self, before: _Figures) -> _Figures:
        parts = {part: total - before.parts[part] for part, total in self.parts.items()}
        passes = {}
        for n_rows, (n, seconds) in sorted(self.passes.items()):
            n_old, old_s = before.passes.get(n_rows, (0, 0.0))
            if n > n_old:
                passes[n_rows] = n - n_old, seconds - old_s
        return _Figures(self.n_steps - before.n_steps, parts, passes)


def _run(engine: ThreadEngine, tasks: _Tasks, kind: str, n_slots: int) -> Run:
    before = _Figures.of(engine)
    started = time.perf_counter()
    n_tokens = _play(engine, tasks, kind, n_slots)
    after = _Figures.of(engine)  # behind the last step, of which the last token is only a part
    seconds = time.perf_counter() - started
    found = after.since(before)
    return Run(
        kind=kind,
        n_slots=n_slots,
        n_tokens=n_tokens,
        seconds=seconds,
        n_steps=found.n_steps,
        parts=found.parts,
        passes=found.passes,
    )


def _with_ops(engine: ThreadEngine, tasks: _Tasks, run: Run) -> Run:
    """The run with the times of the ops, from playing it once more."""
    before = _Figures.of(engine)
    with _op_times() as ops:
        _play(engine, tasks, run.kind, run.n_slots)
    found = _Figures.of(engine).since(before)
    return replace(run, ops=ops, ops_steps=found.n_steps, ops_steps_s=sum(found.parts.values()))


@contextmanager
def _op_times() -> Iterator[dict[str, OpTime]]:
    """The ops' calls while the block runs. Only the engine's thread calls any."""
    times: dict[str, OpTime] = {}

    def wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = function(*args, **kwargs)
            seconds = time.perf_counter() - started
            one = times.setdefault(name, OpTime())
            one.n_calls += 1
            one.seconds += seconds
            return result

        return timed

    with watched(wrap):
        yield times


def _play(engine: ThreadEngine, tasks: _Tasks, kind: str, n_slots: int) -> int:
    """Tokens of all tasks, `n_slots` at a time. Nothing is taken from the prefix cache."""
    speculate = Speculate(types=(NO_DRAFTER,)) if kind == PLAIN else Speculate()

    async def one(gate: asyncio.Semaphore, i: int, prompt: Prompt) -> int:
        name = f"profile-{next(_ids)}"
        request = Request(
            id=name,
            prompt=prompt,
            sampling=Sampling(seed=i),
            speculate=speculate,
            max_tokens=tasks.n_tokens,
            tenant=name,
        )
        n_tokens = 0
        async with gate:
            async for event in await engine.submit(request):
                if isinstance(event, Failed):
                    raise event.error
                n_tokens += len(event.token_ids) if isinstance(event, Delta) else 0
        return n_tokens

    async def all_of_them() -> int:
        gate = asyncio.Semaphore(n_slots)
        return sum(await asyncio.gather(*(one(gate, i, text) for i, text in enumerate(tasks.prompts))))

    return asyncio.run(all_of_them())
