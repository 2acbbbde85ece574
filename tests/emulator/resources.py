"""What a kernel takes of a GPU, read from the log of the assembler."""

from __future__ import annotations

import re
from typing import NamedTuple

from slipstream.kernels.cuda.nvrtc import Compiled

FUNCTION = re.compile(r"Compiling entry function '(\w+)'")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")


class Resources(NamedTuple):
    """What one thread or block of a kernel takes, as the assembler reports it."""

    registers: int  # of a thread, 32 bits each
    shared: int  # static shared memory of a block, bytes
    stack: int  # bytes of a thread
    spilled: int  # bytes of registers written to and read from memory


def resources_of(code: Compiled) -> dict[str, Resources]:
    """Per instance. Raises KeyError if the log misses one."""
    found = {}
    for part in FUNCTION.split(code.log)[1:]:  # a function's lines follow the one that names it
        if part.isidentifier():
            name = part
            continue
        used, spills, shared = USED.search(part), SPILLS.search(part), SHARED.search(part)
        if used is None or spills is None:
            continue
        stack, stored, read = (int(one) for one in spills.groups())
        found[name] = Resources(int(used[1]), int(shared[1]) if shared else 0, stack, stored + read)
    return {instance: found[symbol] for instance, symbol in code.symbols.items()}
