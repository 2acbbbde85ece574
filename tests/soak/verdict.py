"""Whether a soak was passed: what its tally and its samples say of losses and leaks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from statistics import median

from tests.soak.client import Tally
from tests.soak.samples import Sample

MOST_GROWTH = 1.05  # of memory, between a sixth of the run and its end
# Of a run whose memory and drafts are looked at. Caches fill up to their bounds in the first minutes, among them one
# compiled matrix product per shape; and a few drafts may happen to be all accepted.
LEAST_S = 900.0
# Threads of asyncio's own pool, which grows as it is used, up to this.
POOL = min(32, (os.cpu_count() or 1) + 4)
SLACK_MIB = 2.0  # of a child process, which is small


def failures(tally: Tally, before: Sample, samples: Sequence[Sample], after: Sample) -> list[str]:
    """What is wrong, in words; nothing if the run was passed.

    before, after: without load. samples: under load, in order.
    """
    found = [*_wrong(tally), *_held(before, after)]
    if samples and samples[-1].at_s >= LEAST_S:
        found += [*_undrafted(before, after), *_grown(samples)]
    return found


def _wrong(tally: Tally) -> Iterable[str]:
    for sort, n in sorted(tally.n_wrong.items()):
        yield f"{n} operations: {sort}"
    if not tally.n_compared:
        yield "no text was compared"


def _undrafted(before: Sample, after: Sample) -> Iterable[str]:
    """Texts that are the same mean something where drafts were accepted, and others rejected."""
    n_drafted, n_accepted = (
        getattr(after, name) - getattr(before, name) for name in ("n_drafted", "n_accepted")
    )
    if not n_accepted or n_accepted == n_drafted:
        yield f"of {n_drafted} drafted tokens {n_accepted} were accepted: both has to occur"


def _held(before: Sample, after: Sample) -> Iterable[str]:
    """What is there still after the last request, beyond what was there before the first."""
    for name, most in (
        ("n_busy", 0),
        ("n_waiting", 0),
        ("n_pages_held", 0),
        ("n_files", before.n_files),
        ("n_threads", before.n_threads + POOL),
        ("n_children", before.n_children),
    ):
        if (found := getattr(after, name)) > most:
            yield f"{name}: {found} in the end, {most} allowed"
    n_before, n_after = (one.n_pages_free + one.n_pages_cached for one in (before, after))
    if n_after != n_before:
        yield f"{n_after} pages free or cached in the end, {n_before} before"


def _grown(samples: Sequence[Sample]) -> Iterable[str]:
    for name, slack in (("rss_mib", 0.0), ("children_mib", SLACK_MIB)):
        first, last = memory(samples, name)
        if last > first * MOST_GROWTH + slack:
            yield f"{name}: {first:.0f} after a sixth of the run, {last:.0f} in the end"


def memory(samples: Sequence[Sample], name: str) -> tuple[float, float]:
    """MiB after a sixth of the run and in the end: medians over a twelfth of it each."""
    end = samples[-1].at_s
    early = [getattr(one, name) for one in samples if end / 6 <= one.at_s <= end / 4]
    late = [getattr(one, name) for one in samples if one.at_s >= end * 11 / 12]
    return median(early), median(late)
