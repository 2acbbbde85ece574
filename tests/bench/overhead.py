"""What a step costs beyond its linear layers and its attention: 1 - (those timed alone) / step, plain decoding.

    python -m tests.bench.inflate demo/target /tmp/big --hidden 1024 --layers 28 --ffn 4096 --heads 8 --kv-heads 4
    python -m tests.bench.overhead --model /tmp/big --dtype bfloat16

Steps run on the engine's thread. The calls of one of them are recorded, and after each step are made again by
themselves, in order. The medians of both are told, and the fastest, which a busy machine disturbs least; then the
parts of the steps. Nothing beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from slipstream.engine.api import Request, Sampling, Speculate
from slipstream.engine.core.engine import Engine
from slipstream.engine.service.run.thread import ThreadEngine
from slipstream.engine.service.start.launch import launch
from slipstream.engine.settings import Settings
from slipstream.kernels.dispatch import watched
from tests.bench.bars import say
from tests.bench.playing import ROOT, random_asks

WORK = ("linear", "attention")
VOCABULARY = 4096  # of the demo tokenizer
N_WARM = 8  # steps after the prompts that do not count


@contextmanager
def recorded() -> Iterator[list[Callable[[], Any]]]:
    """The calls of linear layers and attention while the block runs, to be made again."""
    calls: list[Callable[[], Any]] = []

    def wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def recording(*args: Any, **kwargs: Any) -> Any:
            calls.append(functools.partial(function, *args, **kwargs))
            return function(*args, **kwargs)

        return recording if name in WORK else function

    with watched(wrap):
        yield calls


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def fill(engine: ThreadEngine, n_slots: int, n_steps: int) -> None:
    """Requests that decode plainly, on the engine's thread."""
    core = engine._engine
    core.capacity = replace(
        core.capacity, eos_ids=frozenset()
    )  # nothing ends early, and no row is edited for that
    for i, ask in enumerate(random_asks(VOCABULARY, n_slots, 0.0)):
        request = Request(
            id=f"overhead-{i}",
            prompt=ask.prompt,
            sampling=Sampling(temperature=0.0),
            speculate=Speculate(types=("none",)),
            max_tokens=n_steps + N_WARM + 2,
            tenant=f"overhead-{i}",
        )
        prepared, _ = engine._prepare(request, time.perf_counter())
        core.add(request.id, engine._slots.resolve(request, prepared))


@torch.inference_mode()
def measure(core: Engine, n_steps: int) -> tuple[list[float], list[float], dict[str, float]]:
    """(seconds of each step, seconds of its work alone, seconds of the steps' parts)."""
    while any(slot is not None and slot.n_gap > 1 for slot in core.seats.slots) or core.seats.waiting:
        core.step()
    for _ in range(N_WARM):
        core.step()
    with recorded() as calls:
        core.step()
    before = core.clock.totals()
    steps, alone = [], []
    for _ in range(n_steps):
        steps.append(timed(lambda: (core.step(), core.stats())))
        alone.append(timed(lambda: [call() for call in calls]))
    after = core.clock.totals()
    return steps, alone, {part: after[part] - before[part] for part in after}


def told(n_slots: int, steps: Sequence[float], alone: Sequence[float], parts: dict[str, float]) -> str:
    lines = [f"{n_slots} slots, {len(steps)} steps"]
    for name, least in (("median", statistics.median), ("fastest", min)):
        step, work = least(steps), least(alone)
        lines.append(
            f"  {name:8} step {1e6 * step:8.0f} us, linear layers and attention alone {1e6 * work:8.0f} us:"
            f" overhead {1 - work / step:.1%}"
        )
    mean = {part: 1e6 * seconds / len(steps) for part, seconds in parts.items()}
    lines.append("  " + "  ".join(f"{part} {us:.0f}" for part, us in mean.items()) + "  (us a step, mean)")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(ROOT / "demo" / "target"))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--slots", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args(arguments)
    engine = launch(
        Settings(
            model=options.model,
            dtype=options.dtype,
            threads=options.threads,
            parallel=max(options.slots),
            ctx_size=2048,
            spec_type="none",
        )
    )
    for n_slots in options.slots:
        fill(engine, n_slots, options.steps)
        say(told(n_slots, *engine.on_thread(functools.partial(measure, engine._engine, options.steps))))
        for i in range(n_slots):
            engine.on_thread(functools.partial(engine._engine.cancel, f"overhead-{i}"))
    asyncio.run(engine.close())


if __name__ == "__main__":
    main(sys.argv[1:])
