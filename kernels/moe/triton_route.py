"""`route` in Triton: one program a row, its scores as a tile of groups and their members."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.moe.types import Routed, Routing
from slipstream.kernels.triton_launch import FUSED, aligned, power_of_two


def route(logits: Tensor, routing: Routing) -> Routed:
    logits = aligned(logits)
    n_rows, n_experts = logits.shape
    shape = n_rows, routing.top_k
    routed = Routed(
        torch.empty(shape, dtype=torch.int32, device=logits.device),
        torch.empty(shape, dtype=torch.float32, device=logits.device),
    )
    if n_rows > 0:
        n_in_group = n_experts // routing.n_groups
        bias = logits if routing.bias is None else routing.bias
        _route[(n_rows,)](
            *(logits, bias, routed.expert_ids, routed.weights, routing.scale),
            *(n_experts, n_in_group, power_of_two(routing.n_groups), power_of_two(n_in_group)),
            *(
                routing.n_groups_kept if routing.n_groups > 1 else 0,
                routing.top_k,
                power_of_two(routing.top_k),
            ),
            *(routing.scores == "sigmoid", routing.by_logits, routing.bias is not None, routing.normed),
            num_warps=1 if n_experts <= 128 else 4,
            **FUSED,
        )
    return routed


@triton.jit
def _all(x, reduced: tl.constexpr):
    """The largest, least or sum of a whole tile."""
    if reduced == "max":
        return tl.max(tl.max(x, 1), 0)
    if reduced == "min":
        return tl.min(tl.min(x, 1), 0)
    return tl.sum(tl.sum(x, 1), 0)


@triton.jit
def _kept_groups(keys, G: tl.constexpr, N: tl.constexpr, KEPT: tl.constexpr):
    """Which groups stay, [G] bool: the best by the sum of their two best keys, the lowest among equals."""
    member = tl.arange(0, N)[None, :]
    first = tl.max(keys, 1)  # [G]
    place = tl.min(tl.where(keys == first[:, None], member, N), 1)  # [G]
    second = tl.max(tl.where(member == place[:, None], float("-inf"), keys), 1)
    best = first + second
    group = tl.arange(0, G)
    by_row, by_column = best[:, None], best[None, :]
    better = (by_column > by_row) | ((by_column == by_row) & (group[None, :] < group[:, None]))
    return tl.sum(better.to(tl.int32), 1) < KEPT


# fmt: off
@triton.jit
def _route(
    logits_at, bias_at, ids_at, weights_at, scale, N_EXPERTS: tl.constexpr, N_IN_GROUP: tl.constexpr,
    G: tl.constexpr, N: tl.constexpr, KEPT: tl.constexpr, TOP_K: tl.constexpr, K: tl.constexpr,
    SIGMOID: tl.constexpr, BY_LOGITS: tl.constexpr, BIASED: tl.constexpr, NORMED: tl.constexpr,
):
    # fmt: on
    """G, N: groups and members rounded up to powers of two. KEPT: groups that stay, 0 for all. K: TOP_K rounded up."""
    row = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, G)[:, None], tl.arange(0, N)[None, :]
    expert = group * N_IN_GROUP + member  # [G, N]
    free = (member < N_IN_GROUP) & (expert < N_EXPERTS)
    least = float("-inf")
    logits = tl.load(logits_at + row * N_EXPERTS + expert, mask=free, other=least)
    x = logits.to(tl.float32)
    broken = _all((free & (x != x)).to(tl.int32), "sum") > 0
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-x))
    else:
        grown = tl.exp(x - _all(x, "max"))
        scores = grown / _all(grown, "sum")
    if BY_LOGITS:
        keys = x
    elif BIASED:
        keys = scores + tl.load(bias_at + expert, mask=free, other=0.0)
    else:
        keys = scores
    keys = tl.where(free & (keys == keys), keys, least)  # a row with a NaN still gets experts that exist
    if KEPT > 0:
        free = free & _kept_groups(keys, G, N, KEPT)[:, None]

    chosen = expert < 0  # none
    for _ in tl.static_range(TOP_K):
        largest = _all(tl.where(free, keys, least), "max")
        next_id = _all(tl.where(free & (keys == largest), expert, N_EXPERTS), "min")
        chosen = chosen | (expert == next_id)
        free = free & (expert != next_id)

    place = tl.arange(0, K)
    ids, weights = tl.zeros([K], tl.int32), tl.zeros([K], tl.float32)
    for i in tl.static_range(TOP_K):
        next_id = _all(tl.where(chosen, expert, N_EXPERTS), "min")
        score = _all(tl.where(expert == next_id, scores, 0.0), "sum")
        ids = tl.where(place == i, next_id, ids)
        weights = tl.where(place == i, score, weights)
        chosen = chosen & (expert != next_id)
    if NORMED:
        weights = weights / (tl.sum(weights, 0) + 1e-20)
    weights = (weights * scale).to(logits.dtype).to(tl.float32)
    weights = tl.where(broken, float("nan"), weights)
    tl.store(ids_at + row * TOP_K + place, ids, mask=place < TOP_K)
    tl.store(weights_at + row * TOP_K + place, weights, mask=place < TOP_K)
