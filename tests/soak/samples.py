"""What a server holds, read from outside: from /proc, /props and /slots."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.attack.neighbour import NEIGHBOUR, memory_mib
from tests.process import Running

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at a server. Memory is resident memory."""

    at_s: float  # since the load began, or, before it, since the server was first looked at
    rss_mib: float
    children_mib: float
    n_children: int
    n_files: int  # open descriptors
    n_threads: int
    n_pages_held: int
    n_pages_cached: int
    n_pages_free: int
    n_busy: int  # slots
    n_waiting: int
    n_preempted: int
    n_completion_tokens: int
    n_drafted: int  # tokens that drafters guessed and a pass verified
    n_accepted: int

    def row(self) -> dict[str, float]:
        """Its figures, for JSON."""
        return {name: round(value, 1) for name, value in asdict(self).items()}


def children(pid: int) -> list[int]:
    """Processes that the threads of a process have started, and theirs."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            own = [int(one) for one in task.read_text().split()]
        except OSError:  # a thread that has just ended
            continue
        found += [*own, *(one for child in own for one in children(child))]
    return found


class Watch:
    """Takes samples of a server."""

    def __init__(self, server: Running) -> None:
        self._pid = server.process.pid
        self._http = httpx.AsyncClient(
            base_url=server.url,
            headers={"x-api-key": NEIGHBOUR},
            timeout=60,
            limits=httpx.Limits(max_keepalive_connections=1),
        )
        self._since_s = time.monotonic()
        self.samples: list[Sample] = []

    def begin(self) -> None:
        """The load begins: samples and their clock start anew."""
        self._since_s = time.monotonic()
        self.samples.clear()

    async def aclose(self) -> None:
        await self._http.aclose()

    async def get(self, path: str) -> Any:
        """The JSON of a status page."""
        return (await self._http.get(path)).raise_for_status().json()

    async def post(self, path: str, body: Mapping[str, Any]) -> None:
        """Ask for something whose answer is not looked at."""
        (await self._http.post(path, json=body)).raise_for_status()

    async def look(self) -> Sample:
        """A sample; it is kept."""
        props, slots = await self.get("/props"), await self.get("/slots")
        engine, drafters = props["engine"], props["speculation"]["counts"].values()
        whole_mib = memory_mib(self._pid)
        proc = Path(f"/proc/{self._pid}")
        rss_mib = int((proc / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB
        names = ("held", "cached", "free")
        sample = Sample(
            at_s=time.monotonic() - self._since_s,
            rss_mib=rss_mib,
            children_mib=max(0.0, whole_mib - rss_mib),
            n_children=len(children(self._pid)),
            n_files=len(os.listdir(proc / "fd")),
            n_threads=len(os.listdir(proc / "task")),
            **{f"n_pages_{name}": engine[f"n_pages_{name}"] for name in names},
            n_busy=sum(slot["is_processing"] for slot in slots),
            n_waiting=engine["n_waiting"],
            n_preempted=engine["n_preempted"],
            n_completion_tokens=engine["n_completion_tokens"],
            n_drafted=sum(one["draft_n"] for one in drafters),
            n_accepted=sum(one["draft_n_accepted"] for one in drafters),
        )
        self.samples.append(sample)
        return sample

    async def go_on(self, every_s: float) -> None:
        """Samples until it is cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(every_s)
