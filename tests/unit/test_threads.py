"""Threads of torch's OpenMP runtime: who has them, and for how long."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from slipstream.kernels import threads
from tests.process import ROOT

BEGIN = """
import os, time, torch
from slipstream.kernels.team import end_team

def n_threads():
    return len(os.listdir("/proc/self/task"))
"""
BY_ITSELF = """
torch.set_num_threads(3)
before = n_threads()
torch.ones(1 << 20).sin()
assert n_threads() == before + 2, "the team of this thread"
end_team()
until = time.monotonic() + 30
while n_threads() > before and time.monotonic() < until:
    time.sleep(0.01)  # the system may still be taking them away
assert n_threads() == before, "the team is still there"
end_team()  # of none
torch.ones(1 << 20).sin()
assert n_threads() == before + 2, "a new team"
"""
BY_A_LAUNCH = """
from slipstream.engine.service.start.launch import launch
from slipstream.engine.settings import Settings

engine = launch(Settings(model="demo/target", ctx_size=512, parallel=1, threads=3, spec_type="none"))
before = n_threads()
torch.ones(1 << 20).sin()
assert n_threads() > before, "this thread has had a team"
"""


@pytest.mark.sampled
@pytest.mark.skipif(
    not os.path.isdir("/proc/self/task") or not threads.runtime(), reason="counts the threads of Linux"
)
@pytest.mark.parametrize("what", [BY_ITSELF, BY_A_LAUNCH], ids=["by itself", "by a launch"])
def test_a_thread_gives_up_its_team(what: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", BEGIN + what],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
