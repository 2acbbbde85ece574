"""Two of the attacks of `make attack`, until the server has refused them: a neighbour's streams go on.

How long its gaps are is for `make attack`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.attack.__main__ import N_ATTACKERS
from tests.attack.cases import CASES, Attack, Target
from tests.attack.neighbour import ARGUMENTS, during
from tests.process import forked


async def answered(attack: Attack, target: Target) -> None:
    """The attack by several at once, again and again, until the server has answered with a status."""
    while not target.answers.keys() - {"cut"}:
        await asyncio.gather(*(attack(target) for _ in range(N_ATTACKERS)))


async def test_large_requests_do_not_stop_others(tmp_path: Path) -> None:
    with forked(tmp_path / "log", ARGUMENTS) as server:
        targets = {name: Target(server.url) for name in ("chat", "unknown fields")}

        async def one_after_the_other() -> None:
            for name, target in targets.items():
                await answered(CASES[name], target)

        seen = await during(server, one_after_the_other(), 60.0)
        for name, target in targets.items():
            assert target.answers["400"] > 0, (name, target.answers)
            assert target.answers["200"] == 0, (name, target.answers)
        assert seen["faults"] == 0, seen
        assert seen["n_events"] > 0, seen
        assert server.surprises() == []
        assert server.stop() == 0
