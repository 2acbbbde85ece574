"""Every .cu through NVRTC for Blackwell: no warnings, no spills."""

from __future__ import annotations

import pytest

from tests.emulator.sources import FOLDERS, check


@pytest.mark.parametrize("arch", ["sm_100", "sm_120"])
@pytest.mark.parametrize("folder", FOLDERS)
def test_compiles_for_blackwell(folder: str, arch: str) -> None:
    check(folder, arch)
