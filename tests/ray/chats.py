"""How much of their prompts conversations find in prefix caches: one server, replicas behind the router, and at random.

`python -m tests.ray.chats`. Conversations of several turns, each turn with all that was said before, many at a time.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from tests.process import DEMO, ROOT, running
from tests.ray.cluster import N_REPLICAS, started

N_CHATS, N_TURNS, N_AT_ONCE = 36, 5, 12
SETTINGS = ("--ctx-size", "2048", "--parallel", "8", "--threads", "1", "--cache-size", "256")
Choose = Callable[[], str]


def beginnings() -> list[str]:
    """What each conversation begins with; nothing is shared but the template's own words."""
    source = (ROOT / "demo" / "loop.py").read_text()
    draw = random.Random(0)
    return [f"{i} {source[draw.randrange(len(source) - 600) :][:600]}" for i in range(N_CHATS)]


async def hit_rate(choose: Choose) -> float:
    """Share of prompt tokens from the cache, of all turns but the first."""
    n_prompt = n_cached = 0
    left = iter(beginnings())

    async def talk() -> None:
        nonlocal n_prompt, n_cached
        async with httpx.AsyncClient(timeout=120) as http:
            for beginning in left:
                messages: list[dict[str, Any]] = [{"role": "user", "content": beginning}]
                for turn in range(N_TURNS):
                    body = {"messages": messages, "max_tokens": 48, "seed": turn, "temperature": 0.8}
                    answer = await http.post(f"{choose()}/v1/chat/completions", json=body)
                    told = answer.raise_for_status().json()
                    if turn:
                        n_prompt += told["usage"]["prompt_tokens"]
                        n_cached += told["usage"]["prompt_tokens_details"]["cached_tokens"]
                    said = told["choices"][0]["message"]["content"] or ""
                    messages = [*messages, {"role": "assistant", "content": said}]
                    messages.append(
                        {"role": "user", "content": f"and {turn}: " + beginning[turn * 40 :][:120]}
                    )

    async with asyncio.TaskGroup() as group:
        for _ in range(N_AT_ONCE):
            group.create_task(talk())
    return n_cached / n_prompt


def main() -> None:
    draw = random.Random(1)
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with running(folder / "one.log", (*DEMO, *SETTINGS)) as one:
            found["one server"] = asyncio.run(hit_rate(lambda: one.url))
        with started(folder, settings=SETTINGS) as cluster:
            found[f"{N_REPLICAS} replicas"] = asyncio.run(hit_rate(lambda: cluster.url))
        with ExitStack() as stack:
            several = [
                stack.enter_context(running(folder / f"{i}.log", (*DEMO, *SETTINGS)))
                for i in range(N_REPLICAS)
            ]
            found[f"{N_REPLICAS} servers at random"] = asyncio.run(hit_rate(lambda: draw.choice(several).url))
    print(
        f"{N_CHATS} conversations of {N_TURNS} turns, {N_AT_ONCE} at a time: share of prompt tokens from the cache"
    )
    print(json.dumps({name: round(rate, 3) for name, rate in found.items()}))


if __name__ == "__main__":
    main()
