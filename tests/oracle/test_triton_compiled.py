"""Every Triton kernel compiles for GPUs, as the ops launch it at real sizes; nothing spills. Needs no GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slipstream.kernels import triton_launch

pytestmark = pytest.mark.sampled(keep=0, together=True)
ABOUT = ("kernels/*/triton*.py", "tests/oracle/triton_compile.py")

FOLDERS = sorted(path.parent.name for path in Path("kernels").glob("*/triton.py"))
SHARED_LEAST = 99 * 1024  # of a program, on compute capability 8.9 and 12.0; others have more
# A kernel takes more only if it says so: fewer programs then fit on a multiprocessor.
MOST_REGISTERS = {
    "mla._attend": 255,
    "moe._gate_up": 128,
    "moe._down": 128,
    "norm_rope_write._heads": 80,  # of float32
}
# Kernels that are launched before the kernel before them has ended, where a device can, and so have to wait for it.
EARLY = (
    *("norm._row", "norm_rope_write._heads", "gated._gated", "gated_norm._heads"),
    *("short_conv._convolve", "short_conv._keep"),
)


def compiled(*arguments: str) -> dict[str, dict[str, dict[str, int]]]:
    """Architecture -> kernel, dtype and instance -> figures, from a process of its own: here Triton interprets."""
    command = [sys.executable, "-m", "tests.oracle.triton_compile", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    table: dict[str, dict[str, dict[str, int]]] = json.loads(done.stdout)
    return table


def kernels_of(folder: str) -> list[str]:
    """Names of the folder's kernels: those jitted functions that ask which program they are."""
    source = "".join(path.read_text() for path in sorted(Path("kernels", folder).glob("triton*.py")))
    functions = re.split(r"^@triton\.jit.*\ndef ", source, flags=re.M)[1:]
    return [f"{folder}.{one.split('(')[0]}" for one in functions if "tl.program_id" in one]


def check(table: dict[str, dict[str, dict[str, int]]]) -> None:
    wanted = {name for folder in FOLDERS for name in kernels_of(folder)}
    assert len(wanted) >= 15
    for capability, instances in table.items():
        assert wanted <= {name.split()[0] for name in instances}, wanted
        for name, figures in instances.items():
            assert figures["stack"] == 0, f"{name} spills"
            assert figures["registers"] <= MOST_REGISTERS.get(name.split()[0], 64), (name, figures)
            assert figures["shared"] <= SHARED_LEAST, (name, figures)
            waits = name.split()[0] in EARLY and int(capability) >= 90
            assert figures["waits"] == waits, f"{name} for {capability}"


@pytest.mark.parametrize("capability", ["80", "90"])
def test_kernels_compile(capability: str) -> None:
    check(compiled(capability))


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "89", "90", "100", "120"])
def test_kernels_compile_for_all(capability: str) -> None:
    check(compiled(capability, "--all-dtypes"))


def test_devices_that_cannot_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "older than compute capability 8.0" in (triton_launch.refuses(gpu, torch.bfloat16) or "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert "TRITON_INTERPRET" in (triton_launch.refuses(gpu, torch.bfloat16) or "")  # true of this process
    assert triton_launch.refuses(torch.device("cpu"), torch.float64) is not None
