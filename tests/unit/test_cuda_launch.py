"""A launch from Python down to the driver's functions, on a driver that only writes down what it is asked for.

In a process of its own, because the driver's library is loaded once. The kernels are compiled before: with a driver
at hand NVRTC asks it for more than ours knows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.kernels.cuda import nvrtc
from slipstream.kernels.cuda.source import Source
from tests.emulator import COMPILER, HERE, needs_compiler

pytestmark = [needs_compiler, pytest.mark.sampled(keep=0, together=True)]
INSTANCES = ("scaled", "block_sums<bfloat16>")
SCRIPT = """
import ctypes, json, sys, threading
fake = ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
fake.fake_told.restype = ctypes.c_char_p
import torch
torch._C._cuda_getDevice = lambda: 0
torch._C._cuda_getCurrentRawStream = lambda device: stream
torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda device: (9, 0)
from slipstream.kernels.cuda.launcher import launch, refusal
from slipstream.kernels.cuda.source import Source
from slipstream.kernels.dispatch import CannotRunError
told = {"refusal": refusal(torch.device("cuda", 0))}
source = Source(sys.argv[2], "probes.cu", tuple(sys.argv[3:]))
x, out = torch.zeros(9), torch.zeros(9)
told["x"], told["out"] = x.data_ptr(), out.data_ptr()
def scaled(name):
    launch(source, "scaled", (3, 2, 1), 96, x, out, 7, 0.5, 1 << 33, shared=100_000)
    told[name] = fake.fake_told().decode().splitlines()
fake.fake_expect(5)
stream = 0x77
scaled("first")
scaled("second")
stream = 0
thread = threading.Thread(target=scaled, args=("other",))
thread.start()
thread.join()
fake.fake_expect(3)
launch(source, "block_sums<bfloat16>", (1, 1, 1), 96, x, None, out)
told["none"] = fake.fake_told().decode().splitlines()
try:
    launch(source, "scaled<3>", (1, 1, 1), 32)
except CannotRunError as error:
    told["unknown"] = str(error)
told["reloaded"] = fake.fake_told().decode()
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the driver was asked for at each step of SCRIPT."""
    folder = tmp_path_factory.mktemp("driver")
    library = folder / "libcuda.so.1"
    assert COMPILER is not None
    command = [COMPILER, "-std=c++17", "-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([*command, str(HERE / "driver.cpp"), "-o", str(library), "-ldl"], check=True)
    beside = str(HERE / "probes.py")
    nvrtc.compiled(Source(beside, "probes.cu", INSTANCES), "sm_90a", folder / "slipstream" / "cubins")
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(library), beside, *INSTANCES],
        env={**os.environ, "XDG_CACHE_HOME": str(folder)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    answer: dict[str, Any] = json.loads(run.stdout)
    return answer


def words(address: int, other: int) -> str:
    """Low halves of `scaled`'s parameters: two addresses, 7, 0.5 as a float, 2**33."""
    return f"{address & 0xFFFFFFFF:x} {other & 0xFFFFFFFF:x} 7 3f000000 0"


def test_the_first_launch_loads_all_kernels_of_the_source(told: dict[str, Any]) -> None:
    assert told["refusal"] is None
    *before, launch = told["first"]
    assert before[:2] == ["current 1", "load 1"]
    assert sorted(line.split()[1] for line in before if line.startswith("kernel")) == [
        "_Z10block_sumsI13__nv_bfloat16EvPKT_PfPi",
        "_Z6scaledPKfPfifx",
    ]
    # 232448 bytes a block may have, 448 of them static.
    assert [line for line in before if line.startswith("set")] == ["set 8 232000 1 0"] * 2
    assert launch == (
        "launch 1 grid 3 2 1 block 96 1 1 shared 100000 stream 77 with " + words(told["x"], told["out"])
    )


def test_later_launches_only_launch(told: dict[str, Any]) -> None:
    assert told["second"] == told["first"][-1:]


def test_another_thread_gets_the_context_and_the_default_stream_is_the_legacy_one(
    told: dict[str, Any],
) -> None:
    entered, launch = told["other"]
    assert entered == "current 1"
    assert "stream 1 with" in launch


def test_no_tensor_is_a_null_pointer(told: dict[str, Any]) -> None:
    (launch,) = told["none"]
    assert launch.endswith(f"with {told['x'] & 0xFFFFFFFF:x} 0 {told['out'] & 0xFFFFFFFF:x}")


def test_only_named_instances_can_be_launched(told: dict[str, Any]) -> None:
    assert "has no instance scaled<3>; it has scaled, block_sums<bfloat16>" in told["unknown"]
    assert not told["reloaded"]
