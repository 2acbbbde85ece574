"""Everything that a server on the CPU has loaded once it is ready, and what numba looks up when it first compiles.

A process that has imported this forks servers (tests/forks.py), whose engines are ready sooner; it has no thread but
its own.
"""

from __future__ import annotations

import gc
import importlib
from pathlib import Path

import numba

from slipstream.engine.core import engine
from tests.soon_ready import shortly

KERNELS = Path(__file__).parents[1] / "kernels"
NAMES = (
    "server.command.starting",
    "engine.service.start.launch",
    *(f"kernels.{one.parent.name}.{one.stem}" for one in sorted(KERNELS.glob("*/cpu.py"))),
    *(f"kernels.{one.parent.name}.{one.stem}" for one in sorted(KERNELS.glob("*/reference.py"))),
)
gc.disable()  # what is imported stays: looking for garbage among it takes a fifth of the time
for name in NAMES:
    importlib.import_module(f"slipstream.{name}")
importlib.import_module("transformers.utils.chat_parsing")
numba.njit("int64(int64)")(lambda x: x)
engine.warm_up = shortly
gc.freeze()  # forks share the memory that no look for garbage writes to
gc.enable()
