"""A small storm; the full size is `python -m tests.service.storm`, which also holds `/health` to its time."""

from __future__ import annotations

from pathlib import Path

from tests.process import running
from tests.service.storm import ARGUMENTS, storm


async def test_every_request_ends_once_and_leaves_nothing(tmp_path: Path) -> None:
    with running(tmp_path / "log", ARGUMENTS) as server:
        # Matrix products keep a compiled kernel per shape, up to a limit: these come first and are no leak.
        await storm(server, 120, 64)
        outcome = await storm(server, 120, 64)
        assert not server.surprises()
        assert server.stop() == 0
    assert sum(outcome.ended.values()) == 120
    assert set(outcome.ended) == {"result", "cancel", "error invalid_value"}
    assert outcome.n_files_grown <= 2
    assert outcome.rss_grown_mib < 100
    assert outcome.health_s
