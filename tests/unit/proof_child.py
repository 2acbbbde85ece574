"""A process for proofs in which faults are planted: `-m tests.unit.proof_child FAULT THREADS FD`.

The faults are in the CPU's `gated_mul`, of the operator `gated`, or in its products with weights in blocks.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from slipstream.kernels.dispatch import CannotRunError
from slipstream.kernels.gated import cpu
from slipstream.kernels.gated.activation import Activation
from slipstream.kernels.matmul import panels
from slipstream.kernels.matmul.narrow import NarrowWeight
from slipstream.kernels.proof import child

right, right_linear = cpu.gated_mul, panels.linear


def raises(_: Tensor, __: Activation) -> Tensor:
    raise ValueError("a fault that was put in")


def has_no_memory(_: Tensor, __: Activation) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def loses_the_device(_: Tensor, __: Activation) -> Tensor:
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


def gives_nan(x: Tensor, activation: Activation) -> Tensor:
    out = right(x, activation)
    out[-1, 0] = torch.nan
    return out


def is_imprecise(x: Tensor, activation: Activation) -> Tensor:
    return right(x, activation) * 1.02


def has_other_bits_at_width_3(x: Tensor, activation: Activation) -> Tensor:
    out = right(x, activation)
    return torch.nextafter(out, out + 1) if len(x) == 3 else out


def ends_the_process(_: Tensor, __: Activation) -> Tensor:
    os.abort()


def hangs(_: Tensor, __: Activation) -> Tensor:
    time.sleep(600)
    raise TimeoutError


def does_not_compile(_: torch.device, __: torch.dtype) -> NoReturn:
    raise CannotRunError("kernels/gated/gated.cu: does not compile")


def scales_blocks_wrongly(x: Tensor, packed: Any, out_dtype: torch.dtype | None = None) -> Tensor:
    out = right_linear(x, packed, out_dtype)
    return out * 1.02 if isinstance(packed, NarrowWeight) else out


FAULTS: dict[str, Callable[[Tensor, Activation], Tensor]] = {
    one.__name__: one
    for one in (
        *(raises, has_no_memory, loses_the_device, gives_nan, is_imprecise, has_other_bits_at_width_3),
        *(ends_the_process, hangs),
    )
}


def plant(fault: str) -> None:
    if fault == does_not_compile.__name__:
        cpu.prepare = does_not_compile  # type: ignore[attr-defined]
    elif fault == scales_blocks_wrongly.__name__:
        panels.linear = scales_blocks_wrongly
    else:
        cpu.gated_mul = FAULTS[fault]  # type: ignore[assignment]


if __name__ == "__main__":
    plant(sys.argv[1])
    child.main(*sys.argv[2:])
