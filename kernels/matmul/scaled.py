"""Codes with scales in float32 (AWQ, GPTQ, fp8, int8) as blocks of types in `formats.py`: which one, and the scales."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels.matmul.blocks import BlockWeight
from slipstream.kernels.matmul.formats import FORMATS, FP8, INT4, INT8, PANEL, BlockFormat
from slipstream.kernels.matmul.quantized import ByteWeight, Int4Weight, Quantized, is_proven


def kind_of(weight: Tensor | Quantized) -> str | None:
    """The type of records that hold the weight, a key of `LAYOUTS`; None if no type does."""
    if isinstance(weight, BlockWeight):
        return weight.kind if weight.kind in FORMATS and is_proven(weight.kind) else None
    if not isinstance(weight, Int4Weight | ByteWeight):
        return None
    if isinstance(weight, ByteWeight) and weight.codes.dtype is torch.int8 and not is_proven("int8"):
        return None
    # As many inputs as possible, none of which has two scales.
    n_in, n_scaled = weight.shape[1], _inputs_of_a_scale(weight)
    sizes = INT4 if isinstance(weight, Int4Weight) else INT8 if weight.codes.dtype is torch.int8 else FP8
    return next((kind for n, kind in sizes.items() if n_in % n == n_scaled % n == 0), None)


def _inputs_of_a_scale(weight: Int4Weight | ByteWeight) -> int:
    n_in = weight.shape[1]
    return n_in // weight.scales.shape[1] if isinstance(weight, Int4Weight) else min(n_in, weight.block[1])


def put_scales(weight: Int4Weight | ByteWeight, laid: Tensor, form: BlockFormat) -> None:
    """Write scales and zeros into records, [n_panels, n_blocks, record_bytes] uint8."""
    n_blocks, repeats = laid.shape[1], _inputs_of_a_scale(weight) // form.block
    scales = (
        weight.by_output().scales if isinstance(weight, ByteWeight) else weight.scales
    )  # [n_out, n_scales]
    _put(scales.repeat_interleave(repeats, 1)[:, :n_blocks], laid[..., : form.second].view(scales.dtype))
    if isinstance(weight, Int4Weight):
        _put(weight.zeros.repeat_interleave(repeats, 1), laid[..., form.second_factors : form.codes])


def _put(values: Tensor, place: Tensor) -> None:
    """values: [n_out, n_blocks]; place: [n_panels, n_blocks, 64]."""
    padded = F.pad(values, (0, 0, 0, -len(values) % PANEL))
    place.copy_(padded.view(-1, PANEL, values.shape[1]).transpose(1, 2))
