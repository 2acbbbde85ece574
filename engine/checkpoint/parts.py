"""Parts of matrices in blocks, where several processes compute one network.

A layer asks for tensors in the sizes of its own part. Wherever a file's tensor is some times as large, the rank's part
is cut out of that dimension (`engine.ranks.cut_of`). That the file's sizes are those of the config has been checked
before, of the whole network (`outlined.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from slipstream.engine.ranks import cut
from slipstream.kernels.matmul.blocks import BlockWeight, block_sizes


def cut_blocks(matrix: BlockWeight, runs: Sequence[Sequence[slice]]) -> BlockWeight | None:
    """`cut` of a matrix in blocks, [out_features, in_features]; None where a cut would go through blocks."""
    rows, columns = runs
    data, order = cut(matrix.data, [rows, [slice(0, matrix.data.shape[1])]]), matrix.order
    if columns != [slice(0, matrix.shape[1])]:
        n_values, n_bytes = block_sizes(matrix.kind)
        if order is not None or any(one.start % n_values or one.stop % n_values for one in columns):
            return None
        of_bytes = [slice(one.start // n_values * n_bytes, one.stop // n_values * n_bytes) for one in columns]
        data = cut(data, [[slice(0, data.shape[0])], of_bytes])
    return replace(matrix, data=data.contiguous(), order=order)
