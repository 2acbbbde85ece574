"""What instructions the CPU kernels may use: those of this CPU, or of the one that numba is asked to compile for.

NUMBA_CPU_NAME and NUMBA_CPU_FEATURES ask for another CPU, as one without AVX-512 where there is one that has it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import llvmlite.binding
from numba import config


@functools.cache
def features() -> frozenset[str]:
    """LLVM's names, as "avx512bf16"."""
    if config.CPU_FEATURES is not None:
        named = (one.strip() for one in config.CPU_FEATURES.split(","))
        return frozenset(one[1:] for one in named if one.startswith("+"))
    return frozenset(name for name, there in llvmlite.binding.get_host_cpu_features().items() if there)


def missing(names: Sequence[str]) -> list[str]:
    """Those that are not there."""
    return [name for name in names if name not in features()]
