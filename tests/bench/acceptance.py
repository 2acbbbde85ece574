"""Acceptance length of each drafter on the demo tasks, cold and after a prefix hit on pages made without drafting.

    python -m tests.bench.acceptance

Draft lengths are fixed here (no adaptation). Replies count up to where they start to loop. Then predicted outputs: the
share of a reply's tokens that are accepted predictions, where the reply is predicted nearly right.
"""

from __future__ import annotations

import argparse
import asyncio
import difflib
import sys
from collections.abc import Sequence
from dataclasses import replace

from engine.api import Speculate
from engine.service.launch import launch
from engine.service.thread import ThreadEngine
from engine.settings import Settings
from tests.bench.playing import KINDS, ROOT, Reply, demo_asks, play

OFF = Speculate(n_max=0)
CHAINS = (
    ("ngram-simple",),
    ("ngram-map-k",),
    ("ngram-map-k4v",),
    ("ngram-mod",),
    ("ngram-cache",),
    ("suffix",),
)


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
        network = engine.info.drafters[-1]  # of --model-draft
        for types in (*CHAINS, (network,), ("suffix", network)):
            n_max = 8 if types == (network,) else 16
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


async def measure_predictions(engine: ThreadEngine, n_tasks: int) -> None:
    """Rename tasks whose plain reply is at least 0.95 similar to their reference, which is the prediction."""
    for n_max in (16, 32):
        n_tokens = n_accepted = n_rejected = n_replies = 0
        for ask in demo_asks(["rename"], n_tasks, 400):
            plain = await play(engine, ask, OFF)
            if difflib.SequenceMatcher(None, plain.text, ask.reference, autojunk=False).ratio() < 0.95:
                continue
            speculate = Speculate(types=("prediction",), n_max=n_max)
            reply = await play(engine, replace(ask, prediction=ask.reference), speculate)
            assert reply.token_ids == plain.token_ids
            assert reply.done is not None
            count = reply.done.speculation.drafters["prediction"]
            n_replies, n_tokens = n_replies + 1, n_tokens + len(reply.token_ids)
            n_accepted += count.n_accepted
            n_rejected += count.n_drafted - count.n_accepted
        sys.stdout.write(
            f"predicted  rename, n_max {n_max}: {n_accepted / n_tokens:.1%} of {n_tokens} tokens in {n_replies} replies"
            f" are accepted predictions, {n_rejected} were rejected\n"
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
            spec_type=",".join(("auto", *{name: None for types in CHAINS for name in types})),
            spec_ngram_simple_size_n=options.ngram_size_n,
            spec_ngram_map_k_size_n=options.ngram_size_n,
            spec_ngram_map_k4v_size_n=options.ngram_size_n,
            spec_ngram_map_k4v_size_m=8,
            spec_ngram_mod_n_match=options.ngram_size_n,
            spec_ngram_mod_n_min=1,
            parallel=1,
        )
    )
    asyncio.run(measure(engine, options.tasks))
    engine = launch(Settings(model=options.model, ctx_size=4096, parallel=1, draft_max=32))
    asyncio.run(measure_predictions(engine, 3 * options.tasks))


if __name__ == "__main__":
    main(sys.argv[1:])
