"""Passes before the first request: what they cost, and whatever is compiled at first use."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import torch

from slipstream.engine.api import Sampling
from slipstream.engine.batch import Span
from slipstream.engine.cache.cache import Cache
from slipstream.engine.core.forward import STORE, Target
from slipstream.engine.sample.params import resolve_sampling
from slipstream.engine.sample.pick import Row, pick
from slipstream.engine.speculate.decide.cost import TIERS, PassCost

# Ways of picking that run different code; compiled code must not be met first by a client.
_WARM_UP = (
    Sampling(seed=0, temperature=0.0),
    Sampling(seed=0),
    Sampling(seed=0, top_p=0.9, top_k=5, min_p=0.1, repeat_penalty=1.1),
)


def warm_up(target: Target, cache: Cache, cost: PassCost, most: int, n_repeats: int) -> None:
    """Run passes of up to `most` rows in an idle slot, several times each, and report their seconds to `cost`."""
    network = target.network
    for n_rows in [tier for tier in TIERS if tier <= most]:
        if not cache.reserve(0, STORE, 0, n_rows):
            break
        # Different tokens: equal rows ask for the same experts, and a pass would look cheaper than it is.
        span = Span(0, [i % network.vocab_size for i in range(n_rows)], 0, 0, n_rows)
        times = []
        for _ in range(n_repeats + 1):
            cache.recover(0)
            started = time.perf_counter()
            target.forward(cache.batch(STORE, [span]), cache.stores[STORE]).sum().item()
            times.append(time.perf_counter() - started)
        cost.observe(n_rows, sorted(times[1:])[n_repeats // 2])
    cache.drop(0)
    for sampling in _WARM_UP:
        params = resolve_sampling(sampling, {}, [], network.vocab_size)
        logits = torch.zeros(1, network.vocab_size, device=network.device)
        pick(logits, [Row(params, [0], 1, Counter())])
    everything = np.full(-(-network.vocab_size // 32), -1, np.int32)
    pick(logits, [Row(params, [0], 1, Counter(), allowed=everything)])
