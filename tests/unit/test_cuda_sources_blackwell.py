"""Every .cu through NVRTC for Blackwell: no warnings, no spills."""

from __future__ import annotations

import pytest

from tests.emulator.sources import FOLDERS, check

ABOUT = (
    "kernels/*/*.cu",
    "kernels/**/*.cuh",
    "kernels/*/cuda.py",
    "kernels/*/prompt.py",
    "kernels/*/warpgroups.py",
    "kernels/cuda/*.py",
)
# Begins with another folder than the files beside it, so that a sample of one case of each compiles different sources.
TURNED = FOLDERS[1:] + FOLDERS[:1]


@pytest.mark.sampled(keep=1)
@pytest.mark.parametrize("arch", ["sm_100", "sm_120"])
@pytest.mark.parametrize("folder", TURNED)
def test_compiles_for_blackwell(folder: str, arch: str) -> None:
    check(folder, arch)
