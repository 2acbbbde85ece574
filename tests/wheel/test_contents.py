"""What the wheel holds. Built with the setuptools at hand, so that no network is needed."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tests.wheel.contents import build, faults


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"), "--no-build-isolation", "--no-index")


def test_it_holds_the_four_folders_below_one_name(wheel: Path) -> None:
    assert faults(wheel) == []


def test_kernels_in_cuda_and_the_page_are_among_its_files(wheel: Path) -> None:
    kinds = {Path(name).suffix for name in zipfile.ZipFile(wheel).namelist()}
    assert {".py", ".cu", ".cuh", ".html", ".js", ".css", ".svg"} <= kinds


def test_what_is_wrong_with_a_wheel_is_named(wheel: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed.whl"
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(changed, "w") as other:
        for name in whole.namelist():
            if name != "slipstream/webui/index.html":
                other.writestr(name, whole.read(name))
        other.writestr("kernels/__init__.py", "")
    assert faults(changed) == ["lacks slipstream/webui/index.html", "should not have kernels/__init__.py"]
