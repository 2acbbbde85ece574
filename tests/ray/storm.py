"""Replicas are killed again and again under many streams, and no reply differs from that of one undisturbed server.

`python -m tests.ray.storm [--requests N] [--streams N]`. Requests of every kind that the soak has, whole and streamed,
with and without a seed; some are left by their clients. The undisturbed server answers them first, and those without a
seed afterwards, with the seed that was drawn.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from tests.process import DEMO, running
from tests.ray.cluster import SETTINGS, Cluster, started
from tests.soak.bodies import BODIES, Body, speculation
from tests.soak.replies import Choice, streamed, whole

N_KNOWN = 24  # different requests of each kind
DRAFTERS = ["suffix", "draft-model", "prediction"]
SILENCE_S = 240.0
SURPRISES = ('"level":"error"', "never retrieved")  # in the log
PAUSE_S = 0.25  # without a byte that is counted as a pause


@dataclass
class Tally:
    """What came of a storm."""

    ended: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    pauses_s: list[float] = field(default_factory=list)  # the longest of each stream that moved or waited
    n_disturbed: int = 0
    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        """Whether there was a disturbance, and no request suffered."""
        return not self.ended["failed"] and not self.ended["different"] and self.n_disturbed > 0


Disturbance = Callable[[Tally], Coroutine[Any, Any, None]]


class Client:
    """One connection."""

    def __init__(self, url: str) -> None:
        self.http = httpx.AsyncClient(base_url=url, timeout=SILENCE_S)

    async def said(self, path: str, body: Body, tally: Tally | None = None) -> tuple[list[Choice], Any]:
        """The reply's choices, and its seed if it is told. Raises for anything but a complete reply."""
        if not body.get("stream"):
            answer = await self.http.post(path, json=body)
            assert answer.status_code == 200, f"{answer.status_code} {answer.text[:300]}"
            told = answer.json()
            return whole(told), told.get("seed")
        async with self.http.stream("POST", path, json=body) as answer:
            if answer.status_code != 200:
                raise AssertionError(f"{answer.status_code} {(await answer.aread())[:300]!r}")
            return await streamed(_timed(answer.aiter_lines(), tally)), None


async def _timed(lines: AsyncIterator[str], tally: Tally | None) -> AsyncIterator[str]:
    longest_s, last_s = 0.0, None
    async for line in lines:
        now_s = time.monotonic()
        if last_s is not None:
            longest_s = max(longest_s, now_s - last_s)
        last_s = now_s
        yield line
    if tally is not None and longest_s > PAUSE_S:
        tally.pauses_s.append(longest_s)


def request(kind: str, number: int) -> tuple[str, Body]:
    """Always the same for the same kind and number."""
    return BODIES[kind](random.Random(f"{kind} {number}"))


Known = dict[tuple[str, int], list[Choice]]


async def answers(url: str, n_streams: int) -> Known:
    """What an undisturbed server says to every request."""
    found: Known = {}
    left = iter([(kind, number) for kind in BODIES for number in range(N_KNOWN)])

    async def stream() -> None:
        client = Client(url)
        async with client.http:
            for key in left:
                found[key] = (await client.said(*request(*key)))[0]

    async with asyncio.TaskGroup() as group:
        for _ in range(n_streams):
            group.create_task(stream())
    return found


async def storm(url: str, known: Known, n_requests: int, n_streams: int, disturb: Disturbance) -> Tally:
    """So many requests at most, until the disturbance ends."""
    tally = Tally()
    left = iter(range(n_requests))

    async def stream(seed: int) -> None:
        draw = random.Random(seed)
        client = Client(url)
        async with client.http:
            for number in left:
                if disturbing.done():
                    return
                await _one(client, draw, known, tally, number)

    disturbing = asyncio.create_task(disturb(tally))
    started_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for seed in range(n_streams):
            group.create_task(stream(seed))
    tally.seconds = time.monotonic() - started_s
    if disturbing.done():
        disturbing.result()
    disturbing.cancel()
    await asyncio.gather(disturbing, return_exceptions=True)
    return tally


async def _one(client: Client, draw: random.Random, known: Known, tally: Tally, number: int) -> None:
    kind = draw.choice(list(BODIES))
    key = (kind, draw.randrange(N_KNOWN))
    path, body = request(*key)
    body |= speculation(draw, DRAFTERS) | {"stream": draw.random() < 0.6}
    leaves_s = draw.uniform(0, 1.5) if draw.random() < 0.15 else None
    try:
        async with asyncio.timeout(leaves_s):
            said, _ = await client.said(path, body, tally)
    except TimeoutError:
        tally.ended["left by its client"] += 1
        return
    except Exception as error:  # noqa: BLE001 - every way to fail is counted
        tally.ended["failed"] += 1
        tally.notes.append(f"{number} {kind} {type(error).__name__}: {str(error)[:400]}")
        return
    if said == known[key]:
        tally.ended["equal"] += 1
    else:
        tally.ended["different"] += 1
        tally.notes.append(f"{number} {key} {body.get('stream')}: {said} instead of {known[key]}"[:1500])


async def _kill(cluster: Cluster, tally: Tally) -> None:
    draw = random.Random(0)
    while True:
        await asyncio.to_thread(cluster.wait_until_whole)
        await asyncio.sleep(draw.uniform(0.5, 2.0))
        await asyncio.to_thread(cluster.kill, draw)
        tally.n_disturbed += 1
        await asyncio.sleep(1.0)  # until it is known


def say(tally: Tally, n_streams: int, what: str, surprises: list[str]) -> None:
    """Print what came of it."""
    print(
        f"{sum(tally.ended.values())} requests over {n_streams} streams in {tally.seconds:.0f} s,"
        f" {tally.n_disturbed} {what}: {dict(tally.ended)}"
    )
    pauses = sorted(tally.pauses_s)
    if pauses:
        print(
            f"{len(pauses)} streams paused for more than {PAUSE_S:g} s: median {pauses[len(pauses) // 2]:.2f} s,"
            f" p99 {pauses[int(len(pauses) * 0.99)]:.2f} s, longest {pauses[-1]:.2f} s"
        )
    for note in [*tally.notes[:10], *surprises[:5]]:
        print(note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--streams", type=int, default=128)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with running(folder / "plain.log", (*DEMO, *SETTINGS)) as plain:
            known = asyncio.run(answers(plain.url, 16))
        with started(folder) as cluster:
            disturb = partial(_kill, cluster)
            tally = asyncio.run(storm(cluster.url, known, options.requests, options.streams, disturb))
            surprises = surprises_in(cluster.server.log)
    say(tally, options.streams, "replicas killed", surprises)
    sys.exit(0 if tally.is_good else 1)


def surprises_in(log: Path) -> list[str]:
    """Lines that no log should have."""
    lines = log.read_text(errors="replace").splitlines()
    return [line for line in lines if any(sign in line for sign in SURPRISES)]


if __name__ == "__main__":
    main()
