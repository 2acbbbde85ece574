"""How many drafts of a span are accepted: by the target's own picks, or at random for benchmarks.

Everything the server promises rests on `coupled`. `SyntheticAcceptance` breaks it on purpose: it measures the machinery
at a chosen acceptance without a trained draft, and its text is senseless.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from itertools import pairwise

import numpy as np

from slipstream.engine.errors import SettingError
from slipstream.engine.settings import Settings
from slipstream.engine.slot import Slot

_GOLDEN = (5.0**0.5 - 1.0) / 2.0

# (slot, its drafts, the target's picks at the rows after 0, 1, … drafts) -> accepted drafts
Acceptance = Callable[[Slot, Sequence[int], Sequence[int]], int]


def coupled(slot: Slot, drafts: Sequence[int], picks: Sequence[int]) -> int:
    """A draft survives while it equals the target's own pick."""
    n_accepted = 0
    while n_accepted < len(drafts) and picks[n_accepted] == drafts[n_accepted]:
        n_accepted += 1
    return n_accepted


class SyntheticAcceptance:
    """The first i drafts of a pass are all accepted with probability `rates[i - 1]`, whatever the target says.

    A drafted end token is never accepted. A request's passes are spread over the rates evenly (additive recurrence),
    from a place that its seed says: a few dozen passes have the mean already, and a run can be repeated. Source:
    llama.cpp's synthetic acceptance, which draws for each token.
    """

    def __init__(self, rates: Sequence[float], eos_ids: Set[int]) -> None:
        self._rates = rates
        self._eos_ids = eos_ids

    def __call__(self, slot: Slot, drafts: Sequence[int], picks: Sequence[int]) -> int:
        n_before = sum(tally.n_drafts for tally in slot.stats.drafters.values())
        place = (np.random.default_rng(slot.sampling.seed).random() + n_before * _GOLDEN) % 1.0
        n_accepted = 0
        for token_id, rate in zip(drafts, self._rates, strict=False):
            if token_id in self._eos_ids or place >= rate:
                break
            n_accepted += 1
        return n_accepted


def is_synthetic(settings: Settings) -> bool:
    """Whether drafts are accepted at random. All of them are verified in full then, or the rates would not be met."""
    return settings.spec_synth_len is not None or settings.spec_synth_rates is not None


def synthetic_rates(settings: Settings, types: Sequence[str]) -> tuple[float, ...] | None:
    """The rates that the settings ask for, or None. Raises `SettingError` for impossible rates."""
    length, listed = settings.spec_synth_len, settings.spec_synth_rates
    if not is_synthetic(settings):
        return None
    name, value = ("spec_synth_len", length) if listed is None else ("spec_synth_rates", listed)
    if length is not None and listed is not None:
        raise SettingError(name, value, "cannot be given together with --spec-synth-len")
    if not types or not settings.draft_max:
        raise SettingError(name, value, "has no use without a drafter (--spec-type) and --draft-max above 0")
    return (
        _rates_for(length, settings.draft_max)
        if length is not None
        else _listed(str(listed), settings.draft_max)
    )


def _rates_for(length: float, n_max: int) -> tuple[float, ...]:
    """Rates p, p², … whose sum is length - 1, by bisection: `length` tokens a pass where n_max drafts are verified."""
    if length > n_max + 1:
        raise SettingError("spec_synth_len", length, f"is more than --draft-max + 1 = {n_max + 1}")
    low, high = 0.0, 1.0
    for _ in range(48):
        middle = (low + high) / 2
        low, high = (
            (low, middle) if sum(middle**i for i in range(1, n_max + 1)) >= length - 1 else (middle, high)
        )
    return tuple(high**i for i in range(1, n_max + 1))


def _listed(text: str, n_max: int) -> tuple[float, ...]:
    try:
        rates = tuple(float(one) for one in text.split(","))
    except ValueError:
        raise SettingError("spec_synth_rates", text, "must be a comma list of numbers") from None
    if len(rates) > n_max:
        raise SettingError("spec_synth_rates", text, f"has more rates than --draft-max {n_max}")
    if not all(0.0 <= after <= before for before, after in pairwise([1.0, *rates])):
        raise SettingError("spec_synth_rates", text, "must fall from at most 1 to at least 0")
    return rates
