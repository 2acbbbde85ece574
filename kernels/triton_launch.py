"""What the Triton implementations of the ops have in common: where they run and how tensors reach them.

A Triton kernel is compiled again for other facts about its arguments, and another compilation may sum in another
order. So that a row's bits never depend on its neighbours, sizes of a layer are constants, counts of a pass are never
specialised on (`do_not_specialize`), and every tensor whose rows are summed starts on 16 bytes (`aligned`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from slipstream.kernels.cuda.launcher import runs_early

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Options of launches. Whether products and sums may be fused is always said: the default is not the same everywhere.
FUSED = {"enable_fp_fusion": True}
ROUNDED = {"enable_fp_fusion": False}  # every product and sum by itself, as torch does it
LEAST_CAPABILITY = (8, 0)
ALIGNMENT = 16  # bytes; what Triton asks of a pointer before it loads whole vectors


def refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a Triton kernel of ours cannot run there; None if it can."""
    return refuses_device(device) or (None if dtype in FLOATS else "float32, bfloat16 and float16 only")


def refuses_device(device: torch.device) -> str | None:
    """The same for ops that take every dtype."""
    if device.type != "cuda":
        return None
    if torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return "the device is older than compute capability 8.0"
    if not isinstance(triton.language.standard.sum, triton.JITFunction):
        return "TRITON_INTERPRET makes Triton run its kernels on the CPU"
    return None


def early(device: torch.device) -> dict[str, Any]:
    """Options of a kernel that begins with `begin`: where the device can, it is launched before the kernel before it
    has ended.
    """
    if device.type == "cuda" and runs_early(device):
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}


@triton.jit
def begin(EARLY: tl.constexpr):
    """Let the next kernel begin, and wait for the end of all before this one: nothing may be read or written sooner."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def span_of(starts_at, n_spans, row, SPANS: tl.constexpr):
    """Number of the span that owns a row, n_spans or more if none does; spans may be empty."""
    before = 0
    for first in range(0, n_spans, SPANS):
        i = first + tl.arange(0, SPANS)
        ends = tl.load(starts_at + 1 + i, mask=i < n_spans, other=2147483647)  # [SPANS]
        before += tl.sum((ends <= row).to(tl.int32), 0)
    return before


def aligned(x: Tensor) -> Tensor:
    """x, or a copy where it is not contiguous or does not start on 16 bytes, as odd rows of odd widths do."""
    x = x.contiguous()
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


def power_of_two(n: int) -> int:
    """The least power of two that is not less than n, which must be positive: Triton's tiles have such sizes."""
    return 1 << (n - 1).bit_length()


def tiles(n: int, size: int) -> int:
    """How many tiles of `size` cover n."""
    return -(-n // size)
