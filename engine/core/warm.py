"""Passes before the first request: what they cost, and whatever is compiled at first use."""

from __future__ import annotations

import time
from collections import Counter
from math import inf

import numpy as np
import torch

from slipstream.engine.api import Sampling
from slipstream.engine.batch import Span
from slipstream.engine.cache.cache import Cache
from slipstream.engine.core.forward import STORE, Target
from slipstream.engine.sample.params import resolve_sampling
from slipstream.engine.sample.pick import Row, pick
from slipstream.engine.speculate.decide.cost import WIDTHS, Costs

# Ways of picking that run different code; compiled code must not be met first by a client.
_WARM_UP = (
    Sampling(seed=0, temperature=0.0),
    Sampling(seed=0),
    Sampling(seed=0, top_p=0.9, top_k=5, min_p=0.1, repeat_penalty=1.1),
)

_LEAST_TURNS, _MOST_TURNS = 2, 16  # of all widths


def warm_up(target: Target, cache: Cache, costs: Costs, most: int, enough_s: float) -> None:
    """Run passes of up to `most` rows in an idle slot, and report their seconds to `costs`.

    All widths take turns, and the least of each counts: a neighbour that is busy for a while then slows a few turns and
    not one width. After two turns it ends when `enough_s` have passed; six times as long if rows one by one would have
    been faster than together, as with threads that wait for one that is not running.
    """
    widths = [n_rows for n_rows in WIDTHS if n_rows <= most and cache.reserve(0, STORE, 0, n_rows)]
    for n_rows in widths:  # kernels are compiled and memory is found
        _measured(target, cache, n_rows)
    least, started = [inf] * len(widths), time.perf_counter()
    for n_turns in range(_MOST_TURNS):
        worst = max((seconds / n_rows for n_rows, seconds in zip(widths, least, strict=True)), default=0.0)
        patience = 6.0 if worst > least[0] else 1.0
        if n_turns >= _LEAST_TURNS and time.perf_counter() - started > patience * enough_s:
            break
        least = [
            min(seconds, _measured(target, cache, n_rows))
            for n_rows, seconds in zip(widths, least, strict=True)
        ]
    for n_rows, seconds in zip(widths, least, strict=True):
        costs.passed(n_rows, seconds)
    cache.drop(0)
    _pick(target)


def _measured(target: Target, cache: Cache, n_rows: int) -> float:
    """Seconds of a pass of so many rows."""
    # Different tokens: equal rows ask for the same experts, and a pass would look cheaper than it is.
    span = Span(0, [i % target.network.vocab_size for i in range(n_rows)], 0, 0, n_rows)
    cache.recover(0)
    started = time.perf_counter()
    target.forward(cache.batch(STORE, [span]), cache.stores[STORE]).sum().item()
    return time.perf_counter() - started


def _pick(target: Target) -> None:
    """Pick in every way that runs different code."""
    network = target.network
    for sampling in _WARM_UP:
        params = resolve_sampling(sampling, {}, [], network.vocab_size)
        logits = torch.zeros(1, network.vocab_size, device=network.device)
        pick(logits, [Row(params, [0], 1, Counter())])
    everything = np.full(-(-network.vocab_size // 32), -1, np.int32)
    pick(logits, [Row(params, [0], 1, Counter(), allowed=everything)])
