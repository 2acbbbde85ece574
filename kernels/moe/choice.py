"""`route` on CPU: each row alone in one compiled call, so neither width nor threads can change a bit."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels.compiled import (
    float_pointer,
    inlined,
    int_pointer,
    kernel,
    per_dtype,
    pointer,
    shifted,
)
from slipstream.kernels.exponential import exp, over_one_plus_exp
from slipstream.kernels.moe.types import Routed, Routing
from slipstream.kernels.vector import WIDTH, keep_below, load, load_part, rounded, splat, store, sum_lanes

RECORDABLE = True  # all it does is calls of kernels and operations of torch (`tape.py`)
FREE, OUT_OF_GROUP, CHOSEN = 0, 1, 2


def route(logits: Tensor, routing: Routing) -> Routed:
    logits = logits.contiguous()
    n_rows, n_experts = logits.shape
    bias = _no_bias(n_experts) if routing.bias is None else routing.bias
    routed = Routed(
        torch.empty((n_rows, routing.top_k), dtype=torch.int32), torch.empty((n_rows, routing.top_k))
    )
    _route[logits.dtype](
        (logits.data_ptr(), bias.data_ptr(), routed.expert_ids.data_ptr(), routed.weights.data_ptr()),
        (n_rows, n_experts, routing.top_k, routing.n_groups, routing.n_groups_kept),
        (routing.scores == "sigmoid", routing.by_logits, routing.normed),
        routing.scale,
    )
    return routed


@functools.cache
def _no_bias(n_experts: int) -> Tensor:
    return torch.zeros(n_experts)


@inlined
def _rows(logits: Any, bias: Any, routed: Any, shape: Any, how: Any, scale: float) -> None:
    """routed: pointers to expert ids and weights. shape, how: as `route` gives them."""
    n_rows, n_experts, top_k, n_groups, n_kept = shape
    n_padded = (n_experts + WIDTH - 1) // WIDTH * WIDTH
    memory = np.empty(3 * n_padded, np.float32)
    keys = float_pointer(memory.ctypes.data)
    scores, picked = shifted(keys, n_padded), shifted(keys, 2 * n_padded)
    state, best = np.empty(n_experts, np.uint8), np.empty(n_groups, np.float32)
    for row in range(n_rows):
        ids, weights = shifted(routed[0], row * top_k), shifted(routed[1], row * top_k)
        source = shifted(logits, row * n_experts)
        broken = _score(source, bias, (keys, scores), n_experts, how)
        state[:] = FREE
        if n_groups > 1:
            _drop_groups(keys, state, best, n_experts // n_groups, n_kept)
        for _ in range(top_k):
            state[_largest_free(keys, state, n_experts)] = CHOSEN
        at = 0
        for expert in range(n_experts):
            if state[expert] == CHOSEN:
                ids[at] = np.int32(expert)
                picked[at] = scores[expert]
                at += 1
        _weigh(picked, top_k, how[2], scale, logits)
        for i in range(top_k):
            weights[i] = np.float32(np.nan) if broken else picked[i]
    memory[:0] = 0  # keeps the memory alive until here


@inlined
def _score(source: Any, bias: Any, work: Any, n: int, how: Any) -> bool:
    """Fill (keys, scores) of one row; keys are what is compared. Returns whether there is a NaN."""
    keys, scores = work
    is_sigmoid, by_logits, _ = how
    zero = splat(np.float32(0))
    for i in range(0, n, WIDTH):
        store(keys, i, load_part(source, i, n - i))
    largest, broken = keys[0], False
    for i in range(n):
        largest = max(largest, keys[i])
        broken = broken or keys[i] != keys[i]
    total = zero
    for i in range(0, n, WIDTH):
        x = load(keys, i)
        if is_sigmoid:
            store(scores, i, over_one_plus_exp(splat(np.float32(1)), x))
        else:
            grown = keep_below(n - i, exp(x - splat(largest)), zero)
            total = total + grown
            store(scores, i, grown)
    sum_of_all = splat(sum_lanes(total))
    for i in range(0, n, WIDTH):
        if not is_sigmoid:
            store(scores, i, load(scores, i) / sum_of_all)
        if not by_logits:
            store(keys, i, load(scores, i) + load_part(bias, i, n - i))
    return broken


@inlined
def _drop_groups(keys: Any, state: Any, best: Any, n_in_group: int, n_kept: int) -> None:
    """Mark the experts of all groups but the best; best: scratch, [n_groups]."""
    n_groups = len(best)
    for group in range(n_groups):
        first = second = np.float32(-np.inf)
        for i in range(group * n_in_group, (group + 1) * n_in_group):
            if keys[i] > first:
                first, second = keys[i], first
            elif keys[i] > second:
                second = keys[i]
        best[group] = first + second
    for group in range(n_groups):
        n_better = 0
        for other in range(n_groups):
            if best[other] > best[group] or (best[other] == best[group] and other < group):
                n_better += 1
        if n_better >= n_kept:
            state[group * n_in_group : (group + 1) * n_in_group] = OUT_OF_GROUP


@inlined
def _largest_free(keys: Any, state: Any, n: int) -> int:
    """The lowest id with the largest key among those free; there is one."""
    found = -1
    for i in range(n):
        if state[i] == FREE and (found < 0 or keys[i] > keys[found]):
            found = i
    return found


@inlined
def _weigh(picked: Any, n: int, is_normed: Any, scale: float, logits: Any) -> None:
    """Turn the scores of a row's experts into weights, rounded as the logits are."""
    total = np.float32(0)
    for i in range(n):
        total += picked[i]
    divisor = splat(np.float32(total + np.float32(1e-20)) if is_normed else np.float32(1))
    for i in range(0, n, WIDTH):
        weight = load(picked, i) / divisor * splat(np.float32(scale))
        store(picked, i, rounded(weight, logits))


@per_dtype
def _route(kind: Any) -> Any:
    @kernel
    def route_rows(addresses: Any, shape: Any, how: Any, scale: float) -> None:
        logits, bias, ids, weights = addresses
        routed = int_pointer(ids), float_pointer(weights)
        _rows(pointer(logits, kind), float_pointer(bias), routed, shape, how, scale)

    return route_rows
