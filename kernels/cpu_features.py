"""What instructions the CPU kernels may use: those of this CPU, or of the one that numba is asked to compile for.

NUMBA_CPU_NAME and NUMBA_CPU_FEATURES ask for another CPU, as one without AVX-512 where there is one that has it. AMX is
among them if Linux grants it: a process has to ask before it may touch a tile.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import llvmlite.binding
from numba import config

TILES = frozenset(("amx-tile", "amx-bf16", "amx-int8"))
# Of Linux on x86-64: the call, ARCH_REQ_XCOMP_PERM and XFEATURE_XTILEDATA.
_ARCH_PRCTL, _ASK_FOR, _TILE_DATA = 158, 0x1023, 18


@functools.cache
def features() -> frozenset[str]:
    """LLVM's names, as "avx512bf16"."""
    if config.CPU_FEATURES is not None:
        named = (one.strip() for one in config.CPU_FEATURES.split(","))
        found = frozenset(one[1:] for one in named if one.startswith("+"))
    else:
        found = frozenset(name for name, there in llvmlite.binding.get_host_cpu_features().items() if there)
    return found if found >= TILES and _tiles_are_granted() else found - TILES


def _tiles_are_granted() -> bool:
    """Whether threads of this process may use AMX. Refused where a container filters the call, or Linux is too old."""
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ASK_FOR, _TILE_DATA) == 0


def is_amd() -> bool:
    """Whether this is one of AMD's CPUs since Zen."""
    return str(config.CPU_NAME or llvmlite.binding.get_host_cpu_name()).startswith("znver")


def missing(names: Sequence[str]) -> list[str]:
    """Those that are not there."""
    return [name for name in names if name not in features()]
