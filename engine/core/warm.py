"""Passes before the first request: what they cost, and whatever is compiled at first use."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

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

ENOUGH_S = 0.3  # of passes, before the first request
_ALWAYS = 8  # rows up to which powers of two are measured, however long they take
_MOST_TURNS = 16  # of all widths
_REPLAYED, _LONG_S = 2, 0.15  # passes of a width until it is replayed; seconds of a pass of which one will do


def warm_up(target: Target, cache: Cache, costs: Costs, most: int, n_drafts: int, enough_s: float) -> None:
    """Run passes of up to `most` rows in an idle slot, and report their seconds to `costs`.

    Passes of a token and up to `n_drafts` drafts that would be recorded when they first serve are run too, as far as
    they take no longer than `enough_s`.
    """
    widths = [n_rows for n_rows in WIDTHS if n_rows <= most and cache.reserve(0, STORE, 0, n_rows)]
    measured = seconds_by_width(widths, lambda n_rows: _measured(target, cache, n_rows), enough_s)
    for n_rows, seconds in measured.items():
        costs.passed(n_rows, seconds)
    spent = measured.get(1, 0.0)  # by another pass, at least
    for n_rows in cache.stores[STORE].frames.unmade(range(1, 2 + n_drafts)):
        if spent < enough_s and n_rows <= max(widths, default=0):
            spent += _pass_s(target, cache, n_rows)
    cache.drop(0)
    _pick(target)


def seconds_by_width(
    widths: Sequence[int], seconds_of: Callable[[int], float], enough_s: float
) -> dict[int, float]:
    """Seconds of passes of these rows, narrow widths first, the least of what was measured of each.

    A width's pass is repeated at once if its rows one by one would have been much faster: something was compiled, or
    a neighbour was busy. Turns of all widths follow until the measurements add up to `enough_s`; six times as long if
    wider passes still look dearer than their rows, as with threads that wait for one that is not running.

    A large model on a slow machine must not wait for minutes. Once `enough_s` have passed, powers of two alone are
    measured, and of more than eight rows none that may end after three times that. The rest gets what lies on the line
    between its neighbours, or through the narrowest and the widest measured, and is measured while serving.
    """
    least: dict[int, float] = {}
    spent, per_row = 0.0, 0.0
    for n_rows in widths:
        is_power = n_rows & (n_rows - 1) == 0
        ends = spent + n_rows * per_row
        if (n_rows > _ALWAYS and ends > 3.0 * enough_s) if is_power else spent > enough_s:
            continue
        seconds = seconds_of(n_rows)
        if seconds > 1.25 * n_rows * per_row:
            seconds = min(seconds, seconds_of(n_rows))
        least[n_rows] = seconds
        spent, per_row = spent + seconds, seconds / n_rows
    for _ in range(_MOST_TURNS - 1):
        is_odd = any(seconds / n_rows > least[widths[0]] / widths[0] for n_rows, seconds in least.items())
        if spent > (6.0 if is_odd else 1.0) * enough_s:
            break
        for n_rows in least:
            seconds = seconds_of(n_rows)
            least[n_rows] = min(least[n_rows], seconds)
            spent += seconds
    return {n_rows: _between(least, n_rows) for n_rows in widths}


def _between(least: Mapping[int, float], n_rows: int) -> float:
    """Seconds of a pass by those of the widths that were measured."""
    first, last = min(least), max(least)
    if n_rows <= last:
        return float(np.interp(n_rows, [*least], [*least.values()]))
    slope = max(0.0, least[last] - least[first]) / max(1, last - first)
    return least[last] + slope * (n_rows - last)


def _measured(target: Target, cache: Cache, n_rows: int) -> float:
    """Seconds of a pass of so many rows: the least of some, unless it is long.

    The first of all reads compiled code and weights. On a CPU the first of a shape is recorded, the second replayed;
    where passes are long that makes no difference.
    """
    least = math.inf
    for _ in range(_REPLAYED):
        least = min(least, _pass_s(target, cache, n_rows))
        if least > _LONG_S:
            break
    return least


def _pass_s(target: Target, cache: Cache, n_rows: int) -> float:
    """Seconds of one pass."""
    # Different tokens: equal rows ask for the same experts, and a pass would look cheaper than it is.
    span = Span(0, [i % target.network.vocab_size for i in range(n_rows)], 0, 0, n_rows)
    cache.recover(0)
    started = target.clock.now()
    target.network.forward(cache.batch(STORE, [span]), cache.stores[STORE]).sum().item()
    return target.clock.now() - started


def _pick(target: Target) -> None:
    """Pick in every way that runs different code."""
    network = target.network
    for sampling in _WARM_UP:
        params = resolve_sampling(sampling, {}, [], network.vocab_size)
        logits = torch.zeros(1, network.vocab_size, device=network.device)
        pick(logits, [Row(params, [0], 1, Counter())])
    everything = np.full(-(-network.vocab_size // 32), -1, np.int32)
    pick(logits, [Row(params, [0], 1, Counter(), allowed=everything)])
