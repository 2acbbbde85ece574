"""What all replicas have done and are doing, as one engine's counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from slipstream.engine.stats import EngineStats
from slipstream.server.report.tally import added

_SUMMED = (
    *("n_waiting", "n_pages_free", "n_pages_cached", "n_pages_held", "n_steps"),
    *("n_prompt_tokens", "n_completion_tokens", "n_preempted"),
)


def merged(replicas: Mapping[str, EngineStats]) -> EngineStats:
    """Sums over replicas, with each one's own counts beside them. Slots are numbered through, in the replicas' order.

    What replicas that are gone have done is not in it.
    """
    parts = list(replicas.values())
    slots = [slot for one in parts for slot in one.slots]
    averages = _summed([one.step_average_s for one in parts])
    return EngineStats(
        slots=tuple(replace(slot, id=number) for number, slot in enumerate(slots)),
        drafters=added(one.drafters for one in parts),
        disabled_drafters=_names(one.disabled_drafters for one in parts),
        doubtful_drafters=_names(one.doubtful_drafters for one in parts),
        step_s=_summed([one.step_s for one in parts]),
        step_average_s={part: seconds / len(parts) for part, seconds in averages.items()},
        replicas=dict(replicas),
        **{name: sum(getattr(one, name) for one in parts) for name in _SUMMED},
    )


def _summed(several: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {part: sum(one.get(part, 0.0) for one in several) for one in several for part in one}


def _names(groups: Iterable[Iterable[str]]) -> tuple[str, ...]:
    """All names, each once, in the order in which they come."""
    return tuple(dict.fromkeys(name for group in groups for name in group))
