"""What the way through Ray costs: a cluster of one replica beside a plain server, alternating.

`python -m tests.ray.overhead`. Wants a quiet machine.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path

import httpx

from tests.bench.bars import bandwidth
from tests.process import DEMO, running
from tests.ray.cluster import SETTINGS, started

N_PAIRS, N_REQUESTS, N_STREAMS, N_TOKENS = 7, 40, 32, 128
PROMPT = "def add(left, right):\n    return left + right\n\n\ndef sub("


def request_s(http: httpx.Client, url: str, seed: int) -> float:
    """A request for one token."""
    body = {"prompt": PROMPT, "max_tokens": 1, "seed": seed, "ignore_eos": True}
    started_s = time.perf_counter()
    http.post(f"{url}/v1/completions", json=body).raise_for_status()
    return time.perf_counter() - started_s


async def tokens_per_s(url: str) -> float:
    """Of so many streams at once."""

    async def stream(http: httpx.AsyncClient, seed: int) -> int:
        body = {
            "prompt": f"{seed} {PROMPT}",
            "max_tokens": N_TOKENS,
            "seed": seed,
            "ignore_eos": True,
            "stream": True,
        }
        async with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for _ in answer.aiter_lines():
                pass
        return N_TOKENS

    limits = httpx.Limits(max_connections=N_STREAMS)
    async with httpx.AsyncClient(timeout=300, limits=limits) as http:
        started_s = time.perf_counter()
        found = await asyncio.gather(*(stream(http, seed) for seed in range(N_STREAMS)))
        return sum(found) / (time.perf_counter() - started_s)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (
            running(folder / "plain.log", (*DEMO, *SETTINGS)) as plain,
            started(folder, n=1) as cluster,
            httpx.Client(timeout=60) as http,
        ):
            urls = {"plain": plain.url, "cluster": cluster.url}
            waits: dict[str, list[float]] = {one: [] for one in urls}
            rates: dict[str, list[float]] = {one: [] for one in urls}
            for pair in range(N_PAIRS):
                for one, url in urls.items():
                    found = [request_s(http, url, seed) for seed in range(N_REQUESTS)]
                    rate = asyncio.run(tokens_per_s(url))
                    if pair:  # the first warms up
                        waits[one].append(statistics.median(found))
                        rates[one].append(rate)
    for one in urls:
        wait_ms, rate = 1e3 * statistics.median(waits[one]), statistics.median(rates[one])
        print(
            f"{one}: {wait_ms:.2f} ms for a request of one token, {rate:.0f} tokens/s in {N_STREAMS} streams"
        )
    more_ms = 1e3 * statistics.median(b - a for a, b in zip(waits["plain"], waits["cluster"], strict=True))
    ratio = statistics.median(b / a for a, b in zip(rates["plain"], rates["cluster"], strict=True))
    print(f"the cluster adds {more_ms:.2f} ms a request and has {ratio:.3f} x the tokens/s;", end=" ")
    print(f"memory is read at {bandwidth() / 1e9:.1f} GB/s")


if __name__ == "__main__":
    main()
