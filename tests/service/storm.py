"""A storm of requests against a real server on the demo pair: `python -m tests.service.storm [--requests N]`.

Plain and streamed requests, some wrong, some left by their client after a moment or a few chunks, over many
connections at once. Each must end in exactly one of result, error and cancel, and leave nothing behind. A process
of its own asks `/health` all the while. Run the full size with nothing beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.process import DEMO, Running, running

ARGUMENTS = (*DEMO, "-np", "8", "--ctx-size", "256", "--max-queue", "2000", "--threads", "1")
HEALTH_LIMIT_S = 0.1
# Asks /health every 20 ms until its input ends, then prints how long each took.
PROBE = """
import http.client, json, select, sys, time
host, port = sys.argv[1].split(":")
found = []
while not select.select([sys.stdin], [], [], 0.02)[0]:
    started = time.perf_counter()
    link = http.client.HTTPConnection(host, int(port), timeout=30)
    link.request("GET", "/health")
    assert link.getresponse().status == 200
    link.close()
    found.append(time.perf_counter() - started)
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a storm."""

    ended: Counter[str]  # result, error CODE, cancel
    seconds: float
    health_s: list[float]  # ascending
    rss_grown_mib: float
    n_files_grown: int

    def health(self, share: float) -> float:
        return self.health_s[min(len(self.health_s) - 1, int(share * len(self.health_s)))]


class Client:
    """One connection's worth of requests."""

    def __init__(self, url: str, seed: int) -> None:
        self.http = httpx.AsyncClient(base_url=url, timeout=120)
        self.random = random.Random(seed)

    async def one(self) -> str:
        """Send a request and tell how it ended."""
        draw = self.random
        body = {
            "prompt": " ".join(
                draw.choices(["def", "x", "return", "for", "(a, b):", "\n"], k=draw.randint(1, 40))
            ),
            "max_tokens": draw.randint(1, 32),
            "n": draw.choice([1, 1, 1, 2]),
            "ignore_eos": draw.random() < 0.5,
            "stream": draw.random() < 0.5,
        }
        if draw.random() < 0.05:
            body["temperature"] = -1
        try:
            async with asyncio.timeout(draw.uniform(0, 1.0) if draw.random() < 0.3 else None):
                return await (self._streamed(body) if body["stream"] else self._whole(body))
        except TimeoutError:
            return "cancel"

    async def _whole(self, body: dict[str, Any]) -> str:
        answer = await self.http.post("/v1/completions", json=body)
        told = answer.json()
        if answer.status_code != 200:
            return f"error {told['error']['code']}"
        assert [one["finish_reason"] for one in told["choices"]] == ["length"] * body["n"] or not body[
            "ignore_eos"
        ]
        return "result"

    async def _streamed(self, body: dict[str, Any]) -> str:
        """Exactly one end per choice, or exactly one error, and [DONE] once, last."""
        n_chunks = self.random.randint(1, 10) if self.random.random() < 0.3 else None
        finished: list[int] = []
        error, is_done = None, False
        async with self.http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                return f"error {json.loads(await answer.aread())['error']['code']}"
            n_seen = 0
            async for line in answer.aiter_lines():
                if not line.startswith("data: "):
                    continue
                n_seen += 1
                if n_seen == n_chunks:
                    return "cancel"
                assert not is_done, "something after [DONE]"
                if line == "data: [DONE]":
                    is_done = True
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                assert error is None, "something after the error"
                error = chunk.get("error")
                finished += [one["index"] for one in chunk.get("choices", ()) if one["finish_reason"]]
        assert is_done
        if error is not None:
            return f"error {error['code']}"
        assert sorted(finished) == list(range(body["n"]))
        return "result"


async def storm(server: Running, n_requests: int, n_connections: int) -> Outcome:
    """Send the requests and see that nothing of them is left."""
    await _settled(server)
    rss, n_files = _memory_mib(server), _n_files(server)
    probe = _probe(server)
    ended: Counter[str] = Counter()
    left = iter(range(n_requests))
    started = time.perf_counter()

    async def connection(seed: int) -> None:
        client = Client(server.url, seed)
        async with client.http:
            for _ in left:
                ended[await client.one()] += 1

    async with asyncio.TaskGroup() as group:
        for seed in range(n_connections):
            group.create_task(connection(seed))
    seconds = time.perf_counter() - started
    told, _ = await asyncio.to_thread(probe.communicate, "end\n")
    assert probe.returncode == 0
    await _settled(server)
    give_up = time.monotonic() + 5
    while _n_files(server) > n_files + 2 and time.monotonic() < give_up:
        await asyncio.sleep(0.05)
    return Outcome(
        ended, seconds, sorted(json.loads(told)), _memory_mib(server) - rss, _n_files(server) - n_files
    )


async def _settled(server: Running) -> None:
    """Wait until no slot, no place in the queue and no page is held. Raises AssertionError if something stays."""
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as http:
        give_up = time.monotonic() + 20
        while True:
            props = (await http.get("/props")).json()
            engine = props["engine"]
            busy = any(slot["is_processing"] for slot in (await http.get("/slots")).json())
            if not busy and engine["n_waiting"] == engine["n_pages_held"] == 0:
                break
            assert time.monotonic() < give_up, engine
            await asyncio.sleep(0.05)
    assert engine["n_pages_free"] + engine["n_pages_cached"] == props["model"]["n_pages"]


def _probe(server: Running) -> subprocess.Popen[str]:
    address = server.url.removeprefix("http://")
    return subprocess.Popen(
        [sys.executable, "-c", PROBE, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def _memory_mib(server: Running) -> float:
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def _n_files(server: Running) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--connections", type=int, default=256)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, running(Path(folder) / "log", ARGUMENTS) as server:
        outcome = asyncio.run(storm(server, options.requests, options.connections))
        surprises = server.surprises()
        status = server.stop()
    n_ended = sum(outcome.ended.values())
    print(
        f"{n_ended} requests over {options.connections} connections in {outcome.seconds:.1f} s: {dict(outcome.ended)}"
    )
    print(
        f"/health ({len(outcome.health_s)} times): p50 {1000 * outcome.health(0.5):.1f} ms,"
        f" p99 {1000 * outcome.health(0.99):.1f} ms, slowest {1000 * outcome.health(1):.1f} ms"
    )
    print(f"memory {outcome.rss_grown_mib:+.1f} MiB, files {outcome.n_files_grown:+d}; exit status {status}")
    wrong = [code for code in outcome.ended if code not in ("result", "cancel", "error invalid_value")]
    good = n_ended == options.requests and not wrong and not surprises and status == 0
    sys.exit(0 if good and outcome.health(0.99) < HEALTH_LIMIT_S else 1)


if __name__ == "__main__":
    main()
