"""What a .cu file is to Python: its path, the kernels that are made of it, and what its machine code depends on."""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path
from typing import Any

from torch import Tensor

INCLUDE = Path(__file__).parent / "include"
KERNELS = Path(__file__).parents[1]
INCLUDED = re.compile(rb'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)

Argument = Tensor | int | float | None
Grid = tuple[int, int, int]


class Source:
    """A .cu file beside the module that launches it.

    beside: `__file__` of that module. instances: name expressions of the kernels, such as "rows<__nv_bfloat16, 8>";
    nothing else of the file can be launched. fuse: whether the compiler may turn a * b + c into one rounding; False
    where the bits are part of the meaning. early: whether its kernels wait by themselves for the kernel before them
    (`wait_for_earlier` in device.cuh), so that they may begin before it has ended.
    """

    def __init__(
        self, beside: str, name: str, instances: tuple[str, ...], *, fuse: bool = True, early: bool = False
    ) -> None:
        self.path = Path(beside).parent / name
        self.instances = instances
        self.fuse = fuse
        self.early = early
        self.loaded: dict[tuple[str, int], Any] = {}  # kernels by instance and device, filled by the launcher
        if len(set(instances)) != len(instances):
            raise ValueError(f"{name} names an instance twice")

    def __repr__(self) -> str:
        return f"{self.path.parent.name}/{self.path.name}"

    @property
    def folders(self) -> tuple[Path, ...]:
        """Where `#include "..."` looks, in this order."""
        return self.path.parent, INCLUDE, KERNELS

    @functools.cached_property
    def files(self) -> tuple[Path, ...]:
        """The file and every header of ours that it includes, directly or not. Raises FileNotFoundError."""
        found: dict[Path, None] = {}
        waiting = [self.path]
        while waiting:
            path = waiting.pop()
            if path in found:
                continue
            found[path] = None
            waiting += [self._header(name.decode(), path) for name in INCLUDED.findall(path.read_bytes())]
        return tuple(found)

    @functools.cached_property
    def digest(self) -> str:
        """Changes with any of the files, the instances and the options."""
        digest = hashlib.sha256(repr((self.instances, self.fuse)).encode())
        for path in sorted(self.files):
            digest.update(path.read_bytes())
        return digest.hexdigest()

    def _header(self, name: str, of: Path) -> Path:
        for folder in (of.parent, *self.folders):
            if (folder / name).is_file():
                return (folder / name).resolve()
        raise FileNotFoundError(f"{of} includes {name!r}, which is nowhere")
