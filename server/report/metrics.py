"""`/metrics` for Prometheus: the engine's counters, read anew for each scrape, and the meter's counts of requests.

The names after the prefix are those of vLLM and llama-server, so that dashboards carry over. Their counts of
speculation are labelled per drafter here. A draft that two drafters made counts as a draft of each, so a sum over
`drafter` is right for tokens but too high for drafts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from operator import attrgetter

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.responses import PlainTextResponse, Response

from slipstream.engine.api import AsyncEngine, ModelInfo
from slipstream.engine.drafting import Drafting
from slipstream.engine.errors import EngineStopped
from slipstream.engine.stats import DrafterCount, EngineStats
from slipstream.server import version
from slipstream.server.describe.openapi import failing
from slipstream.server.http.gate import Gate
from slipstream.server.report.meter import PREFIX, Counts, Meter, labelled
from slipstream.server.report.speculation import families
from slipstream.server.report.tally import seconds_of


def routes(gate: Gate, meter: Meter) -> APIRouter:
    """The route `/metrics`: open while the engine is loaded, behind the API key like the other status routes."""
    router = APIRouter()
    started = str(int(time.time()))  # by which llama-server's clients notice a restart

    @router.get(
        "/metrics", summary="Figures for Prometheus", response_class=PlainTextResponse, responses=failing(503)
    )
    async def metrics() -> Response:
        engine = gate.for_looking()
        stats = engine.stats()
        text = generate_latest(Scrape(stats, engine.info, meter, await _drafting(engine, stats)))
        headers = {"content-type": CONTENT_TYPE_PLAIN_0_0_4, "process-start-time-unix": started}
        return Response(text, headers=headers)

    return router


async def _drafting(engine: AsyncEngine, stats: EngineStats) -> Drafting | None:
    """Of one engine; None if it is not to be had. Of several, each believes something else."""
    if stats.replicas:
        return None
    try:
        return await engine.speculation()
    except EngineStopped:  # the counters are still worth reading
        return None


class Scrape:
    """A server's state at one moment, as a Prometheus collector. It needs no registry, so two servers share nothing."""

    def __init__(
        self, stats: EngineStats, info: ModelInfo, meter: Meter, drafting: Drafting | None = None
    ) -> None:
        self._stats = stats
        self._drafting = drafting
        self._info = info
        self._meter = meter

    def collect(self) -> Iterator[Metric]:
        """All metrics, each family once."""
        yield self._build()
        yield from self._of_engines()
        if self._drafting is not None:
            yield from families(self._drafting)
        yield from self._meter.collect()

    def _of_engines(self) -> Iterator[Metric]:
        """What engines count; of several, each family once, with a label that says which."""
        parts = self._stats.replicas or {"": self._stats}
        found = [[*_engine(stats), *_speculation(stats)] for stats in parts.values()]
        for alike in zip(*found, strict=True):
            whole = alike[0]
            if self._stats.replicas:
                whole.samples = [
                    sample._replace(labels={**sample.labels, "replica": name})
                    for name, family in zip(parts, alike, strict=True)
                    for sample in family.samples
                ]
            yield whole

    def _build(self) -> Metric:
        info = self._info
        labels = {
            "version": version(),
            "model": info.name,
            "fingerprint": info.fingerprint,
            "device": info.device,
            "dtype": info.dtype,
        }
        family = GaugeMetricFamily(PREFIX + "build_info", "What is running; always 1.", labels=list(labels))
        family.add_metric(list(labels.values()), 1)
        return family


def _engine(stats: EngineStats) -> Iterator[Metric]:
    n_pages = stats.n_pages_free + stats.n_pages_cached + stats.n_pages_held
    for name, about, value in (
        (
            "prompt_tokens",
            "Prompt tokens processed; those taken from the prefix cache are not counted.",
            stats.n_prompt_tokens,
        ),
        ("generation_tokens", "Tokens generated.", stats.n_completion_tokens),
        ("num_preemptions", "Requests put aside to make room for others.", stats.n_preempted),
    ):
        yield CounterMetricFamily(PREFIX + name, about, value)
    for name, about, level in (
        ("num_requests_running", "Requests that hold a slot.", sum(slot.busy for slot in stats.slots)),
        ("num_requests_waiting", "Requests that wait for a slot.", stats.n_waiting),
        (
            "kv_cache_usage_perc",
            "Pages held by slots, 0 to 1; pages only kept for later prompts count as free.",
            stats.n_pages_held / max(1, n_pages),
        ),
    ):
        yield GaugeMetricFamily(PREFIX + name, about, level)
    yield labelled(
        "step_seconds",
        "Time of the engine's steps by part; on a GPU forward and pick are launches, wait is for the device.",
        ("part",),
        {(part,): seconds for part, seconds in stats.step_s.items()},
    )


def _speculation(stats: EngineStats) -> Iterator[Metric]:
    drafters = stats.drafters.items()
    for name, about, total in (
        ("spec_decode_num_drafts", "Verified drafts with tokens of the drafter.", attrgetter("n_drafts")),
        ("spec_decode_num_draft_tokens", "Tokens drafted and verified.", attrgetter("n_drafted")),
        ("spec_decode_num_accepted_tokens", "Drafted tokens accepted.", attrgetter("n_accepted")),
        ("wasted_verify_tokens", "Drafted tokens that were verified and rejected.", _n_rejected),
    ):
        yield labelled(name, about, ("drafter",), {(drafter,): total(count) for drafter, count in drafters})
    by_place: Counts = {
        (drafter, str(position)): n_accepted
        for drafter, count in drafters
        for position, n_accepted in enumerate(count.accepted_by_position)
    }
    about = "Accepted tokens by place in the draft."
    yield labelled("spec_decode_num_accepted_tokens_per_pos", about, ("drafter", "position"), by_place)
    times: Counts = {
        (drafter, verb): seconds for drafter, count in drafters for verb, seconds in seconds_of(count).items()
    }
    yield labelled("spec_decode_seconds", "Time spent in the drafter, by verb.", ("drafter", "verb"), times)


def _n_rejected(count: DrafterCount) -> int:
    return count.n_drafted - count.n_accepted
