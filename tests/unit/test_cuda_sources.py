"""Every .cu through NVRTC for every architecture, on a machine without a GPU: no warnings, no spills, few kernels.

Hopper and Blackwell are in files of their own, so that test processes share the work.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slipstream.kernels.cuda import nvrtc
from slipstream.kernels.matmul import cuda
from tests.emulator.sources import FOLDERS, KERNELS, check, sources_of

ABOUT = (
    "kernels/*/*.cu",
    "kernels/**/*.cuh",
    "kernels/*/cuda.py",
    "kernels/*/prompt.py",
    "kernels/*/warpgroups.py",
    "kernels/cuda/*.py",
)
MOST_KERNELS = 53  # of one dtype, 49 of them on one device: compiling them is most of a first start
# Compiled with the first weight that needs them.
LATER = {*cuda.OF_INT8.values(), *cuda.PROMPTS_OF_INT8.values(), *cuda.COLUMNS.values()}
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def bare(path: Path) -> str:
    return COMMENT.sub("", path.read_text())


@pytest.mark.sampled(keep=1)
@pytest.mark.parametrize("arch", ["sm_80", "sm_89"])
@pytest.mark.parametrize("folder", FOLDERS)
def test_compiles_for_ampere_and_ada(folder: str, arch: str) -> None:
    check(folder, arch)


def test_every_architecture_is_compiled_for_somewhere() -> None:
    files = "".join(path.read_text() for path in Path(__file__).parent.glob("test_cuda_sources*.py"))
    assert all(f'"{arch}"' in files for arch in nvrtc.ARCHITECTURES)


def test_every_source_is_launched_by_somebody() -> None:
    launched = {source.path.resolve() for folder in FOLDERS for source in sources_of(folder)}
    assert launched == {path.resolve() for path in KERNELS.glob("*/*.cu")}


def test_there_are_few_kernels() -> None:
    at_start = [one for folder in FOLDERS for one in sources_of(folder) if one not in LATER]
    every = [name for one in at_start for name in one.instances]
    for other in ("bfloat16", "float16"):  # what a model of the one dtype compiles has nothing of the other
        assert 0 < sum(f"<{other}" not in name for name in every) <= MOST_KERNELS


def test_kernels_leave_ptx_and_dynamic_shared_memory_to_the_shared_headers() -> None:
    """What the emulator does not see must lie where both bodies stand side by side."""
    for path in [*KERNELS.glob("*/*.cu"), *KERNELS.glob("*/*.cuh")]:
        assert not re.search(r"\basm\b|extern\s+__shared__|SLIPSTREAM_EMULATED", bare(path)), path
    for path in (KERNELS / "cuda" / "include").glob("*.cuh"):
        text = bare(path)
        assert text.count("asm volatile") == 0 or "SLIPSTREAM_EMULATED" in text, path
