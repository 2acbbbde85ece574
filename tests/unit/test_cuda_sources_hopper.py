"""Every .cu through NVRTC for Hopper: no warnings, no spills."""

from __future__ import annotations

import pytest

from tests.emulator.sources import FOLDERS, check


@pytest.mark.parametrize("arch", ["sm_90", "sm_90a"])
@pytest.mark.parametrize("folder", FOLDERS)
def test_compiles_for_hopper(folder: str, arch: str) -> None:
    check(folder, arch)
