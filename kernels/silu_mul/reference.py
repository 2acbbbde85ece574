"""Definition of `silu_mul` in plain torch: float32 inside, float64 for float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    return None


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, -1)
    return (F.silu(gate) * up).to(gate_up.dtype)
