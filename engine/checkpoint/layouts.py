"""Layouts of quantised checkpoints: from the tensors that stand for one matrix to the weight that the products take.

A layout says how its tensors are named and in which order they hold codes of few bits; it depends on no network. All
are read into the two kinds of `kernels/matmul/quantized.py`; what no product takes narrow is widened. Sources: the
files of AutoAWQ (version gemm), AutoGPTQ and GPTQModel, compressed-tensors, gpt-oss, transformers' block-wise fp8.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, overload

import torch
from torch import Tensor

from slipstream.engine.checkpoint.pieces import (
    META,
    SCALES,
    WORDS,
    Pieces,
    check_shape,
    count_groups,
    count_words,
    in_pairs,
    interleaved,
    nibbles,
    read_order,
    reordered,
)
from slipstream.engine.errors import LoadError, UnsupportedModel
from slipstream.kernels.matmul.blocks import BlockWeight, block_sizes
from slipstream.kernels.matmul.formats import FORMATS, FP8
from slipstream.kernels.matmul.quantized import ByteWeight, Int4Weight, JoinedWeight, Quantized, is_proven
from slipstream.kernels.matmul.scaled import kind_of

# What layouts call the tensors of the matrix `name.weight` besides itself: `name.scales` and so on.
# Every narrow matrix has one of the marks.
MARKS = ("qweight", "weight_packed", "weight_scale_inv", "weight_scale")
PIECES = (
    *MARKS,
    "qzeros",
    "scales",
    "g_idx",
    "weight_shape",
    "weight_zero_point",
    "weight_g_idx",
    "input_scale",
    "activation_scale",
)

# Values of four-bit floats (e2m1) by code (OCP Microscaling Formats 1.0, 5.3.3); eight more are the same below zero.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BYTES = ("U8",)
MXFP4_ROWS = 4096  # outputs widened at a time


class Outlined(Protocol):
    """A kind of matrix that can be drawn without reading it."""

    def outline(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor | Quantized:
        """A matrix [out_features, in_features] on the meta device, without memory; it has no order of inputs."""


class Layout(Outlined, Protocol):
    """How the matrices of one kind are stored."""

    @property
    def codes(self) -> str:
        """The piece with the codes."""

    @property
    def output_dim(self) -> int:
        """The dimension of codes and scales in which outputs follow each other."""

    def shape(self, stored: Sequence[int]) -> tuple[int, int]:
        """(out_features, in_features) of a matrix whose codes have that shape."""

    def read(
        self, pieces: Pieces, shape: tuple[int, int], dtype: torch.dtype
    ) -> Tensor | Int4Weight | ByteWeight | BlockWeight:
        """The matrix [out_features, in_features], its values in `dtype`. Raises `LoadError` or `UnsupportedModel`."""


@dataclass(frozen=True, slots=True)
class Group:
    """Matrices that a config says are stored in one layout."""

    layout: Layout
    targets: Sequence[str] | None = None  # patterns of their names; None: all that are not left alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How a checkpoint's config says its matrices are stored."""

    method: str
    groups: Sequence[Group] = ()
    by_name: Mapping[str, Blocks] = field(default_factory=dict)  # of matrices that are listed one by one
    ignored: Sequence[str] = ()  # patterns of what is stored as it is
    activations: str | None = None  # what else its makers meant to be rounded, which is not done here

    @property
    def rare_types(self) -> frozenset[str]:
        """Types that few models have, so that products prove themselves on them where one does: GGUF's, and int8."""
        drawn = self._drawn()
        blocks = {one.kind for one in drawn if isinstance(one, BlockWeight) and one.kind in FORMATS}
        has_int8 = any(isinstance(one, ByteWeight) and one.codes.dtype is torch.int8 for one in drawn)
        return frozenset({*blocks, *(["int8"] if has_int8 else [])})

    @property
    def has_integers(self) -> bool:
        """Whether codes of any matrix stand for whole numbers, and are multiplied as such on CPUs: not fp8's."""
        kinds = {kind_of(one) for one in self._drawn()}
        return bool(kinds - {None, *FP8.values()})

    def _drawn(self) -> list[Tensor | Quantized]:
        """A matrix of each layout, without memory."""
        layouts = [*{*self.by_name.values()}, *(group.layout for group in self.groups)]
        return [one.outline((256, 256), torch.bfloat16) for one in layouts]

    def layout(self, name: str) -> Outlined | None:
        """The layout that the config promises for the linear layer `name`, None if it is stored as it is."""
        if name in self.by_name:
            return self.by_name[name]
        if any(named(name, pattern) for pattern in self.ignored):
            return None
        for group in self.groups:
            if group.targets is None or any(named(name, pattern) for pattern in group.targets):
                return group.layout
        return None

    def layout_of(self, pieces: Pieces) -> Layout:
        """The layout that these tensors are in, whatever the config promises. Raises `UnsupportedModel`."""
        found = [group.layout for group in self.groups if group.layout.codes in pieces]
        if not found:
            raise UnsupportedModel(
                f"{pieces.where}: is stored as {', '.join(sorted(pieces.names))},"
                f" which is not how {self.method} stores a matrix"
            )
        return found[0]


def named(name: str, pattern: str) -> bool:
    """Whether a pattern of a config means the layer `name`: a regular expression after `re:`, or parts of its path."""
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), name) is not None
    return f".{pattern}." in f".{name}."


@dataclass(frozen=True, slots=True)
class Blocks:
    """A block type of GGUF."""

    kind: str

    def outline(self, shape: tuple[int, int], dtype: torch.dtype) -> BlockWeight:
        n_values, n_bytes = block_sizes(self.kind)
        data = torch.empty(shape[0], shape[1] // n_values * n_bytes, dtype=torch.uint8, device=META)
        return BlockWeight(data, self.kind, None, dtype)


@dataclass(frozen=True, slots=True)
class Int4:
    """What the layouts of four-bit codes have in common."""

    n_group: int | None  # inputs that share scale and zero; None: all

    def outline(self, shape: tuple[int, int], dtype: torch.dtype) -> Int4Weight:
        n_out, n_in = shape
        n_groups = math.ceil(n_in / (self.n_group or n_in))
        codes = torch.empty(n_out, n_in // 2, dtype=torch.uint8, device=META)
        scales = torch.empty(n_out, n_groups, device=META)
        return Int4Weight(codes, scales, torch.empty_like(scales, dtype=torch.uint8), None, dtype)


@dataclass(frozen=True, slots=True)
class Awq(Int4):
    """`qweight` [in, out / 8], `qzeros` [groups, out / 8], `scales` [groups, out]. A word has eight outputs."""

    codes, output_dim = "qweight", 1

    def shape(self, stored: Sequence[int]) -> tuple[int, int]:
        return 8 * stored[1], stored[0]

    def read(self, pieces: Pieces, shape: tuple[int, int], dtype: torch.dtype) -> Int4Weight:
        n_out, n_in = shape
        n_groups, n_words = count_groups(pieces, n_in, self.n_group), count_words(pieces, n_out)
        codes = interleaved(pieces.take("qweight", [n_in, n_words], WORDS))  # [n_in, n_out]
        zeros = interleaved(pieces.take("qzeros", [n_groups, n_words], WORDS))  # [n_groups, n_out]
        scales = pieces.take("scales", [n_groups, n_out], SCALES).to(torch.float32)
        return Int4Weight(in_pairs(codes.t()), scales.t().contiguous(), zeros.t().contiguous(), None, dtype)


@dataclass(frozen=True, slots=True)
class Gptq(Int4):
    """`qweight` [in / 8, out], `qzeros` [groups, out / 8], `scales` [groups, out], `g_idx` [in]: each input's group."""

    shuffled: bool  # groups are not runs of neighbours, so `g_idx` must be there
    zero_shift: int  # what is to be added to a stored zero: 1 in the first version of the format
    codes, output_dim = "qweight", 1

    def shape(self, stored: Sequence[int]) -> tuple[int, int]:
        return stored[1], 8 * stored[0]

    def read(self, pieces: Pieces, shape: tuple[int, int], dtype: torch.dtype) -> Int4Weight:
        n_out, n_in = shape
        n_groups = count_groups(pieces, n_in, self.n_group)
        words = pieces.take("qweight", [count_words(pieces, n_in), n_out], WORDS)
        codes = words.t().contiguous().view(torch.uint8)  # [n_out, n_in / 2]
        stored = nibbles(pieces.take("qzeros", [n_groups, count_words(pieces, n_out)], WORDS))
        zeros = (stored + self.zero_shift) & 15  # [n_groups, n_out]; a zero of 0 was stored as 15
        scales = pieces.take("scales", [n_groups, n_out], SCALES).to(torch.float32)
        order = read_order(pieces, "g_idx", n_in, n_groups) if self.shuffled or "g_idx" in pieces else None
        return Int4Weight(
            reordered(codes, order), scales.t().contiguous(), zeros.t().contiguous(), order, dtype
        )


@dataclass(frozen=True, slots=True)
class PackedInt4(Int4):
    """`weight_packed` [out, in / 8], `weight_scale` [out, groups], `weight_shape` [2] of compressed-tensors.

    Where zeros differ also `weight_zero_point` [out / 8, groups], where inputs are shuffled `weight_g_idx` [in].
    """

    symmetric: bool  # every zero is 8
    codes, output_dim = "weight_packed", 0

    def shape(self, stored: Sequence[int]) -> tuple[int, int]:
        return stored[0], 8 * stored[1]

    def read(self, pieces: Pieces, shape: tuple[int, int], dtype: torch.dtype) -> Int4Weight:
        n_out, n_in = shape
        n_groups = count_groups(pieces, n_in, self.n_group)
        check_shape(pieces, shape, self.shape(pieces.shape("weight_packed")))
        codes = pieces.take("weight_packed", [n_out, count_words(pieces, n_in)], WORDS).view(torch.uint8)
        scales = pieces.take("weight_scale", [n_out, n_groups], SCALES).to(torch.float32)
        if self.symmetric:
            zeros = torch.full_like(scales, 8, dtype=torch.uint8)  # [n_out, n_groups]
        else:
            words = pieces.take("weight_zero_point", [count_words(pieces, n_out), n_groups], WORDS)
            zeros = nibbles(words.t()).t().contiguous()
        shuffled = "weight_g_idx" in pieces
        order = read_order(pieces, "weight_g_idx", n_in, n_groups) if shuffled else None
        return Int4Weight(reordered(codes, order), scales, zeros, order, dtype)


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """`blocks` [..., out, in / 32, 16] of codes, `scales` [..., out, in / 32] of exponents, all of eight bits.

    Several matrices, as those of experts, come one below the other. On CPUs they become blocks of GGUF's type of that
    name, in which other inputs share a byte; no other product reads these codes, so there they are widened.
    """

    codes, output_dim = "blocks", -2

    def shape(self, stored: Sequence[int]) -> tuple[int, int]:
        return math.prod(stored[:-2]), 32 * stored[-2]

    def read(self, pieces: Pieces, shape: tuple[int, int], dtype: torch.dtype) -> Tensor | BlockWeight:
        n_out, n_in = shape
        within = math.prod(pieces.shape("blocks")[:-3])  # matrices below each other, in whole
        sizes = [*pieces.shape("blocks")[:-3], n_out // within, n_in // 32]
        wanted = {"blocks": [*sizes, 16], "scales": sizes} if pieces.is_part else {}
        blocks, scales = (pieces.take(piece, wanted.get(piece), BYTES) for piece in ("blocks", "scales"))
        if blocks.shape != (*scales.shape, 16) or (scales[..., 0].numel(), 32 * scales.shape[-1]) != shape:
            raise LoadError(
                f"{pieces.where}: blocks {list(blocks.shape)} with scales {list(scales.shape)},"
                f" the config asks for {n_out} outputs of {n_in} inputs"
            )
        if bool((scales == 255).any()):
            raise LoadError(f"{pieces.where}: holds values that are not finite; the file is damaged")
        codes, exponents = blocks.view(n_out, n_in // 2), scales.view(n_out, n_in // 32)
        if blocks.device.type == "cpu":
            return BlockWeight(mxfp4_blocks(codes, exponents), "MXFP4", None, dtype)
        matrix = torch.empty(shape, dtype=dtype, device=blocks.device)
        for first in range(0, n_out, MXFP4_ROWS):  # not at once: on the way a value takes eight bytes
            rows = slice(first, first + MXFP4_ROWS)
            matrix[rows] = mxfp4_values(codes[rows], exponents[rows])
        return matrix

    def outline(self, shape: tuple[int, int], dtype: torch.dtype) -> BlockWeight:
        return Blocks("MXFP4").outline(shape, dtype)


def mxfp4_blocks(codes: Tensor, exponents: Tensor) -> Tensor:
    """[n_rows, n / 2] uint8, inputs 2 i and 2 i + 1 in a byte, [n_rows, n / 32] uint8 -> [n_rows, n / 32 * 17] uint8.

    A block of GGUF's is its exponent, then bytes with inputs i and i + 16.
    """
    n_rows, n_blocks = exponents.shape
    laid = torch.empty((n_rows, n_blocks, 17), dtype=torch.uint8)
    laid[..., 0] = exponents
    for first in range(0, n_rows, MXFP4_ROWS):
        rows = slice(first, first + MXFP4_ROWS)
        some = codes[rows].view(-1, n_blocks, 16)
        apart = torch.stack((some & 15, some >> 4), 3).view(-1, n_blocks, 2, 16)
        laid[rows, :, 1:] = apart[:, :, 0] | apart[:, :, 1] << 4
    return laid.view(n_rows, 17 * n_blocks)


def largest(matrix: Tensor | Quantized) -> float:
    """What no value of a matrix that was just read is above: by its scales, as no code is larger than 448."""
    if isinstance(matrix, BlockWeight):  # MXFP4
        exponents = matrix.data[:, ::17]  # [n_out, n_blocks]
        return 6 * 2.0 ** (int(exponents.max()) - 127)
    return math.inf if isinstance(matrix, Tensor | JoinedWeight) else 448 * float(matrix.scales.abs().max())


def mxfp4_values(codes: Tensor, exponents: Tensor) -> Tensor:
    """[n_rows, n / 2] uint8, the first of two in the low four bits, [n_rows, n / 32] uint8 -> [n_rows, n] float32."""
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], device=codes.device)  # [16]
    pairs = torch.stack((codes & 15, codes >> 4), 2)  # [n_rows, n / 2, 2]
    factors = exponents.view(torch.float8_e8m0fnu).to(torch.float32)  # [n_rows, n / 32]
    return (table[pairs.int()].view(*factors.shape, 32) * factors[:, :, None]).flatten(1)


def find_narrow(names: Collection[str]) -> dict[str, dict[str, str]]:
    """Matrix -> {what follows its layer's name: stored name}, for the matrices that several tensors stand for."""
    marks = tuple(f".{mark}" for mark in MARKS)
    layers = {name.rpartition(".")[0] for name in names if name.endswith(marks)}
    found: dict[str, dict[str, str]] = {f"{layer}.weight": {} for layer in layers}
    for name in names:
        layer, _, piece = name.rpartition(".")
        if layer in layers and piece in (*PIECES, "weight"):
            found[f"{layer}.weight"][piece] = name
        if name.endswith("_blocks"):
            scales = f"{name.removesuffix('_blocks')}_scales"
            pieces = {"blocks": name, "scales": scales}
            found[f"{name.removesuffix('_blocks')}.weight"] = {
                piece: stored for piece, stored in pieces.items() if stored in names
            }
    return found


def packed_bytes(matrix: Tensor | Quantized, device: torch.device) -> int:
    """Bytes of device memory that it takes once packed."""
    if device.type == "cpu" and not isinstance(matrix, Tensor):
        from slipstream.kernels.matmul import narrow  # a second of numba, for weights of few bits alone

        return narrow.packed_bytes(matrix)
    if isinstance(matrix, JoinedWeight):
        return sum(packed_bytes(part, device) for part in matrix.parts)
    if isinstance(matrix, BlockWeight) and stays_narrow(matrix, device):
        from slipstream.kernels.matmul.block_numbers import held_bytes

        return held_bytes(matrix)
    is_wide = isinstance(matrix, ByteWeight) and matrix.codes.dtype is torch.int8 and not is_proven("int8")
    if device.type == "cpu" or isinstance(matrix, BlockWeight) or is_wide:
        return math.prod(matrix.shape) * matrix.dtype.itemsize
    return matrix.nbytes


@overload
def placed(matrix: Tensor | BlockWeight, device: torch.device) -> Tensor | BlockWeight: ...
@overload
def placed(matrix: Tensor | Quantized, device: torch.device) -> Tensor | Quantized: ...
def placed(matrix: Tensor | Quantized, device: torch.device) -> Tensor | Quantized:
    """For products on that device, on it: blocks of a type that they do not read are widened."""
    if isinstance(matrix, Tensor):
        return matrix.to(device)
    if device.type == "cpu" or not isinstance(matrix, BlockWeight):
        return matrix
    if not stays_narrow(matrix, device):
        return matrix.dense().to(device)
    order = None if matrix.order is None else matrix.order.to(device)
    return replace(matrix, data=matrix.data.to(device), order=order)


def stays_narrow(matrix: BlockWeight, device: torch.device) -> bool:
    """Whether products on that device, which is no CPU, read blocks of that type."""
    from slipstream.kernels.matmul.block_numbers import is_held  # for GGUF's types alone

    return device.type == "cuda" and is_held(matrix.kind, matrix.dtype)
