"""A server whose model is divided over processes: it answers, says what it cannot divide, and ends as one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch
from torch import Tensor

from slipstream.engine.errors import SettingError
from slipstream.engine.ranks import Ranks
from slipstream.engine.service.start.launch import launch
from slipstream.engine.settings import Settings
from tests.process import DEMO, ROOT, SERVER, forked

ABOUT = ("engine/service/start/*.py", "engine/service/run/rank_processes.py", "engine/device_loss.py")

TWO = (*DEMO, "-tp", "2", "--threads", "2")
LOST_S = 10.0  # the longest that a lost rank may go unnoticed
CODE = "def add(left, right):\n    return left + right\n"


def ranks_of(pid: int) -> list[int]:
    """Processes that the server has started as ranks."""
    listed = subprocess.run(
        ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(pid)], capture_output=True, text=True, check=True
    )
    return [int(line.split()[0]) for line in listed.stdout.splitlines() if "service.start.rank" in line]


def ask(url: str, **fields: object) -> dict[str, object]:
    asked = {"prompt": CODE, "max_tokens": 48, "seed": 5, "temperature": 0.8, **fields}
    answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, object] = answer.json()
    return found


def test_text_is_the_same_with_drafts_and_a_lost_rank_ends_the_server(tmp_path: Path) -> None:
    with forked(tmp_path / "log", TWO) as server:
        drafted = ask(server.url)
        plain = ask(server.url, speculative={"n_max": 0})
        assert drafted["choices"] == plain["choices"]
        assert json.dumps(drafted["timings"]).count('"draft_n_accepted"') > 0
        (rank,) = ranks_of(server.process.pid)
        with httpx.stream(
            "POST",
            f"{server.url}/v1/completions",
            json={"prompt": CODE, "stream": True, "ignore_eos": True},
            timeout=60,
        ) as stream:
            lines = stream.iter_lines()
            next(lines)
            os.kill(rank, signal.SIGKILL)
            killed = time.monotonic()
            rest = "\n".join(lines)
        assert time.monotonic() - killed < LOST_S
        assert '"code":"device_failed"' in rest.replace(" ", "")
        assert "a process of --tensor-parallel-size is lost" in rest
        assert httpx.get(f"{server.url}/live").status_code == 503
        assert server.stop() == 0


@pytest.mark.sampled(together=True)
def test_an_idle_server_notices_too(tmp_path: Path) -> None:
    # `--exact` starts where sums do not depend on their size.
    with forked(tmp_path / "log", (*TWO, "--exit-on-device-error", "--exact")) as server:
        assert "sums over ranks" not in server.log.read_text()
        (rank,) = ranks_of(server.process.pid)
        os.kill(rank, signal.SIGKILL)
        assert server.process.wait(LOST_S) == 1
        assert "rank 1 of --tensor-parallel-size has ended with status -9" in server.log.read_text()


@pytest.mark.sampled(together=True)
def test_its_ranks_end_with_a_server_and_leave_no_folder(tmp_path: Path) -> None:
    with forked(tmp_path / "log", TWO, environ={"TMPDIR": str(tmp_path)}) as server:
        (rank,) = ranks_of(server.process.pid)
        assert [*tmp_path.glob("slipstream-ranks-*")]
        server.process.kill()
        server.process.wait(LOST_S)
        for _ in range(100):
            if not Path(f"/proc/{rank}").exists():
                break
            time.sleep(0.1)
        assert not Path(f"/proc/{rank}").exists()
        assert not [*tmp_path.glob("slipstream-ranks-*")]


@pytest.mark.sampled
async def test_sums_that_depend_on_their_size_are_told_or_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    by_rank = Ranks.add
    two = replace(Settings(model=DEMO[1]), tensor_parallel_size=2, threads=2)

    def by_size(self: Ranks, part: Tensor) -> Tensor:
        """The fault of one process."""
        total = by_rank(self, part)
        return torch.nextafter(total, total + 1) if len(part) > 8 else total

    monkeypatch.setattr(Ranks, "add", by_size)
    with pytest.raises(
        SettingError, match=r"^--exact True: sums over the ranks failed on this machine: torch"
    ):
        launch(replace(two, exact=True))
    assert ranks_of(os.getpid()) == []
    engine = launch(two)
    assert engine.info.inexact_sums is not None
    assert f"sums over ranks: {engine.info.inexact_sums}" in caplog.text
    await engine.close()


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("n", "told"),
    [("3", "must divide the model's"), ("0", "must be at least 1"), ("two", "--tensor-parallel-size")],
)
def test_what_cannot_be_divided_is_refused_before_anything_is_loaded(n: str, told: str) -> None:
    command = [sys.executable, "-m", SERVER, *DEMO, "-tp", n, "--port", "0"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode != 0
    assert told in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr
