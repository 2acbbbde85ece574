"""An application is scaled, updated and stopped under many streams, and no reply suffers.

`python -m tests.ray.changes [--streams N]`. The application is that of a configuration file, as with
KubeRay: `serve deploy` makes every change. Replicas have one second to end what runs on them, so most of it moves.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from tests.process import DEMO, ROOT, Running, free_port, running, wait
from tests.ray.cluster import ENVIRON, N_SLOTS, READY_S, SETTINGS, Cluster, started
from tests.ray.storm import Client, Disturbance, Known, Tally, answers, request, say, storm, surprises_in

BIN = Path(sys.executable).parent
ARGS: dict[str, Any] = {
    "model": str(ROOT / "demo" / "target"),
    "model_draft": str(ROOT / "demo" / "draft"),
    "alias": "demo",
    "ctx_size": 2048,
    "parallel": N_SLOTS,
    "threads": 1,
    "max_queue": 200,
    "replica_cpus": 0.1,
    "shutdown_timeout": 1,
}
NUMBERS = (1, 3, 2, 3, 1, 2)  # of replicas, one after the other
N_UPDATES = 2
SETTLED_S = 1.0  # for which a number stays
# As `--max-replicas 3` has it, but in a hurry.
SCALING = {
    "min_replicas": 1,
    "max_replicas": 3,
    "target_ongoing_requests": N_SLOTS,
    "upscale_delay_s": 1,
    "downscale_delay_s": 2,
}
N_FEW = 3  # streams, for which a replica is enough
N_LONG, LONG, UNDER_WAY_S = 12, 1200, 2.0  # streams, tokens of each, and seconds until they are interrupted
NAME = "slipstream"
STATE = "/api/serve/applications/"  # of Ray's dashboard


@dataclass
class Deployed:
    """An application that Ray runs as a file says. Its HTTP port stays, whatever changes."""

    folder: Path
    dashboard: str
    port: int
    n_replicas: int = 3
    scaling: dict[str, Any] | None = None  # Ray's own, by load, in place of a number
    args: dict[str, Any] = field(default_factory=lambda: dict(ARGS))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def deploy(self) -> None:
        """Ask for what is described here now; returns when it was taken, not when it is there."""
        file = self.folder / "application.yaml"
        application = {
            "name": NAME,
            "import_path": "slipstream.server.cluster.on_ray.application:application",
            "route_prefix": "/",
            "args": self.args,
            "deployments": [{"name": "replica", **self._number()}],
        }
        http = {"host": "127.0.0.1", "port": self.port, "request_timeout_s": None}
        file.write_text(json.dumps({"http_options": http, "applications": [application]}))  # JSON is YAML
        subprocess.run(
            [BIN / "serve", "deploy", "--address", self.dashboard, file],
            check=True,
            capture_output=True,
            cwd=ROOT,
            env=environ(),
        )

    def _number(self) -> dict[str, Any]:
        return (
            {"num_replicas": self.n_replicas}
            if self.scaling is None
            else {"autoscaling_config": self.scaling}
        )

    def wait(self) -> None:
        """Until all replicas are there and take requests. Raises AssertionError if that does not happen."""
        end = time.monotonic() + READY_S
        while not self._is_whole():
            assert time.monotonic() < end, f"not {self.n_replicas} replicas: {self._state()}"
            time.sleep(0.2)

    def _is_whole(self) -> bool:
        state = self._state().get("applications", {}).get(NAME, {})
        if state.get("status") != "RUNNING":
            return False
        there = state["deployments"]["replica"]["replicas"]  # those that start or stop included
        return [replica["state"] for replica in there] == ["RUNNING"] * self.n_replicas

    def _state(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(self.dashboard + STATE, timeout=60).json()
        return found

    def surprises(self) -> list[str]:
        """Lines that no log should have."""
        files = (self.folder / "ray").glob("session_2*/logs/**/*")
        return [line for file in files if file.is_file() for line in surprises_in(file)]


def environ() -> dict[str, str]:
    return {**os.environ, **ENVIRON, "PYTHONPATH": str(ROOT)}


@contextlib.contextmanager
def deployed(folder: Path) -> Iterator[Deployed]:
    """Ray on this machine, with the application; both are stopped at the end."""
    dashboard = free_port()
    command = [BIN / "ray", "start", "--head", "--block", "--num-cpus", "4", "--port", "0"]
    command += ["--temp-dir", folder / "ray", "--dashboard-port", str(dashboard), "--disable-usage-stats"]
    log = folder / "ray.log"
    with log.open("wb") as file:
        head = subprocess.Popen(command, cwd=ROOT, env=environ(), stdout=file, stderr=subprocess.STDOUT)
    try:
        one = Deployed(folder, f"http://127.0.0.1:{dashboard}", free_port())
        wait(Running(head, one.dashboard, log), STATE, READY_S)
        one.deploy()
        one.wait()
        yield one
    finally:
        head.terminate()
        head.wait(60)


async def scale(one: Deployed, tally: Tally) -> None:
    """Other numbers of replicas, one after the other."""
    for number in NUMBERS:
        one.n_replicas = number
        await _changed(one, tally)


async def update(one: Deployed, tally: Tally) -> None:
    """Another setting: new replicas and new ingresses beside the old ones."""
    for _ in range(N_UPDATES):
        one.args["max_queue"] += 1
        await _changed(one, tally)


async def _changed(one: Deployed, tally: Tally) -> None:
    await asyncio.to_thread(one.deploy)
    await asyncio.to_thread(one.wait)
    tally.n_disturbed += 1
    await asyncio.sleep(SETTLED_S)


async def grow_or_shrink(one: Deployed, number: int, tally: Tally) -> None:
    """Wait until there are so many replicas by the load alone."""
    one.n_replicas = number
    await asyncio.to_thread(one.wait)
    tally.n_disturbed += 1


def under_change(one: Deployed, known: Known, n_streams: int) -> Iterator[Tally]:
    """All changes of a deployed application, each under a storm."""

    def played(what: str, disturb: Disturbance, n_streams: int) -> Tally:
        tally = asyncio.run(storm(one.url, known, sys.maxsize, n_streams, disturb))
        say(tally, n_streams, what, [])
        return tally

    yield played("other numbers of replicas", partial(scale, one), n_streams)
    yield played("updates", partial(update, one), n_streams)
    one.scaling = SCALING
    one.deploy()
    yield played("growth by load", partial(grow_or_shrink, one, SCALING["max_replicas"]), n_streams)
    yield played("shrinkage by load", partial(grow_or_shrink, one, SCALING["min_replicas"]), N_FEW)


def long_request(number: int) -> tuple[str, dict[str, Any]]:
    path, body = request("chat", number)
    return path, {**body, "max_tokens": LONG, "ignore_eos": True, "stream": True, "seed": number}


async def said_at_length(url: str, tally: Tally | None = None) -> list[Any]:
    """What every long request is answered, or the exception."""

    async def one(number: int) -> Any:
        client = Client(url)
        async with client.http:
            return (await client.said(*long_request(number), tally))[0]

    return await asyncio.gather(*map(one, range(N_LONG)), return_exceptions=True)


async def stop(cluster: Cluster, known: list[Any]) -> Tally:
    """SIGTERM for `slipstream ray-serve` while streams run: they end, and the status is 0."""
    tally = Tally()
    started_s = time.monotonic()
    saying = asyncio.create_task(said_at_length(cluster.url, tally))
    await asyncio.sleep(UNDER_WAY_S)
    assert not saying.done(), "the streams ended too soon"
    cluster.server.process.send_signal(signal.SIGTERM)
    tally.n_disturbed += 1
    for was, now in zip(known, await saying, strict=True):
        if isinstance(now, BaseException):
            tally.ended["failed"] += 1
            tally.notes.append(f"{type(now).__name__}: {str(now)[:400]}")
        else:
            tally.ended["equal" if now == was else "different"] += 1
    tally.seconds = time.monotonic() - started_s
    status = await asyncio.to_thread(cluster.server.process.wait, READY_S)
    tally.notes.append(f"exit status {status}")
    tally.ended["failed"] += status != 0
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with running(folder / "plain.log", (*DEMO, *SETTINGS)) as plain:
            known = asyncio.run(answers(plain.url, 16))
            at_length = asyncio.run(said_at_length(plain.url))
        with started(folder) as cluster:
            tallies = [asyncio.run(stop(cluster, at_length))]
            say(tallies[0], N_LONG, "stop", surprises_in(cluster.server.log))
        with deployed(folder) as one:
            tallies += under_change(one, known, options.streams)
            print(*one.surprises()[:5], sep="\n", end="")
    sys.exit(0 if all(tally.is_good for tally in tallies) else 1)


if __name__ == "__main__":
    main()
