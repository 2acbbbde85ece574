"""A small storm; the full size is `python -m tests.service.storm`, which also holds `/health` to its time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process import forked
from tests.service.storm import ARGUMENTS, storm

ABOUT = ("engine/core/*.py", "engine/service/run/*.py")


@pytest.mark.sampled
async def test_every_request_ends_once_and_leaves_nothing(tmp_path: Path, *, is_whole: bool) -> None:
    n_requests = 120 if is_whole else 60
    with forked(tmp_path / "log", ARGUMENTS) as server:
        # Matrix products keep a compiled kernel per shape, up to a limit: these come first and are no leak.
        await storm(server, n_requests, 64)
        outcome = await storm(server, n_requests, 64)
        assert not server.surprises()
        assert server.stop() == 0
    assert sum(outcome.ended.values()) == n_requests
    assert set(outcome.ended) == {"result", "cancel", "error invalid_value"}
    assert outcome.n_files_grown <= 2
    assert outcome.rss_grown_mib < 100
    assert outcome.health_s
