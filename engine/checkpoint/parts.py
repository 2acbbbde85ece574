"""Which part of a stored tensor a rank reads, where several processes compute one network (`engine.ranks`).

A layer asks for tensors in the sizes of its own part. Wherever a file's tensor is some times as large, the rank's part is
cut out of that dimension; heads of keys that are fewer than the ranks are read by several of them. That the file's
sizes are those of the config has been checked before, of the whole network (`models.outlined`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.engine.ranks import Ranks
from slipstream.kernels.matmul.blocks import BlockWeight, block_sizes


@dataclass(frozen=True, slots=True)
class Joint:
    """A dimension in which several matrices lie one behind the other, each of which is divided for itself."""

    dim: int
    sizes: Sequence[int]  # of the rank's own parts


def cut_of(ranks: Ranks, stored: Sequence[int], asked: Sequence[int], joint: Joint | None) -> list[list[slice]] | None:
    """Per dimension the runs that a rank reads of a tensor; None if the asked shape is no part of the stored shape."""
    if len(stored) != len(asked):
        return None
    runs = []
    for dim, (have, want) in enumerate(zip(stored, asked, strict=True)):
        times, rest = divmod(have, want) if want else (0, have)
        if rest or not times or ranks.n % times:
            return None
        sizes = [want]
        if joint is not None and joint.dim == dim:
            # The codes of a narrow matrix may be fewer than its rows, in proportion.
            sizes = [one * want // sum(joint.sizes) for one in joint.sizes]
            if sum(sizes) != want:
                return None
        place, start, own = ranks.rank * times // ranks.n, 0, []
        for size in sizes:
            own.append(slice(start + place * size, start + (place + 1) * size))
            start += times * size
        runs.append(own)
    return runs


def cut(tensor: Tensor, runs: Sequence[Sequence[slice]]) -> Tensor:
    """These runs of each dimension. A view where each dimension has one, so that nothing else is read of a file."""
    for dim, own in enumerate(runs):
        parts = [tensor.narrow(dim, one.start, one.stop - one.start) for one in own]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return tensor


def cut_blocks(matrix: BlockWeight, runs: Sequence[Sequence[slice]]) -> BlockWeight | None:
    """The same of a matrix in blocks, [out_features, in_features]; None where a cut would go through blocks."""
    rows, columns = runs
    data, order = cut(matrix.data, [rows, [slice(0, matrix.data.shape[1])]]), matrix.order
    if columns != [slice(0, matrix.shape[1])]:
        n_values, n_bytes = block_sizes(matrix.kind)
        if order is not None or any(one.start % n_values or one.stop % n_values for one in columns):
            return None
        of_bytes = [
            slice(one.start // n_values * n_bytes, one.stop // n_values * n_bytes) for one in columns
        ]
        data = cut(data, [[slice(0, data.shape[0])], of_bytes])
    return replace(matrix, data=data.contiguous(), order=order)
