"""Rows put together by expert, so that each expert is read once, and what the experts say added up by row."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels.compiled import float_pointer, int_pointer, kernel, per_dtype, pointer, shifted
from slipstream.kernels.vector import WIDTH, load_part, splat, store_part


class Groups(NamedTuple):
    """Pairs of a row and one of its experts, in order of experts, then of rows.

    There are as many groups as experts that could be asked for; those behind the last that is are of expert 0 and have
    no rows. So shapes do not depend on what was asked for.
    """

    expert_ids: Tensor  # [n_groups] int32: the experts that some row asks for, ascending
    starts: Tensor  # [n_groups + 1] int32: expert_ids[i] owns pairs starts[i] ...
    rows: Tensor  # [n_pairs] int32: the row of a pair
    places: Tensor  # [n_rows, top_k] int32: the pair of a row's expert


def group(expert_ids: Tensor, n_experts: int) -> Groups:
    """expert_ids: [n_rows, top_k] int32, contiguous."""
    n_pairs = expert_ids.numel()
    n_groups = min(n_pairs, n_experts)
    groups = Groups(
        torch.empty(n_groups, dtype=torch.int32),
        torch.empty(n_groups + 1, dtype=torch.int32),
        torch.empty(n_pairs, dtype=torch.int32),
        torch.empty_like(expert_ids),
    )
    addresses = tuple(one.data_ptr() for one in (expert_ids, *groups))
    _group(addresses, (n_groups, n_pairs, expert_ids.shape[1], n_experts))
    return groups


def add_up(said: Tensor, groups: Groups, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Per row the sum of its weights times what its experts said: [n_rows, d_model] of `dtype`.

    said: [n_pairs, d_model] float32. weights: [n_rows, top_k] float32.
    """
    (n_rows, top_k), d_model = weights.shape, said.shape[1]
    out = torch.empty((n_rows, d_model), dtype=dtype)
    addresses = said.data_ptr(), groups.places.data_ptr(), weights.data_ptr(), out.data_ptr()
    _sums[dtype](addresses, n_rows, top_k, d_model)
    return out


@kernel
def _group(addresses: Any, shape: Any) -> None:
    """A counting sort. shape: (n_groups, n_pairs, top_k, n_experts)."""
    n_groups, n_pairs, top_k, n_experts = shape
    expert_ids, rows, places = int_pointer(addresses[0]), int_pointer(addresses[3]), int_pointer(addresses[4])
    touched, starts = int_pointer(addresses[1]), int_pointer(addresses[2])
    next_place = np.zeros(n_experts, np.int32)
    for pair in range(n_pairs):
        next_place[expert_ids[pair]] += 1
    n_touched, start = 0, np.int32(0)
    for expert in range(n_experts):
        n_here = next_place[expert]
        next_place[expert] = start
        if n_here > 0:
            touched[n_touched], starts[n_touched] = np.int32(expert), start
            n_touched += 1
            start += n_here
    starts[n_touched] = start
    for i in range(n_touched, n_groups):
        touched[i], starts[i + 1] = np.int32(0), start
    for pair in range(n_pairs):
        expert = expert_ids[pair]
        place = next_place[expert]
        next_place[expert] += 1
        places[pair], rows[place] = place, np.int32(pair // top_k)


@per_dtype
def _sums(kind: Any) -> Any:
    @kernel
    def sums(addresses: Any, n_rows: int, top_k: int, d_model: int) -> None:
        said, weights = float_pointer(addresses[0]), float_pointer(addresses[2])
        places = int_pointer(addresses[1])
        for row in range(n_rows):
            target = shifted(pointer(addresses[3], kind), row * d_model)
            for i in range(0, d_model, WIDTH):
                total = splat(np.float32(0))
                for pair in range(row * top_k, (row + 1) * top_k):
                    part = load_part(shifted(said, places[pair] * d_model), i, d_model - i)
                    total = total + splat(weights[pair]) * part
                store_part(target, i, total, d_model - i)

    return sums
