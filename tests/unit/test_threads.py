"""Threads of torch's OpenMP runtime: who has them, and for how long."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from slipstream.kernels import threads
from tests.process import ROOT

COUNTED = """
import os, threading, time, torch
from slipstream.kernels.threads import end_team

def n_threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(3)
before = n_threads()
torch.ones(1 << 20).sin()
assert n_threads() == before + 2, "the team of this thread"
end_team()
until = time.monotonic() + 30
while n_threads() > before and time.monotonic() < until:
    time.sleep(0.01)
assert n_threads() == before, "the team is still there"
end_team()  # of none
torch.ones(1 << 20).sin()
assert n_threads() == before + 2, "a new team"
"""


@pytest.mark.skipif(
    not os.path.isdir("/proc/self/task") or not threads.runtime(), reason="counts the threads of Linux"
)
def test_a_thread_gives_up_its_team() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", COUNTED], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
