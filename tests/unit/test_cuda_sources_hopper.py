"""Every .cu through NVRTC for Hopper: no warnings, no spills."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import triton

from tests.emulator.sources import FOLDERS, check, compiled, sources_of

ABOUT = (
    "kernels/*/*.cu",
    "kernels/**/*.cuh",
    "kernels/*/cuda.py",
    "kernels/*/prompt.py",
    "kernels/*/warpgroups.py",
    "kernels/cuda/*.py",
)
# Begins with another folder than the files beside it, so that a sample of one case of each compiles different sources.
TURNED = FOLDERS[2:] + FOLDERS[:2]
DISASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
WAIT, LET_NEXT = "ACQBULK", "PREEXIT"  # griddepcontrol.wait and .launch_dependents


@pytest.mark.sampled(keep=1)
@pytest.mark.parametrize("arch", ["sm_90", "sm_90a"])
@pytest.mark.parametrize("folder", TURNED)
def test_compiles_for_hopper(folder: str, arch: str) -> None:
    check(folder, arch)


@pytest.mark.sampled(keep=3)
@pytest.mark.parametrize("folder", TURNED)
def test_kernels_that_begin_early_wait_and_others_do_not(folder: str, tmp_path: Path) -> None:
    """Without waiting a kernel reads what is not written yet, which neither emulation nor a launch by itself shows."""
    for source in sources_of(folder):
        path = tmp_path / "a.cubin"
        path.write_bytes(compiled(source, "sm_90a").cubin)
        said = subprocess.run([DISASSEMBLER, "--dump-sass", path], capture_output=True, text=True, check=True)
        kernels = said.stdout.split("Function : ")[1:]
        assert len(kernels) == len(source.instances)
        for code in kernels:
            assert (WAIT in code, LET_NEXT in code) == (source.early, source.early), code.partition("\n")[0]


def test_some_kernels_begin_early_and_others_do_not() -> None:
    assert {source.early for folder in FOLDERS for source in sources_of(folder)} == {True, False}
