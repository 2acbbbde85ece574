"""What CPUs with AVX2 alone run in place of wider code: the same bits, but for products of matrices and for tiles."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import pytest
import torch

from slipstream.kernels import dispatch
from slipstream.kernels.attention import by_tiles
from slipstream.kernels.cpu_features import missing
from slipstream.kernels.proof.inputs import Inputs
from slipstream.kernels.proof.judge import bits
from slipstream.kernels.vector import IS_WIDE
from tests.oracle.test_kernels_blocks import AVX2
from tests.process import ROOT

ABOUT = ("kernels/*.py", "kernels/gated/*.py", "kernels/norm/*.py")
OPERATORS = "attention", "gated", "norm"
IN_A_CHILD = (
    "import sys; from tests.oracle.test_other_cpus import results; sys.stdout.buffer.write(results())"
)


def results() -> bytes:
    """Bits of all that the operators' proofs compute in bfloat16."""
    device, dtype = torch.device("cpu"), torch.bfloat16
    dispatch.select(device, dtype)
    found = []
    for folder in OPERATORS:
        cases = importlib.import_module(f"slipstream.kernels.{folder}.proof").CASES
        with dispatch.use("cpu", folder):
            found += [bits(one) for make in cases.values() for one in make(Inputs(device, dtype)).whole()]
    return b"".join(one.numpy().tobytes() for one in found)


@pytest.mark.sampled(keep=0, together=True)
@pytest.mark.skipif(not IS_WIDE, reason="this CPU runs it anyway")
def test_code_for_narrow_registers_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_tiles, "takes", lambda *_: False)
    assert not missing([one.removeprefix("+") for one in AVX2.split(",")])
    environ = {**os.environ, "NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": AVX2}
    program = [sys.executable, "-c", IN_A_CHILD]
    made = subprocess.run(program, cwd=ROOT, env=environ, check=True, stdout=subprocess.PIPE).stdout
    assert made == results()
