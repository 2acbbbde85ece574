"""Two of the attacks of `make attack` for two seconds each: both are refused, and a neighbour's streams go on.

How long its gaps are is for `make attack`.
"""

from __future__ import annotations

from pathlib import Path

from tests.attack.__main__ import assault
from tests.attack.cases import CASES, Target
from tests.attack.neighbour import ARGUMENTS, during
from tests.process import running


async def test_large_requests_do_not_stop_others(tmp_path: Path) -> None:
    with running(tmp_path / "log", ARGUMENTS) as server:
        for name in ("chat", "unknown fields"):
            target = Target(server.url)
            seen = await during(server, assault(CASES[name], target), 1.0)
            assert target.answers["400"] > 0, (name, target.answers)
            assert target.answers["200"] == 0, (name, target.answers)
            assert seen["faults"] == 0, seen
            assert seen["n_events"] > 0, seen
        assert server.surprises() == []
        assert server.stop() == 0
