"""Weights of few bits, as checkpoints of any layout are read into: codes and scales, and the values they stand for.

GGUF's types, which are kept as the file has them, are in `blocks.py`.

The values are defined here, in the dtype of the rows they will be multiplied with, each rounded once. An implementation
of `pack` may keep the codes and widen them while it multiplies, or widen them at once; or multiply with the codes and
scale the sums, so that values are not rounded at all.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.matmul.blocks import BlockWeight, in_order


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """Four bits a value: (code - zero) * scale, with a scale and a zero per output and group of inputs (AWQ, GPTQ)."""

    codes: Tensor  # [out_features, in_features / 2] uint8: two inputs each, the first in the low four bits
    scales: Tensor  # [out_features, n_groups] float32
    zeros: Tensor  # [out_features, n_groups] uint8, 0 … 16
    order: Tensor | None  # [in_features] int64: code column i belongs to input order[i]; None: to input i
    dtype: torch.dtype  # of the values

    @property
    def shape(self) -> tuple[int, int]:
        """out_features, in_features."""
        return self.codes.shape[0], 2 * self.codes.shape[1]

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales, zeros and order."""
        order = 0 if self.order is None else self.order.nbytes
        return self.codes.nbytes + self.scales.nbytes + self.zeros.nbytes + order

    def dense(self) -> Tensor:
        """The values, [out_features, in_features]."""
        n_out, n_in = self.shape
        codes = torch.stack((self.codes & 15, self.codes >> 4), 2)  # [n_out, n_in / 2, 2]
        grouped = codes.view(n_out, self.scales.shape[1], -1)  # [n_out, n_groups, n_in / n_groups]
        wide = grouped.to(torch.float32)
        wide.sub_(self.zeros[:, :, None]).mul_(self.scales[:, :, None])
        return in_order(wide.view(n_out, n_in).to(self.dtype), self.order)


@dataclass(frozen=True, slots=True)
class ByteWeight:
    """Eight bits a value: code * scale, with one scale per block of outputs and inputs (fp8, int8)."""

    codes: Tensor  # [out_features, in_features] float8_e4m3fn or int8
    scales: Tensor  # [ceil(out_features / block[0]), ceil(in_features / block[1])] float32
    block: tuple[int, int]  # outputs and inputs that share a scale
    dtype: torch.dtype  # of the values

    @property
    def shape(self) -> tuple[int, int]:
        """out_features, in_features."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def dense(self) -> Tensor:
        """The values, [out_features, in_features]."""
        values = self.codes.to(torch.float32)  # [n_out, n_in]
        scales = self.scales.repeat_interleave(self.block[0], 0)[: self.shape[0]]  # [n_out, n_column_blocks]
        for i, columns in enumerate(values.split(self.block[1], 1)):  # [n_out, block[1] at most] each
            columns.mul_(scales[:, i : i + 1])
        return values.to(self.dtype)

    def by_output(self) -> ByteWeight:
        """The same values with scales for every output alone, so that outputs of other blocks can follow."""
        scales = self.scales.repeat_interleave(self.block[0], 0)[: self.shape[0]]  # [n_out, n_column_blocks]
        return ByteWeight(self.codes, scales, (1, self.block[1]), self.dtype)


@dataclass(frozen=True, slots=True)
class JoinedWeight:
    """Matrices that read the same inputs, their outputs one after another, each as narrow as it is stored."""

    parts: tuple[
        Tensor | Int4Weight | ByteWeight | BlockWeight, ...
    ]  # each [its outs, in_features], of one dtype

    @property
    def shape(self) -> tuple[int, int]:
        """out_features, in_features."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)

    def dense(self) -> Tensor:
        """The values, [out_features, in_features]."""
        return _below([widened(part) for part in self.parts])


Quantized = Int4Weight | ByteWeight | BlockWeight | JoinedWeight
_unproven: set[str] = set()
_rounds = False


def widen(types: Collection[str]) -> None:
    """Have matrices of these types, "int8" or GGUF's, and of no others, widened where they are packed from now on."""
    _unproven.clear()
    _unproven.update(types)


def is_proven(kind: str) -> bool:
    """Whether products may multiply matrices of a type as narrow as they are."""
    return kind not in _unproven


def round_inputs(on: bool) -> None:  # noqa: FBT001 - nothing else could be meant
    """Have weights of whole numbers packed from now on for inputs rounded to eight bits ("A8"), or as they are.

    On CPUs, of bfloat16 inputs, as `op.py` says. Codes of fp8, and weights that no CPU multiplies narrow, are others.
    """
    global _rounds
    _rounds = on


def rounds_inputs() -> bool:
    """Whether products with weights that are packed now round their inputs."""
    return _rounds


def widened(weight: Tensor | Quantized) -> Tensor:
    """The values, [out_features, in_features], for implementations that multiply with nothing narrower."""
    return weight if isinstance(weight, Tensor) else weight.dense()


def joined(parts: Sequence[Tensor | Quantized]) -> Tensor | Quantized:
    """One matrix of several that read the same inputs, their outputs one after another, [sum of outs, in_features].

    It stays narrow where the parts are of one kind with the same groups of inputs, or any of them is in blocks; else it
    is widened.
    """
    if len(parts) == 1:
        return parts[0]
    return (
        _joined_blocks(parts)
        or _joined_int4(parts)
        or _joined_bytes(parts)
        or _below([widened(part) for part in parts])
    )


def _below(parts: Sequence[Tensor]) -> Tensor:
    """The rows of all parts. Of parts without memory the shape alone: torch would import its compiler to join those."""
    if not parts[0].is_meta:
        return torch.cat([*parts])
    return parts[0].new_empty((sum(map(len, parts)), *parts[0].shape[1:]))


def _joined_blocks(parts: Sequence[Tensor | Quantized]) -> JoinedWeight | None:
    apart = [one for part in parts for one in (part.parts if isinstance(part, JoinedWeight) else (part,))]
    if not any(isinstance(part, BlockWeight) for part in apart):
        return None
    return JoinedWeight(tuple(apart))  # apart, as parts of one kind would have to be copied to lie together


def _joined_int4(parts: Sequence[Tensor | Quantized]) -> Int4Weight | None:
    narrow = [part for part in parts if isinstance(part, Int4Weight)]
    if len(narrow) < len(parts) or len({part.scales.shape[1] for part in narrow}) > 1:
        return None
    first = narrow[0]
    if any(not same_order(first.order, part.order) for part in narrow):
        return None
    codes, scales, zeros = (
        _below([getattr(part, name) for part in narrow]) for name in ("codes", "scales", "zeros")
    )
    return Int4Weight(codes, scales, zeros, first.order, first.dtype)


def same_order(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def _joined_bytes(parts: Sequence[Tensor | Quantized]) -> ByteWeight | None:
    narrow = [part for part in parts if isinstance(part, ByteWeight)]
    if len(narrow) < len(parts) or len({(part.codes.dtype, part.block[1]) for part in narrow}) > 1:
        return None
    blocks = {part.block[0] for part in narrow}
    if len(blocks) > 1 or any(part.shape[0] % part.block[0] for part in narrow[:-1]):
        narrow = [part.by_output() for part in narrow]
    codes, scales = (_below([getattr(part, name) for part in narrow]) for name in ("codes", "scales"))
    return ByteWeight(codes, scales, narrow[0].block, narrow[0].dtype)
