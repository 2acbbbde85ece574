"""How checkpoints of safetensors store matrices with a byte for each value: fp8 and int8."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.engine.checkpoint.pieces import META, SCALES, WORDS, Pieces, check_shape, count_groups
from slipstream.engine.errors import LoadError, UnsupportedModel
from slipstream.kernels.matmul.quantized import ByteWeight

FP8, INT8 = ("F8_E4M3",), ("I8",)  # of safetensors


@dataclass(frozen=True, slots=True)
class Fp8:
    """`weight` [out, in] float8_e4m3fn and what it is multiplied by, `weight_scale` or `weight_scale_inv`.

    A scale of the inputs stored beside it (`input_scale`, `activation_scale`) is not used: inputs are not rounded.
    """

    # Outputs and inputs that share a scale; None: all inputs, of all outputs or of a single output.
    block: tuple[int, int] | None
    codes, output_dim = "weight", 0

    def shape(self, stored: Sequence[int]) -> tuple[int, int]:
        return stored[0], stored[1]

    def read(self, pieces: Pieces, shape: tuple[int, int], dtype: torch.dtype) -> ByteWeight:
        n_out, n_in = shape
        piece = "weight_scale_inv" if "weight_scale_inv" in pieces else "weight_scale"
        if self.block is not None:
            _refuse_cut_blocks(pieces, shape, self.block)
        expected = self._scales_shape(pieces.shape(piece), n_out, n_in)
        scales = pieces.take(piece, expected, SCALES).to(torch.float32)
        block = self.block
        if block is None:
            block = _of_all_inputs(pieces, piece, scales, shape)
            scales = scales.reshape(-1, 1)
        for of_inputs in ("input_scale", "activation_scale"):
            if of_inputs in pieces:
                pieces.take(of_inputs, None, SCALES)
        codes = pieces.take("weight", shape, FP8)
        if bool((codes.view(torch.uint8) & 127 == 127).any()):
            raise LoadError(f"{pieces.where}: holds values that are not finite; the file is damaged")
        return ByteWeight(codes, scales, block, dtype)

    def _scales_shape(self, stored: Sequence[int], n_out: int, n_in: int) -> list[int] | None:
        """Of the scales; None: as they are stored. stored: their shape in the files."""
        if self.block is not None:
            return [-(-n_out // self.block[0]), -(-n_in // self.block[1])]
        return [n_out, *stored[1:]] if stored and stored[0] % n_out == 0 else None

    def outline(self, shape: tuple[int, int], dtype: torch.dtype) -> ByteWeight:
        n_out, n_in = shape
        block = self.block or (1, n_in)  # per output, which is not less than what is stored
        scales = torch.empty(-(-n_out // block[0]), -(-n_in // block[1]), device=META)
        return ByteWeight(torch.empty(shape, dtype=torch.float8_e4m3fn, device=META), scales, block, dtype)


@dataclass(frozen=True, slots=True)
class Int8:
    """`weight` [out, in] int8 and `weight_scale`, a single one or [out, 1], of compressed-tensors."""

    codes, output_dim = "weight", 0

    def shape(self, stored: Sequence[int]) -> tuple[int, int]:
        return stored[0], stored[1]

    def read(self, pieces: Pieces, shape: tuple[int, int], dtype: torch.dtype) -> ByteWeight:
        stored = pieces.shape("weight_scale")
        expected = [shape[0], *stored[1:]] if stored and stored[0] != 1 else None
        scales = pieces.take("weight_scale", expected, SCALES).to(torch.float32)
        block = _of_all_inputs(pieces, "weight_scale", scales, shape)
        return ByteWeight(pieces.take("weight", shape, INT8), scales.reshape(-1, 1), block, dtype)

    def outline(self, shape: tuple[int, int], dtype: torch.dtype) -> ByteWeight:
        codes = torch.empty(shape, dtype=torch.int8, device=META)
        return ByteWeight(codes, torch.empty(shape[0], 1, device=META), (1, shape[1]), dtype)


@dataclass(frozen=True, slots=True)
class PackedInt8:
    """`weight_packed` [out, in / 4], `weight_scale` [out, groups], `weight_shape` [2] of compressed-tensors.

    A word has four inputs, the first in the lowest byte, each 128 above its number.
    """

    n_group: int | None  # inputs that share a scale; None: all
    codes, output_dim = "weight_packed", 0

    def shape(self, stored: Sequence[int]) -> tuple[int, int]:
        return stored[0], 4 * stored[1]

    def read(self, pieces: Pieces, shape: tuple[int, int], dtype: torch.dtype) -> ByteWeight:
        n_out, n_in = shape
        n_groups = count_groups(pieces, n_in, self.n_group)
        if n_in % 4:
            raise UnsupportedModel(f"{pieces.where}: 8-bit codes of {n_in} inputs, must be a multiple of 4")
        check_shape(pieces, shape, self.shape(pieces.shape("weight_packed")))
        words = pieces.take("weight_packed", [n_out, n_in // 4], WORDS)
        scales = pieces.take("weight_scale", [n_out, n_groups], SCALES).to(torch.float32)
        codes = (words.view(torch.uint8) ^ 128).view(torch.int8)  # [n_out, n_in]
        return ByteWeight(codes, scales, (1, n_in // n_groups), dtype)

    def outline(self, shape: tuple[int, int], dtype: torch.dtype) -> ByteWeight:
        n_group = self.n_group or shape[1]
        scales = torch.empty(shape[0], -(-shape[1] // n_group), device=META)
        return ByteWeight(torch.empty(shape, dtype=torch.int8, device=META), scales, (1, n_group), dtype)


def _of_all_inputs(pieces: Pieces, piece: str, scales: Tensor, shape: tuple[int, int]) -> tuple[int, int]:
    """Outputs and inputs that share one of the scales of a matrix of that shape. Raises `LoadError`."""
    n_out, n_in = shape
    if scales.numel() not in (1, n_out):
        raise LoadError(
            f"{pieces.where}: {piece} has shape {list(scales.shape)}, must be one scale or one per output"
        )
    return n_out // scales.numel(), n_in


def _refuse_cut_blocks(pieces: Pieces, shape: tuple[int, int], block: tuple[int, int]) -> None:
    """Raise `UnsupportedModel` if a part of that shape has scales of blocks that other parts begin or end within."""
    for stored, n, size in zip(pieces.shape("weight"), shape, block, strict=True):
        if stored != n and n % size and size % n:
            raise UnsupportedModel(
                f"{pieces.where}: parts of {n} (--tensor-parallel-size) do not begin where blocks of {size} do"
            )
