"""Random inputs of a proof: the same numbers in the dtype that is tested and, for the definition, in float64."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PAGE_SIZE = 16


class Inputs:
    """Tensors on a device, drawn on the host one after the other, so that two of one dtype draw the same numbers."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, *, wide: bool = False, seed: int = 11
    ) -> None:
        """wide: floats are rounded to their dtype all the same, and then held in float64."""
        self.device, self.dtype, self._wide = device, dtype, wide
        self.g = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.put(torch.randn(shape, generator=self.g), dtype)

    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.put(torch.zeros(shape), dtype)

    def put(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Floats of the host, rounded to `dtype`, by default the one that is tested."""
        x = x.to(dtype or self.dtype)
        return (x.double() if self._wide else x).to(self.device)

    def stored(self, *shape: int, coded: bool) -> Tensor:
        """What a store of keys or values holds. coded: in float8; its values, where floats are held in float64."""
        drawn = torch.randn(shape, generator=self.g)
        if not coded:
            return self.put(drawn)
        codes = drawn.to(torch.float8_e4m3fn)
        return self.put(codes.float()) if self._wide else codes.to(self.device)

    def column(self, values: Sequence[float], n_rows: int, dtype: torch.dtype) -> Tensor:
        """[n_rows] of `dtype` as it is: the values again and again."""
        repeated = itertools.islice(itertools.cycle(values), n_rows)
        return torch.tensor(list(repeated), dtype=dtype).to(self.device)


@dataclass(frozen=True, slots=True)
class PagedRows:
    """A ragged batch on pages, as attention and the page write see it."""

    span_starts: Tensor  # [n_spans + 1] int32
    n_past: Tensor  # [n_spans] int32
    page_table: Tensor  # [n_spans, n_pages_max] int32
    positions: Tensor  # [n_rows] int64
    row_pages: Tensor  # [n_rows] int64
    row_offsets: Tensor  # [n_rows] int64
    wholes: Tensor | None = None  # [n_rows, 2] int32


class Sequences:
    """Sequences on pages in no order, of which passes read spans."""

    def __init__(self, lengths: Sequence[int], device: torch.device, page_size: int = PAGE_SIZE) -> None:
        """lengths: most tokens of each sequence."""
        needed = [-(-n // page_size) for n in lengths]
        self.n_pages = sum(needed)
        shuffled = torch.randperm(self.n_pages, generator=torch.Generator().manual_seed(3)).int()
        self._table = torch.zeros(len(lengths), max(needed), dtype=torch.int32)  # [n_sequences, n_pages_max]
        for i, start in enumerate(itertools.accumulate(needed[:-1], initial=0)):
            self._table[i, : needed[i]] = shuffled[start : start + needed[i]]
        self._device, self._page_size = device, page_size

    def spans(self, lengths: Sequence[int], past: Sequence[int], owners: Sequence[int]) -> PagedRows:
        """lengths[i] rows of sequence owners[i] from position past[i] on."""
        owner = torch.repeat_interleave(torch.tensor(owners), torch.tensor(lengths))  # [n_rows]
        positions = torch.cat(
            [torch.arange(p, p + n) for p, n in zip(past, lengths, strict=True)]
        )  # [n_rows]
        parts = PagedRows(
            span_starts=torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
            n_past=torch.tensor(past, dtype=torch.int32),
            page_table=self._table[list(owners)],
            positions=positions,
            row_pages=self._table[owner, positions // self._page_size].long(),
            row_offsets=positions % self._page_size,
        )
        return PagedRows(*(getattr(parts, name).to(self._device) for name in PagedRows.__slots__[:-1]))
