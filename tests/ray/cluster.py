"""An application of three replicas on this machine, started by `slipstream ray-serve`, and its processes."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.process import DEMO, Running, running

N_REPLICAS, N_SLOTS = 3, 8
# Ray sets processors aside; so that three replicas find a place on two cores, each asks for little.
CLUSTER = ("ray-serve", "--replicas", str(N_REPLICAS), "--replica-cpus", "0.1")
SETTINGS = ("--ctx-size", "2048", "--parallel", str(N_SLOTS), "--threads", "1", "--max-queue", "200")
READY_S = 300.0
# As where the server has keys or a host that others reach.
ENVIRON = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_DOCKER_CPU_WARNING": "1",
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_AUTH_MODE": "disabled",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Cluster:
    """A running application."""

    server: Running
    n_slots: int  # of all replicas

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def pids(self) -> list[int]:
        """Processes of the replicas that there are."""
        listed = subprocess.run(
            ["ps", "-ww", "-eo", "pid=,args="], capture_output=True, text=True, check=True
        )
        return sorted(
            int(line.split()[0])
            for line in listed.stdout.splitlines()
            if "ServeReplica:slipstream:replica" in line
        )

    def is_whole(self) -> bool:
        """Whether all replicas take requests."""
        return n_slots(self.url) == self.n_slots and len(self.pids) == self.n_slots // N_SLOTS

    def kill(self, draw: random.Random) -> int:
        """SIGKILL for one of the replicas; its process."""
        pid = draw.choice(self.pids)
        os.kill(pid, signal.SIGKILL)
        return pid

    def wait_until_whole(self) -> None:
        """Raises AssertionError if a replica does not come back."""
        end = time.monotonic() + READY_S
        while not self.is_whole():
            assert time.monotonic() < end, f"{len(self.pids)} replicas, {n_slots(self.url)} slots"
            time.sleep(0.2)


def n_slots(url: str) -> int:
    """Slots that the server says it has."""
    found: int = httpx.get(f"{url}/props", timeout=60).json()["total_slots"]
    return found


@contextlib.contextmanager
def started(
    folder: Path, *more: str, n: int = N_REPLICAS, settings: Sequence[str] = SETTINGS
) -> Iterator[Cluster]:
    """The demo pair in `n` replicas; stopped at the end, and Ray with it."""
    arguments = (CLUSTER[0], "--replicas", str(n), *CLUSTER[3:], *DEMO, *settings, *more)
    with running(folder / "cluster.log", arguments, environ=ENVIRON, ready_s=READY_S) as server:
        yield Cluster(server, n * N_SLOTS)
