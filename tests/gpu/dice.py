"""What random inputs are made of: dice, a ragged batch on pages, and the call that takes them."""

from __future__ import annotations

import itertools
import random as randoms
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.proof.inputs import PagedRows

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Draw:
    """One random call of an op."""

    tensors: dict[str, Tensor]  # on the host, in the dtype that is tested
    # Runs the op on tensors that may have been moved and cast: what it returns, then what it changed in place.
    call: Callable[[Tensors], tuple[Tensor, ...]]
    says: str = ""  # the sizes, for a report of a failure


def pages_of(tensors: Tensors) -> PagedRows:
    """The batch among a draw's tensors."""
    return PagedRows(**{name: tensors[name] for name in PagedRows.__slots__ if name in tensors})


def page_tensors(
    lengths: list[int], past: list[int], page_size: int, g: torch.Generator
) -> dict[str, Tensor]:
    """The tensors of `PagedRows`, pages in no order, and `n_pages` [] beside them."""
    needed = [-(-(p + n) // page_size) for p, n in zip(past, lengths, strict=True)]
    shuffled = torch.randperm(sum(needed) + 2, generator=g).int()
    table = torch.full((len(lengths), max(needed) + 1), 10**6, dtype=torch.int32)
    for i, start in enumerate(itertools.accumulate(needed[:-1], initial=0)):
        table[i, : needed[i]] = shuffled[start : start + needed[i]]
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    positions = torch.cat([torch.arange(p, p + n) for p, n in zip(past, lengths, strict=True)])
    return {
        "span_starts": torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
        "n_past": torch.tensor(past, dtype=torch.int32),
        "page_table": table,
        "positions": positions,
        "row_pages": table[owner, positions // page_size].long(),
        "row_offsets": positions % page_size,
        "n_pages": torch.tensor(sum(needed) + 2),
    }


class Dice:
    """Random numbers of one draw."""

    def __init__(self, seed: int, dtype: torch.dtype, *, quick: bool) -> None:
        self.dtype, self.quick = dtype, quick
        self.g = torch.Generator().manual_seed(seed)
        self.random = randoms.Random(seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        wide = torch.randn(shape, generator=self.g, dtype=torch.float64)
        return wide.to(dtype or self.dtype)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.g)

    def n_rows(self) -> int:
        """1 to 64, and now and then more than any tile has."""
        return self.random.choice([1, 2, 3, 5, 8, 16, 17, 33, 64, self.random.randint(1, 64), 130])

    def scale_dtype(self) -> torch.dtype:
        """A norm's weight is of the rows' dtype or float32."""
        return self.random.choice([self.dtype, torch.float32])

    def wholes(self, lengths: list[int], past: list[int]) -> Tensor:
        """[n_rows, 2] int32: images of some spans, of any sizes, of which the first may begin before its span."""
        rows = []
        for n, n_past in zip(lengths, past, strict=True):
            end = n_past
            begin = self.random.randint(max(0, n_past - 600), n_past)
            while end < n_past + n:
                is_image = self.random.random() < 0.5
                end, start = self.random.randint(end + 1, n_past + n), end
                rows += [(begin, end) if is_image else (p, p + 1) for p in range(start, end)]
                begin = end
        return torch.tensor(rows, dtype=torch.int32)

    def lengths(self) -> tuple[list[int], list[int]]:
        """Rows and past tokens of some spans."""
        n = self.random.randint(1, 5)
        lengths = [self.random.choice([1, 1, 2, 5, 9, 17, self.random.randint(1, 90)]) for _ in range(n)]
        past = [self.random.choice([0, 1, 63, 64, 130, self.random.randint(0, 700)]) for _ in range(n)]
        return lengths, past
