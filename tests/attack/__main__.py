"""Every attack on a real server, four at once: `make attack`, or `python -m tests.attack [--only NAME …]`.

A line per attack: the neighbour's worst gap between two events, p99 of `/health`, memory before, at most and
afterwards, and what the attackers were answered. Status 1 if a bar is missed. About seven minutes on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from tests.attack.cases import CASES as BODIES
from tests.attack.cases import Attack, Target
from tests.attack.grammars import GRAMMARS
from tests.attack.neighbour import ARGUMENTS, ATTACKER, during, memory_mib
from tests.process import Running, running

CASES = {**BODIES, **GRAMMARS}
N_ATTACKERS = 4
MOST_GAP_S, MOST_HEALTH_S, MOST_GROWTH = 0.25, 0.1, 1.1  # the gap: above the one without an attack
REST_S = 30.0
KEY = {"authorization": f"Bearer {ATTACKER}"}


async def assault(attack: Attack, target: Target, n_attackers: int = N_ATTACKERS) -> None:
    """The attack again and again, by so many at once. Never returns."""

    async def one() -> None:
        while True:
            await attack(target)

    await asyncio.gather(*(one() for _ in range(n_attackers)))


def fill(server: Running) -> None:
    """Use every page of the cache once: a page is resident from its first use on, and that is no attack's doing."""
    with httpx.Client(base_url=server.url, headers=KEY, timeout=120.0) as client:
        model = client.get("/props").json()["model"]
        for first in range(model["n_pages"] * model["page_size"] // model["n_ctx"] + 2):
            prompt = [first, *(token % 1000 for token in range(model["n_ctx"] - 3))]
            client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1}).raise_for_status()


async def rested(pid: int, at_most_mib: float) -> float:
    """MiB of memory once it is low enough, or after REST_S."""
    end = time.monotonic() + REST_S
    while (now := memory_mib(pid)) > at_most_mib and time.monotonic() < end:
        await asyncio.sleep(0.5)
    return now


async def measure(server: Running, names: Sequence[str], seconds: float) -> list[str]:
    """Run attacks and print their lines; the names of those that miss a bar."""
    missed = []
    quiet = await during(server, asyncio.sleep(3600), seconds)
    print(f"without: gap {quiet['gap_s'] * 1e3:.0f} ms, /health p99 {quiet['health_p99_s'] * 1e3:.0f} ms")
    print(f"{'':28} gap ms  health p99 ms  MiB before  most  after  answers")
    for name in names:
        target, before = Target(server.url), memory_mib(server.process.pid)
        seen = await during(server, assault(CASES[name], target), seconds)
        after = await rested(server.process.pid, before * MOST_GROWTH)
        fits = (
            seen["gap_s"] <= quiet["gap_s"] + MOST_GAP_S
            and seen["health_p99_s"] <= MOST_HEALTH_S
            and after <= before * MOST_GROWTH
            and not seen["faults"]
        )
        missed += [] if fits else [name]
        told = " ".join(f"{status}:{n}" for status, n in sorted(target.answers.items()))
        print(
            f"{name:28} {seen['gap_s'] * 1e3:6.0f}  {seen['health_p99_s'] * 1e3:13.0f}  {before:10.0f}"
            f"  {seen['peak_mib']:4.0f}  {after:5.0f}  {told}{'' if fits else '  MISSED'}",
            flush=True,
        )
    return missed


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each attack")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder, running(Path(folder) / "log", ARGUMENTS) as server:
        fill(server)
        missed = asyncio.run(measure(server, options.only, options.seconds))
        missed += [f"in the log: {line}" for line in server.surprises()[:5]]
    print("missed: " + ", ".join(missed) if missed else "all bars are met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
