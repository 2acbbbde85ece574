"""What grammars cost and what they give: their share of a step, and the tokens that were forced, per schema.

    python -m tests.bench.grammar [--model demo/target] [--model-draft demo/draft] [--markdown FILE]

Every schema of `tests.schemas` is asked for at temperature 1, eight at a time, with drafts and without. The time of
everything that a constraint does, and of gathering masks, is taken out of the steps' time. Reading the masks is the
pick's, and is not in it.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from slipstream.engine.api import AsyncEngine, Delta, Done, Request, Sampling, Speculate
from slipstream.engine.constraints import Grammar
from slipstream.engine.core.engine import Engine
from slipstream.engine.sample import pick
from slipstream.engine.service.start.launch import launch
from slipstream.engine.settings import Settings
from slipstream.engine.text.grammar.constraint import Constraint
from tests.schemas import ENDLESS, SCHEMAS

VERBS = ("push", "pop", "mask", "masks", "n_legal", "forced")
LONGEST = 300
TOGETHER = 8


class Clock:
    """Seconds inside some functions; calls inside calls count once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.perf_counter() - started

        return timed


@contextmanager
def watched() -> Iterator[tuple[Clock, Clock]]:
    """(clock of grammar work, clock of whole steps)."""
    grammar, step = Clock(), Clock()
    with (
        patch.object(Engine, "step", step.around(Engine.step)),
        patch.object(pick, "_masks", grammar.around(pick._masks)),
    ):
        patches = [
            patch.object(Constraint, verb, grammar.around(getattr(Constraint, verb))) for verb in VERBS
        ]
        for one in patches:
            one.start()
        try:
            yield grammar, step
        finally:
            for one in patches:
                one.stop()


async def run(engine: AsyncEngine, n_max: int) -> dict[str, tuple[list[int], Done]]:
    """Each schema's reply."""
    free = asyncio.Semaphore(TOGETHER)

    async def one(i: int, name: str) -> tuple[str, tuple[list[int], Done]]:
        request = Request(
            id=f"{name}-{n_max}",
            prompt="def area(width):\n",
            sampling=Sampling(temperature=1.0, seed=i, frequency_penalty=1.0 * (name in ENDLESS)),
            speculate=Speculate(n_max=n_max),
            max_tokens=LONGEST,
            grammar=Grammar("json_schema", json.dumps(SCHEMAS[name])),
        )
        async with free:
            token_ids: list[int] = []
            async for event in await engine.submit(request):
                if isinstance(event, Delta):
                    token_ids += event.token_ids
                elif isinstance(event, Done):
                    return name, (token_ids, event)
                else:
                    raise RuntimeError(f"{name}: {event}")
        raise RuntimeError(f"{name}: no end")

    return dict(await asyncio.gather(*(one(i, name) for i, name in enumerate(SCHEMAS))))


async def measure(
    settings: Settings, rounds: int
) -> tuple[dict[str, tuple[list[int], Done]], list[tuple[float, float]]]:
    """The replies with drafts, and per round the grammar's share of the steps: (without drafts, with them)."""
    engine = launch(settings)
    await run(engine, 0)
    shares = []
    try:
        for _ in range(rounds):
            found = []
            for n_max in (0, settings.draft_max):
                with watched() as (grammar, step):
                    replies = await run(engine, n_max)
                found.append(grammar.seconds / step.seconds)
                if not n_max:
                    plain = replies
            assert all(replies[name][0] == plain[name][0] for name in SCHEMAS), "drafts changed a reply"
            shares.append((found[0], found[1]))
    finally:
        await engine.close()
    return replies, shares


def table(replies: dict[str, tuple[list[int], Done]]) -> str:
    lines = ["| schema | tokens | steps | accepted forced drafts |", "|---|---|---|---|"]
    for name, (token_ids, done) in replies.items():
        forced = done.speculation.drafters.get("forced")
        n = forced.n_accepted if forced else 0
        lines.append(f"| {name} | {len(token_ids)} | {done.speculation.n_steps} | {n / len(token_ids):.0%} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo/target")
    parser.add_argument("--model-draft", default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args(arguments)
    settings = Settings(
        model=options.model, model_draft=options.model_draft, parallel=TOGETHER, ctx_size=1024
    )
    replies, shares = asyncio.run(measure(settings, options.rounds))
    n_tokens = sum(len(token_ids) for token_ids, _ in replies.values())
    n_steps = sum(done.speculation.n_steps for _, done in replies.values())
    forced = sum(done.speculation.drafters["forced"].n_accepted for _, done in replies.values())
    middle = len(shares) // 2
    plain, drafted = (sorted(one[i] for one in shares)[middle] for i in range(2))
    sys.stdout.write(
        f"{len(replies)} schemas, {n_tokens} tokens, {n_steps} steps of a request, {forced / n_tokens:.1%} forced;"
        f" grammar work {plain:.1%} of a step without drafts, {drafted:.1%} with them (medians of {len(shares)})\n"
    )
    if options.markdown:
        options.markdown.write_text(table(replies))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
