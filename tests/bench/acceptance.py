"""Acceptance length of each drafter on the demo tasks, cold and after a prefix hit on pages made without drafting.

    python -m tests.bench.acceptance

Draft lengths are fixed here (no adaptation). Replies count up to where they start to loop.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace

from engine.api import Speculate
from engine.service.launch import launch
from engine.service.thread import ThreadEngine
from engine.settings import Settings
from tests.bench.playing import KINDS, ROOT, Reply, demo_asks, play

OFF = Speculate(n_max=0)


def length(replies: Sequence[Reply]) -> float:
    """Tokens per target pass over all replies, each up to its loop."""
    n_tokens = n_steps = 0
    for reply in replies:
        _, tokens, steps = reply.decoding(reply.n_counted)
        n_tokens, n_steps = n_tokens + tokens, n_steps + steps
    return n_tokens / max(1, n_steps)


async def measure(engine: ThreadEngine, n_tasks: int) -> None:
    for kind in KINDS:
        asks = demo_asks([kind], n_tasks)
        for types, n_max in (
            (("ngram-simple",), 16),
            (("draft-model",), 8),
            (("ngram-simple", "draft-model"), 16),
        ):
            speculate = Speculate(types=types, n_max=n_max)
            cold = [await play(engine, ask, speculate) for ask in asks]
            hits = []
            for i, ask in enumerate(asks):
                tenant = f"hit-{kind}-{types}-{i}"
                await play(engine, replace(ask, max_tokens=1), OFF, tenant)
                hits.append(await play(engine, ask, speculate, tenant))
            assert [one.token_ids for one in hits] == [one.token_ids for one in cold]
            n_cached = sum(one.done.usage.n_cached for one in hits if one.done)
            n_prompt = sum(one.done.usage.n_prompt for one in hits if one.done)
            sys.stdout.write(
                f"{kind:10} {'+'.join(types):25} n_max {n_max:2}: cold {length(cold):5.2f},"
                f" after a hit on {n_cached / n_prompt:3.0%} of the prompt {length(hits):5.2f}\n"
            )
            sys.stdout.flush()
    await engine.close()


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(ROOT / "demo" / "target"))
    parser.add_argument("--model-draft", default=str(ROOT / "demo" / "draft"))
    parser.add_argument("--tasks", type=int, default=30)
    parser.add_argument("--ngram-size-n", type=int, default=3)
    options = parser.parse_args(arguments)
    engine = launch(
        Settings(
            model=options.model,
            model_draft=options.model_draft,
            spec_adaptive=False,
            ctx_size=4096,
            ngram_size_n=options.ngram_size_n,
            ngram_size_m=16,
            parallel=1,
        )
    )
    asyncio.run(measure(engine, options.tasks))


if __name__ == "__main__":
    main(sys.argv[1:])
