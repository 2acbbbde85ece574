"""Every .cu of the project: found through the modules that launch it, compiled for every architecture.

python -m tests.emulator.sources  # a Markdown table of registers, shared memory and spills
"""

from __future__ import annotations

import functools
import sys
import tempfile
from pathlib import Path

from slipstream import kernels
from slipstream.kernels.cuda import ahead, nvrtc
from slipstream.kernels.cuda.source import Source
from tests.emulator.resources import Resources, resources_of

KERNELS = Path(kernels.__file__).parent
SPILLS: dict[str, int] = {}  # instance -> bytes that are known and meant
FOLDERS = tuple(path.parent.name for path in sorted(KERNELS.glob("*/cuda.py")))


def sources_of(folder: str) -> list[Source]:
    """Those that an op launches."""
    return [source for source in ahead.sources() if source.path.parent.name == folder]


@functools.cache
def compiled(source: Source, arch: str) -> nvrtc.Compiled:
    """As users compile it; kept in the temp folder by content, since tests run often."""
    return nvrtc.compiled(source, arch, Path(tempfile.gettempdir()) / f"slipstream-cubins-{Path.home().name}")


def check(folder: str, arch: str) -> None:
    """Compile a folder's sources. Raises AssertionError on warnings, spills, or what not every launch may have."""
    for source in sources_of(folder):
        code = compiled(source, arch)
        assert code.cubin.startswith(b"\x7fELF")
        assert "warning" not in code.log.lower(), code.log
        assert code.symbols.keys() == set(source.instances)
        for instance, one in resources_of(code).items():
            name = f"{instance} on {arch}: {one}"
            assert 0 < one.registers <= 255, name
            assert one.shared <= 48 * 1024, name
            assert one.spilled == SPILLS.get(instance, 0), name


def table() -> list[str]:
    """One line per kernel: registers, static shared memory and spilled bytes on each architecture."""
    lines = [f"| kernel | {' | '.join(nvrtc.ARCHITECTURES)} |", "|---" * (1 + len(nvrtc.ARCHITECTURES)) + "|"]
    for folder in FOLDERS:
        for source in sources_of(folder):
            resources = [resources_of(compiled(source, arch)) for arch in nvrtc.ARCHITECTURES]
            for instance in source.instances:
                cells = [_cell(one[instance]) for one in resources]
                lines.append(f"| {source!r} `{instance}` | {' | '.join(cells)} |")
    return lines


def _cell(one: Resources) -> str:
    shared = f" + {one.shared} B" if one.shared else ""
    spilled = f", spills {one.spilled} B" if one.spilled else ""
    return f"{one.registers}{shared}{spilled}"


def page() -> str:
    """The table with a heading."""
    major, minor = nvrtc.version()
    lines = [
        "# Registers of a thread, static shared memory of a block",
        "",
        f"What NVRTC {major}.{minor} makes of every kernel; where no spilled bytes are named there are none.",
        "Written by `make docs`.",
        "",
        *table(),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
