"""Requests played against a launched engine without HTTP, with the clock at every step.

Demo models loop, and a loop is drafted perfectly; so a reply counts only up to the point where one of its
8-grams is seen for the third time.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from slipstream.engine.api import AsyncEngine, Chat, Delta, Done, Failed, Prompt, Request, Sampling, Speculate

ROOT = Path(__file__).parents[2]
NGRAM, TIMES = 8, 3
KINDS = ("rename", "continue", "docstring")

_ids = itertools.count()


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt and how much of a reply to it is wanted."""

    kind: str
    prompt: Prompt
    max_tokens: int = 200
    temperature: float = 0.0
    reference: str = ""  # the reply a task is meant to have
    prediction: str | None = None


@dataclass(slots=True)
class Reply:
    """A finished reply, cut where it starts to loop."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # per step: seconds, tokens so far
    asked_s: float = 0.0
    done: Done | None = None

    @property
    def n_counted(self) -> int:
        """Tokens up to the cut."""
        seen: Counter[tuple[int, ...]] = Counter()
        for end in range(NGRAM, len(self.token_ids) + 1):
            seen[tuple(self.token_ids[end - NGRAM : end])] += 1
            if seen[tuple(self.token_ids[end - NGRAM : end])] == TIMES:
                return end
        return len(self.token_ids)

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0][0] - self.asked_s

    def decoding(self, n_tokens: int) -> tuple[float, int, int]:
        """(seconds, tokens, steps) of decoding until `n_tokens` are there; the prompt's own token is not decoding."""
        start, first = self.arrivals[0]
        steps = [(at, n) for at, n in self.arrivals[1:] if n <= n_tokens] or self.arrivals[1:2]
        if not steps:
            return 0.0, 0, 0
        return steps[-1][0] - start, steps[-1][1] - first, len(steps)


def demo_asks(kinds: Sequence[str] = KINDS, n_each: int = 8, max_tokens: int = 200) -> list[Ask]:
    """The first demo tasks of each kind."""
    with (ROOT / "demo" / "tasks.jsonl").open() as file:
        tasks = [json.loads(line) for line in file]
    return [
        Ask(kind, Chat(task["messages"]), max_tokens, reference=task["reference"])
        for kind in kinds
        for task in [one for one in tasks if one["kind"] == kind][:n_each]
    ]


def random_asks(vocab_size: int, n: int, temperature: float, max_tokens: int = 120) -> list[Ask]:
    """Prompts of 200 random tokens. Greedy replies soon loop; warm ones leave nothing to copy or to guess."""
    random = np.random.default_rng(0)
    return [
        Ask("random", tuple(random.integers(4, vocab_size, 200).tolist()), max_tokens, temperature)
        for _ in range(n)
    ]


async def play(engine: AsyncEngine, ask: Ask, speculate: Speculate, tenant: str | None = None) -> Reply:
    """One request. Requests of one tenant share cached prompts; without one nothing is shared."""
    name = f"bench-{next(_ids)}"
    sampling = Sampling(temperature=ask.temperature, top_k=0, top_p=1.0, seed=1)
    reply = Reply(asked_s=time.perf_counter())
    request = Request(
        id=name,
        prompt=ask.prompt,
        sampling=sampling,
        speculate=speculate,
        max_tokens=ask.max_tokens,
        prediction=ask.prediction,
        tenant=tenant or name,
    )
    async for event in await engine.submit(request):
        if isinstance(event, Delta):
            reply.text += event.text
            reply.token_ids += event.token_ids
            reply.arrivals.append((time.perf_counter(), len(reply.token_ids)))
        elif isinstance(event, Done):
            reply.done = event
        elif isinstance(event, Failed):
            raise event.error
    return reply


async def play_all(
    engine: AsyncEngine, asks: Sequence[Ask], speculate: Speculate, concurrency: int
) -> tuple[list[Reply], float]:
    """All requests, `concurrency` at a time; the replies and the seconds they took together."""
    gate = asyncio.Semaphore(concurrency)

    async def one(ask: Ask) -> Reply:
        async with gate:
            return await play(engine, ask, speculate)

    started = time.perf_counter()
    replies = await asyncio.gather(*(one(ask) for ask in asks))
    return list(replies), time.perf_counter() - started
