"""Linear layers on CPUs with AVX2 or AVX-512: one compiled call whatever the shape, the same bits for any rows.

A sum is one chain in ascending order: of fused multiply-adds in float32, or, for bfloat16, of the instruction that
adds two products at a time where there is one. oneDNN (`cpu.py`) does the same work with more time for every call.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from slipstream.kernels import compiled
from slipstream.kernels.cpu_features import missing
from slipstream.kernels.matmul import narrow
from slipstream.kernels.matmul.packed import Packed
from slipstream.kernels.matmul.panel_stack import PanelStack, multiply_panels, stack_panels
from slipstream.kernels.matmul.quantized import Quantized, widened
from slipstream.kernels.matmul.reference import take_rows as take_rows

RECORDABLE = True  # all it does is calls of kernels and operations of torch (`tape.py`)
FEATURE = "fma"  # of the CPU


@functools.cache
def refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    lacks = f"this CPU has no {FEATURE}" if missing([FEATURE]) else None
    return compiled.refuses(device, dtype) or lacks


def note(device: torch.device, dtype: torch.dtype) -> str | None:
    """What a start should say of this implementation here, or None."""
    reason = narrow.refusal()
    return f"matrices of few bits are widened: {reason}" if reason else None


def pack(weight: Tensor | Quantized, bias: Tensor | None = None) -> Packed:
    in_blocks = narrow.pack(weight, bias)
    if in_blocks is not None:
        return in_blocks
    return stack_panels(widened(weight)[None], None if bias is None else bias[None])


def linear(x: Tensor, packed: Packed, out_dtype: torch.dtype | None = None) -> Tensor:
    if isinstance(packed, narrow.NarrowWeight):
        return narrow.linear(x, packed, out_dtype)
    if not isinstance(packed, PanelStack):
        raise TypeError(f"panels linear got a {type(packed).__name__}; pack the weight with panels too")
    wide = out_dtype is torch.float32 or x.dtype is torch.float32
    out = multiply_panels(x, packed, torch.float32 if wide else x.dtype)
    return out if out_dtype is None else out.to(out_dtype)
