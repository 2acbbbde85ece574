"""Demo tasks x drafters x concurrency: tokens/s, acceptance length, time to first token, where a step's time goes.

    make bench ARGS="--tasks 8 --concurrency 1 4 8"

Prints a table and asserts nothing. The engine is measured without HTTP; only ratios within one run mean much.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from engine.api import Speculate
from engine.core import engine as core
from engine.core import forward
from engine.models.network import Network
from engine.service.launch import launch
from engine.service.thread import ThreadEngine
from engine.settings import Settings
from engine.speculate.chain import Chain
from tests.bench.playing import KINDS, ROOT, Reply, demo_asks, play_all

MODES: dict[str, tuple[str, ...]] = {
    "plain": ("none",),
    "ngram-simple": ("ngram-simple",),
    "suffix": ("suffix",),
    "draft-model": ("draft-model",),
    "auto": ("suffix", "draft-model"),
}


@contextmanager
def clocks() -> Iterator[Counter[str]]:
    """Seconds spent in the parts of a step while the block runs."""
    seconds: Counter[str] = Counter()
    places: list[tuple[Any, str, str]] = [
        (core.Engine, "step", "step"),
        (Chain, "draft", "draft"),
        (Chain, "accept", "accept"),
        (Network, "forward", "forward"),
        (forward, "verify", "verify"),
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in places]

    def timed(function: Callable[..., Any], part: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[part] += time.perf_counter() - started

        return wrapper

    for (owner, name, part), (_, _, original) in zip(places, originals, strict=True):
        setattr(owner, name, timed(original, part))
    try:
        yield seconds
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def row(mode: str, kind: str, concurrency: int, replies: Sequence[Reply], wall_s: float) -> str:
    """One line of the table."""
    n_tokens = n_steps = 0
    rates = []
    for reply in replies:
        seconds, tokens, steps = reply.decoding(reply.n_counted)
        n_tokens, n_steps = n_tokens + tokens, n_steps + steps
        if seconds > 0:
            rates.append(tokens / seconds)
    total = sum(len(reply.token_ids) for reply in replies) / wall_s
    ttft = statistics.median(reply.ttft_s for reply in replies) * 1000
    return (
        f"{kind:10} {mode:13} {concurrency:3} {statistics.median(rates):9.1f} {total:9.1f}"
        f" {n_tokens / max(1, n_steps):8.2f} {ttft:8.1f}"
    )


async def measure(engine: ThreadEngine, options: argparse.Namespace) -> None:
    write = sys.stdout.write
    write("kind       drafters      conc   tok/s each  tok/s all  acc.len  ttft ms\n")
    for concurrency in options.concurrency:
        for kind in options.kinds:
            asks = demo_asks([kind], options.tasks, options.max_tokens)
            for mode, types in MODES.items():
                if not set(types) <= {*engine.info.drafters, "none"}:
                    continue
                with clocks() as seconds:
                    replies, wall_s = await play_all(
                        engine, asks, Speculate(types=types, n_max=options.draft_max), concurrency
                    )
                drafting = seconds["draft"] + seconds["accept"]
                step = seconds["step"] or 1.0
                parts = (
                    f"draft {drafting / step:.0%} verify {seconds['verify'] / step:.0%}"
                    f" rest {1 - (drafting + seconds['verify'] + seconds['forward']) / step:.0%}"
                    if "draft-model" not in types
                    else f"draft {drafting / step:.0%}"
                )
                write(f"{row(mode, kind, concurrency, replies, wall_s)}  {parts}\n")
                sys.stdout.flush()
    await engine.close()


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(ROOT / "demo" / "target"))
    parser.add_argument("--model-draft", default=str(ROOT / "demo" / "draft"))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--tasks", type=int, default=8, help="requests per kind")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 4, 8])
    parser.add_argument("--draft-max", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=160)
    options = parser.parse_args(arguments)
    engine = launch(
        Settings(
            model=options.model,
            model_draft=options.model_draft,
            dtype=options.dtype,
            threads=options.threads,
            parallel=max(options.concurrency),
            ctx_size=4096,
            spec_type="auto,ngram-simple",
            spec_ngram_simple_size_n=3,
        )
    )
    asyncio.run(measure(engine, options))


if __name__ == "__main__":
    main(sys.argv[1:])
