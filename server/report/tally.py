"""Numbers for JSON, which are always finite; and the counts of each drafter, for a request or for the whole server.

A drafter's object has llama-server's `draft_n` and `draft_n_accepted`. It also has what llama-server and vLLM only
write to their logs: calls and times of the drafter's methods ("verbs"), drafts, and acceptance by position.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from itertools import zip_longest
from typing import Any

from slipstream.engine.stats import DrafterCount

VERBS = ("begin", "draft", "accept")


def ms(seconds: float) -> float:
    """Seconds as milliseconds, rounded to the microsecond."""
    return round(seconds * 1000, 3)


def ratio(part: float, whole: float) -> float:
    """`part / whole`, to six places; 0 where `whole` is not positive, as JSON has neither NaN nor infinity."""
    return round(part / whole, 6) if whole > 0 else 0.0


def added(several: Iterable[Mapping[str, DrafterCount]]) -> dict[str, DrafterCount]:
    """The counts of several requests, or of several engines, added up by drafter."""
    totals: dict[str, DrafterCount] = {}
    for counts in several:
        for name, count in counts.items():
            totals[name] = _sum(totals.get(name, DrafterCount()), count)
    return totals


def _sum(one: DrafterCount, other: DrafterCount) -> DrafterCount:
    def plus(name: str) -> Any:
        mine, more = getattr(one, name), getattr(other, name)
        if isinstance(mine, tuple):
            return tuple(a + b for a, b in zip_longest(mine, more, fillvalue=0))
        return mine + more

    return DrafterCount(**{each.name: plus(each.name) for each in fields(DrafterCount)})


def shown(counts: Mapping[str, DrafterCount]) -> dict[str, dict[str, Any]]:
    """The counts as JSON objects, by drafter."""
    return {name: _shown(count) for name, count in counts.items()}


def _shown(count: DrafterCount) -> dict[str, Any]:
    """Rates by position are relative to all drafts, however long, as llama-server and vLLM print them."""
    drafted, accepted = by_position([count])
    return {
        "draft_n": count.n_drafted,
        "draft_n_accepted": count.n_accepted,
        "n_drafts": count.n_drafts,
        "n_drafts_accepted": count.n_drafts_accepted,
        "draft_n_per_position": drafted,
        "draft_n_accepted_per_position": accepted,
        "acceptance_rate_per_position": [ratio(n, count.n_drafts) for n in count.accepted_by_position],
        "calls": {verb: getattr(count, f"n_{verb}_calls") for verb in VERBS},
        "ms": {verb: ms(seconds) for verb, seconds in seconds_of(count).items()},
    }


def by_position(counts: Iterable[DrafterCount]) -> tuple[list[int], list[int]]:
    """(tokens drafted, of them accepted) at each place of their drafts, up to the last place where any was drafted."""
    several = list(counts)
    drafted = [sum(at) for at in zip_longest(*(one.drafted_by_position for one in several), fillvalue=0)]
    accepted = [sum(at) for at in zip_longest(*(one.accepted_by_position for one in several), fillvalue=0)]
    return drafted, accepted + [0] * (len(drafted) - len(accepted))


def seconds_of(count: DrafterCount) -> dict[str, float]:
    """Time spent in each verb."""
    return {verb: getattr(count, f"{verb}_s") for verb in VERBS}


def in_short(counts: Mapping[str, DrafterCount]) -> str | None:
    """`suffix:12/20,prediction:40/44`: accepted and drafted tokens for a log line; None if nothing was drafted."""
    parts = [f"{name}:{one.n_accepted}/{one.n_drafted}" for name, one in counts.items() if one.n_drafted]
    return ",".join(parts) or None
