"""Matrices in GGUF's block types, their bytes as the file holds them, and the values they stand for.

A block is a run of 32 or 256 neighbouring inputs of one output: codes of few bits, and scales that they share. What
the bytes mean is what `gguf.quants.dequantize` makes of them (the package of llama.cpp, which defines the format).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

PIECE = 1 << 22  # values widened at a time: float32 copies of a few megabytes


@functools.cache
def block_sizes(kind: str) -> tuple[int, int]:
    """Inputs of a block, and its bytes. Raises ValueError if GGUF has no block type of that name."""
    import gguf  # a fifth of a second, and only files of this format need it

    known = {one.name: sizes for one, sizes in gguf.GGML_QUANT_SIZES.items() if sizes[0] > 1}
    if kind not in known:
        raise ValueError(f"{kind} is no block type of GGUF; it must be one of {', '.join(sorted(known))}")
    n_values, n_bytes = known[kind]
    return n_values, n_bytes


def in_order(columns: Tensor, order: Tensor | None) -> Tensor:
    """Stored columns, [n, in_features], each at its input. order: [in_features] int64; None: as they are."""
    if order is None:
        return columns
    ordered = torch.empty_like(columns)
    ordered[:, order] = columns
    return ordered


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """A matrix in one of GGUF's block types, its bytes as the file holds them.

    Raises ValueError for an unknown kind, or rows that are no whole blocks.
    """

    data: Tensor  # [out_features, in_features / block * bytes of a block] uint8; may be mapped from a file, read-only
    kind: str  # "Q4_K", …: a name of gguf.GGMLQuantizationType
    order: Tensor | None  # [in_features] int64: stored column i belongs to input order[i]; None: to input i
    dtype: torch.dtype  # of the values

    def __post_init__(self) -> None:
        n_bytes = block_sizes(self.kind)[1]
        if self.data.dim() != 2 or self.data.dtype != torch.uint8 or self.data.shape[1] % n_bytes:
            raise ValueError(
                f"blocks of {self.kind} have {n_bytes} bytes; rows of whole blocks are [out_features, n * {n_bytes}]"
                f" uint8, not {list(self.data.shape)} {self.data.dtype}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """out_features, in_features."""
        n_values, n_bytes = block_sizes(self.kind)
        return self.data.shape[0], self.data.shape[1] // n_bytes * n_values

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes of blocks and order."""
        return self.data.nbytes + (0 if self.order is None else self.order.nbytes)

    def dense(self) -> Tensor:
        """The values, [out_features, in_features], each rounded once to `dtype`."""
        n_out, n_in = self.shape
        values = torch.empty((n_out, n_in), dtype=self.dtype, device=self.device)
        if self.data.is_meta:
            return values
        n_at_once = max(1, PIECE // max(1, n_in))
        for start in range(0, n_out, n_at_once):
            rows = torch.arange(start, min(start + n_at_once, n_out), device=self.device)
            values[start : start + n_at_once] = self.rows(rows)
        return values

    def rows(self, token_ids: Tensor) -> Tensor:
        """The values of some outputs, [n, in_features]. token_ids: [n] integers from 0 on, below out_features."""
        if self.data.is_meta:
            return torch.empty((len(token_ids), self.shape[1]), dtype=self.dtype, device=self.device)
        return in_order(self._values(token_ids), self.order)

    def _values(self, rows: Tensor) -> Tensor:
        """The same with columns as they are stored."""
        from slipstream.kernels.matmul import values as compiled  # a second of numba

        if compiled.has_values(self.kind, self.device, self.dtype):
            return compiled.values(self.data, self.kind, rows, self.dtype)
        from gguf import GGMLQuantizationType, quants

        data = self.data.index_select(0, rows).cpu().numpy()  # [n, bytes of a row]
        # Infinite scales are for the reader of the checkpoint to refuse.
        with np.errstate(over="ignore", invalid="ignore"):
            wide = quants.dequantize(data, GGMLQuantizationType[self.kind])  # [n, in_features] float32
        return torch.from_numpy(wide).to(self.device, self.dtype)
