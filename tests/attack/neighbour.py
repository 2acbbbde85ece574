"""The neighbour of an attack: streams under a key of its own and asks `/health`, in a process of its own.

`python -m tests.attack.neighbour URL PID` writes a line when it has streamed once, goes on until its input ends, and
then writes what it saw as JSON. In code: `async with beside(server) as seen: …`, after which `seen` holds the figures.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import httpx

from tests.process import DEMO, ROOT, Running

ATTACKER, NEIGHBOUR = "attacker", "neighbour"
# For `tests.process.running`. One thread of torch, and short times for clients that send or read nothing.
ARGUMENTS = (
    *(*DEMO, "--api-key", f"{ATTACKER},{NEIGHBOUR}", "--threads", "1"),
    *("--timeout", "5", "--log-level", "warning"),
)
ASK = {"prompt": "def total(values):\n", "max_tokens": 200, "ignore_eos": True, "stream": True}
PROBE_S, SAMPLE_S = 0.02, 0.1
LAST_GAP_S, FIRST_EVENT_S = (
    0.5,
    60.0,
)  # once the attack has ended; the second only where nothing has come until then


def memory_mib(pid: int) -> float:
    """Resident memory of a process and its children, in MiB; 0 of one that has ended."""
    total = 0.0
    with contextlib.suppress(OSError):
        total = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 2**20
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += sum(memory_mib(int(child)) for child in (task / "children").read_text().split())
    return total


@contextlib.asynccontextmanager
async def beside(server: Running) -> AsyncIterator[dict[str, float]]:
    """A neighbour during the block. Afterwards the yielded figures are there: see `_watch`."""
    seen: dict[str, float] = {}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __name__, server.url, str(server.process.pid)),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    try:
        yield seen
    finally:
        process.stdin.close()
        seen |= json.loads(await process.stdout.readline() or "{}")
        await process.wait()


async def _watch(url: str, pid: int) -> dict[str, float]:
    """Until the input ends: the worst seconds without an event, p99 of `/health` in seconds, most memory in MiB.

    A wait for a stream's first event counts too.
    """
    figures = {"gap_s": 0.0, "n_events": 0.0, "peak_mib": 0.0}
    answers: list[float] = []
    key = {"x-api-key": NEIGHBOUR}
    async with httpx.AsyncClient(base_url=url, headers=key, timeout=300) as http:
        await _stream(http, {**figures})
        print("ready", flush=True)
        endless = (_again(_stream, http, figures), _probe(http, answers), _sample(pid, figures))
        tasks = [asyncio.create_task(one) for one in endless]
        ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        await asyncio.wait([*tasks, ended], return_when=asyncio.FIRST_COMPLETED)
        end = time.perf_counter() + FIRST_EVENT_S
        await asyncio.sleep(LAST_GAP_S)  # a gap that lasts still is seen to its end, or for this time
        while not figures["n_events"] and time.perf_counter() < end:
            await asyncio.sleep(PROBE_S)
        for one in tasks:
            one.cancel()
        faults = [one for one in await asyncio.gather(*tasks, return_exceptions=True) if one]
        figures["faults"] = sum(not isinstance(one, asyncio.CancelledError) for one in faults)
    answers.sort()
    return {**figures, "health_p99_s": answers[int(len(answers) * 0.99)] if answers else float("inf")}


async def _again(work: Any, *arguments: Any) -> None:
    while True:
        await work(*arguments)


async def _stream(http: httpx.AsyncClient, figures: dict[str, float]) -> None:
    last = time.perf_counter()
    try:
        async with http.stream("POST", "/v1/completions", json=ASK) as reply:
            reply.raise_for_status()
            async for line in reply.aiter_lines():
                if line.startswith("data:"):
                    now = time.perf_counter()
                    figures["gap_s"] = max(figures["gap_s"], now - last)
                    figures["n_events"] += 1
                    last = now
    finally:
        figures["gap_s"] = max(figures["gap_s"], time.perf_counter() - last)


async def _probe(http: httpx.AsyncClient, answers: list[float]) -> None:
    while True:
        started = time.perf_counter()
        try:
            await http.get("/health")
        finally:
            answers.append(time.perf_counter() - started)
        await asyncio.sleep(PROBE_S)


async def _sample(pid: int, figures: dict[str, float]) -> None:
    while True:
        figures["peak_mib"] = max(figures["peak_mib"], memory_mib(pid))
        await asyncio.sleep(SAMPLE_S)


async def during(server: Running, attack: Coroutine[Any, Any, None], seconds: float) -> dict[str, float]:
    """What a neighbour sees while an attack runs, for at most these seconds."""
    async with beside(server) as seen:
        task = asyncio.create_task(attack)
        await asyncio.wait([task], timeout=seconds)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    return seen


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_watch(sys.argv[1], int(sys.argv[2])))), flush=True)
