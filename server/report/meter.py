"""Counts of requests for `/metrics`: one record per HTTP request, added to a server's `Meter` when the request ends.

`Envelope` opens the record and closes it. Code in between writes to it through `record()`: a reply how its choices
ended, an error response its code. Durations and token counts become Prometheus histograms under vLLM's names.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from slipstream.engine.api import Done

PREFIX = "slipstream:"
ABORTED = "abort"  # vLLM's reason for a client that left
QUICK_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)
SLOW_S = (
    *(0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5),
    *(5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
Counts = Mapping[tuple[str, ...], float]
TOKENS = tuple(float(one * 10**power) for power in range(6) for one in (1, 2, 5))


@dataclass(slots=True)
class Record:
    """What is known of an HTTP request so far. A reply that broke off has `n_choices` but no `ends`."""

    model: str = ""
    reply_id: str = ""
    n_choices: int = 0
    n: int = 1  # choices per prompt
    ends: Sequence[Done] = ()
    n_images: int = 0  # that the request shows
    code: str | None = None  # of the error that was sent
    # A reply that is made behind the response to the request, which ends with it.
    background: asyncio.Task[None] | None = None
    replicas: tuple[
        str, ...
    ] = ()  # in a cluster: where its choices ran, in the order in which they began there

    @property
    def reasons(self) -> list[str]:
        """How each choice ended; of a reply that broke off, each choice was aborted unless an error ended it."""
        if self.ends:
            return [end.reason for end in self.ends]
        return [] if self.code else [ABORTED] * self.n_choices


_current: ContextVar[Record | None] = ContextVar("record", default=None)


def opened() -> Record:
    """A new record, which `record` returns from now on in this request and in every task that it starts."""
    record = Record()
    _current.set(record)
    return record


def record() -> Record:
    """The current request's record; outside of a request, a fresh record that is then dropped."""
    return _current.get() or Record()


class Histogram:
    """Counts of values by upper bound. Unlike prometheus_client's, it can count a value several times in one call."""

    def __init__(self, name: str, told: str, bounds: tuple[float, ...]) -> None:
        self.name = name
        self.told = told
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self) -> Metric:
        bounds = [*(repr(bound) for bound in self._bounds), "+Inf"]
        counts = accumulate(self._counts)
        buckets = [(bound, float(n)) for bound, n in zip(bounds, counts, strict=True)]
        return HistogramMetricFamily(PREFIX + self.name, self.told, buckets, self._sum)


class Meter:
    """The counts of a server's requests. For the event loop's thread only: it has no lock."""

    def __init__(self) -> None:
        def seconds(name: str, told: str, bounds: tuple[float, ...] = SLOW_S) -> Histogram:
            return Histogram(f"{name}_seconds", told, bounds)

        self._first = seconds("time_to_first_token", "From admission to the first token, by choice.")
        self._between = seconds(
            "inter_token_latency",
            "Mean time between a choice's tokens, counted once for each of them.",
            QUICK_S,
        )
        self._whole = seconds("e2e_request_latency", "From a request's headers to its reply's last byte.")
        self._queued = seconds("request_queue_time", "From admission to a slot, by choice.")
        self._prompt = Histogram("request_prompt_tokens", "Tokens of a choice's prompt.", TOKENS)
        self._generated = Histogram("request_generation_tokens", "Tokens of a choice's reply.", TOKENS)
        self._n_queried = 0
        self._n_hit = 0
        self._reasons: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()

    def ended(self, record: Record, seconds: float) -> None:
        """Count a request that has ended; `seconds`: how long it took."""
        if record.code is not None:
            self._errors[record.code] += 1
        self._reasons.update(record.reasons)
        if record.ends:
            self._whole.observe(seconds)
        for end in record.ends:
            self._choice(end)

    def _choice(self, end: Done) -> None:
        usage, timings = end.usage, end.timings
        self._first.observe(timings.queue_s + timings.prompt_s)
        self._queued.observe(timings.queue_s)
        self._prompt.observe(usage.n_prompt)
        self._generated.observe(usage.n_completion)
        if usage.n_completion > 1:
            n_later = usage.n_completion - 1
            self._between.observe(timings.generation_s / n_later, n_later)
        self._n_queried += usage.n_prompt
        self._n_hit += usage.n_cached

    def collect(self) -> Iterator[Metric]:
        """All metrics, each family once."""
        for histogram in (
            *(self._first, self._between, self._whole),
            *(self._queued, self._prompt, self._generated),
        ):
            yield histogram.family()
        about = "Prompt tokens of ended choices that were looked up in the prefix cache."
        yield CounterMetricFamily(PREFIX + "prefix_cache_queries", about, self._n_queried)
        about = "Prompt tokens of ended choices that were taken from the prefix cache."
        yield CounterMetricFamily(PREFIX + "prefix_cache_hits", about, self._n_hit)
        about = "Choices by how they ended; abort: the client left."
        yield labelled(
            "request_success", about, ("finished_reason",), {(one,): n for one, n in self._reasons.items()}
        )
        about = "Requests answered with an error, by its code."
        yield labelled("request_errors", about, ("code",), {(one,): n for one, n in self._errors.items()})


def labelled(
    name: str,
    about: str,
    labels: Sequence[str],
    counts: Counts,
    kind: type[CounterMetricFamily | GaugeMetricFamily] = CounterMetricFamily,
) -> Metric:
    """A counter or gauge with labels; the keys of `counts` are the labels' values."""
    family = kind(PREFIX + name, about, labels=labels)
    for values, count in counts.items():
        family.add_metric(values, count)
    return family
