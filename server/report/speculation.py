"""`GET /speculation`: what drafting costs, promises and does, and why nothing is drafted; the same for `/metrics`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any, get_args

from fastapi import APIRouter
from prometheus_client.core import GaugeMetricFamily, Metric
from starlette.responses import Response

from slipstream.engine.drafting import DrafterState, Drafting, Treatment, WhyNot
from slipstream.engine.settings import Settings
from slipstream.server.describe.openapi import answers
from slipstream.server.http.body import answer_json
from slipstream.server.http.gate import Gate
from slipstream.server.report.meter import PREFIX, Counts, labelled
from slipstream.server.report.replies import SpeculationReport
from slipstream.server.report.tally import ms

IN_WORDS: Mapping[WhyNot, str] = {
    "no_drafter": "no drafter is loaded (--spec-type)",
    "not_asked_for": "no request asks for speculation",
    "switched_off": "the drafters that requests ask for are switched off after failures: see the log",
    "no_guess": "drafters have no guess",
    "rows_too_dear": "guesses promise less than their rows cost",
    "network_too_slow": "the draft network promises less than its own time and its rows cost",
    "not_worth_asking": "drafters are asked only now and then, as their guesses have not been worth the asking",
    "plain_measured": "a pass without drafts is measured, to see that drafts still pay",
}


_NEVER = "no request may draft (--draft-max 0)"


def routes(gate: Gate, settings: Settings) -> APIRouter:
    router = APIRouter()

    @router.get(
        "/speculation",
        summary="What drafting costs, promises and does; why nothing is drafted",
        responses=answers(SpeculationReport, 503),
    )
    async def speculation() -> Response:
        return answer_json(_shown(await gate.for_looking().speculation(), settings))

    return router


def _shown(told: Drafting, settings: Settings) -> dict[str, Any]:
    explanation = None if told.why_not is None else IN_WORDS[told.why_not] if settings.draft_max else _NEVER
    return {
        "why_not": told.why_not,
        "explanation": explanation,
        "drafted_share": round(told.drafted_share, 4),
        "off_s": round(told.off_s, 3),
        "passes": [
            {
                "rows": one.n_rows,
                "ms": ms(one.seconds),
                "measured_ms": ms(one.measured_s),
                "age_s": round(one.age_s, 3),
                "relative_error": round(one.error, 4),
            }
            for one in told.widths
        ],
        "gap_ms": ms(told.gap_s),
        "drafters": {name: _drafter(state) for name, state in told.drafters.items()},
        "lengths": [round(one, 2) for one in told.lengths],
        "n_lengths": list(told.n_lengths),
        "n_outcomes": dict(told.n_outcomes),
    }


def _drafter(state: DrafterState) -> dict[str, Any]:
    return {
        "treatment": state.treatment,
        "asked_share": round(state.asked_share, 4),
        "guess_ms": ms(state.guess_s),
        "fed_row_ms": ms(state.fed_row_s),
        "places": [
            {"place": one.place, "acceptance": round(one.acceptance, 4), "n_judged": one.n_judged}
            for one in state.places
        ],
    }


def families(told: Drafting) -> Iterator[Metric]:
    """The same for Prometheus."""
    yield labelled(
        "spec_decode_num_passes",
        "Passes that could carry drafts, by what became of them.",
        ("outcome",),
        {(outcome,): n for outcome, n in told.n_outcomes.items()},
    )
    yield labelled(
        "spec_decode_num_passes_per_length",
        "Slots' passes that could carry drafts, by the tokens drafted.",
        ("length",),
        {(str(length),): n for length, n in enumerate(told.n_lengths) if n},
    )
    yield labelled(
        "spec_decode_why_not",
        "1 for the reason why nothing is drafted.",
        ("reason",),
        {(reason,): told.why_not == reason for reason in IN_WORDS},
        GaugeMetricFamily,
    )
    for name, about, seconds in (
        ("off", "Seconds of work since the last draft token, while requests asked for drafts.", told.off_s),
        ("gap", "The device's wait for the host between two passes.", told.gap_s),
    ):
        yield GaugeMetricFamily(f"{PREFIX}spec_decode_{name}_seconds", about, seconds)
    for name, about, figure in (
        ("seconds", "What a pass is reckoned to cost, by its rows.", attrgetter("seconds")),
        ("age_seconds", "Seconds of work since a pass of so many rows was measured.", attrgetter("age_s")),
        ("error_ratio", "Standard error of a pass's measured cost, as a share of it.", attrgetter("error")),
    ):
        costs: Counts = {(str(one.n_rows),): figure(one) for one in told.widths}
        yield labelled(f"spec_decode_pass_{name}", about, ("rows",), costs, GaugeMetricFamily)
    yield from _of_drafters(told.drafters)


def _of_drafters(drafters: Mapping[str, DrafterState]) -> Iterator[Metric]:
    yield labelled(
        "spec_decode_treatment",
        "1 for how the drafter is treated lately.",
        ("drafter", "treatment"),
        {
            (name, one): state.treatment == one
            for name, state in drafters.items()
            for one in get_args(Treatment)
        },
        GaugeMetricFamily,
    )
    yield labelled(
        "spec_decode_draft_cost_seconds",
        "Of a network's position or a text drafter's ask (guess), and of a row that a network is fed (fed_row).",
        ("drafter", "part"),
        {
            (name, part): seconds
            for name, state in drafters.items()
            for part, seconds in (("guess", state.guess_s), ("fed_row", state.fed_row_s))
        },
        GaugeMetricFamily,
    )
    places = [(name, one) for name, state in drafters.items() for one in state.places]
    yield labelled(
        "spec_decode_acceptance",
        "Acceptance believed of tokens from this place of a guess on, if those before them are right.",
        ("drafter", "position"),
        {(name, str(one.place)): one.acceptance for name, one in places},
        GaugeMetricFamily,
    )
    yield labelled(
        "spec_decode_num_judged_tokens",
        "Guessed tokens that the text has confirmed or refuted, verified or not.",
        ("drafter", "position"),
        {(name, str(one.place)): one.n_judged for name, one in places},
    )
