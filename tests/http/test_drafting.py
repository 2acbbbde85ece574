"""`GET /speculation`, and the same figures in `/metrics`."""

from __future__ import annotations

from typing import get_args

import pytest

from slipstream.engine.drafting import WhyNot
from slipstream.server.report.speculation import IN_WORDS
from tests.http.fake import DRAFTING
from tests.http.serving import Served, served
from tests.http.test_metrics import scrape


def test_the_report(server: Served) -> None:
    told = server.http.get("/speculation").json()
    assert (told["why_not"], told["explanation"]) == (
        "network_too_slow",
        "the draft network promises less than its own time and its rows cost",
    )
    assert told["passes"][0] == {
        "rows": 1,
        "ms": 10.0,
        "measured_ms": 11.0,
        "age_s": 0.5,
        "relative_error": 0.1,
    }
    assert told["drafters"]["draft-model"] == {
        "treatment": "tried",
        "asked_share": 0.02,
        "guess_ms": 3.0,
        "fed_row_ms": 0.1,
        "places": [{"place": 0, "acceptance": 0.5, "n_judged": 40}],
    }
    assert (told["gap_ms"], told["off_s"], told["lengths"]) == (1.0, 12.5, [30.0, 0.0, 0.5])
    assert (told["n_lengths"], told["n_outcomes"]) == ([90, 0, 10], DRAFTING.n_outcomes)


def test_where_no_request_may_draft_the_setting_is_named() -> None:
    with served(draft_max=0) as one:
        assert one.http.get("/speculation").json()["explanation"] == "no request may draft (--draft-max 0)"


def test_every_reason_has_words() -> None:
    assert {one for part in get_args(WhyNot) for one in get_args(part)} == set(IN_WORDS)


def test_it_is_guarded_as_slots_are() -> None:
    with served(loaded=False) as one:
        assert [one.http.get(path).status_code for path in ("/slots", "/speculation")] == [503, 503]
        assert one.http.get("/speculation").json() == one.http.get("/slots").json()
    with served() as one:
        one.engine.status = "draining"
        assert one.http.get("/speculation").status_code == 200


def test_a_stopped_engine_leaves_the_counters(server_of_its_own: Served) -> None:
    server_of_its_own.engine.stopped.set()
    answer = server_of_its_own.http.get("/speculation")
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "unavailable_error")
    found = scrape(server_of_its_own)
    assert ("generation_tokens_total",) in found
    assert not [key for key in found if "pass_seconds" in key[0]]


@pytest.fixture
def server_of_its_own():  # type: ignore[no-untyped-def]
    with served() as one:
        yield one


def test_metrics(server: Served) -> None:
    found = {key: value for key, value in scrape(server).items() if key[0].startswith("spec_decode")}
    assert found["spec_decode_pass_seconds", "2"] == 0.012
    assert found["spec_decode_pass_age_seconds", "2"] == 7.0
    assert found["spec_decode_pass_error_ratio", "2"] == 0.2
    assert (found["spec_decode_gap_seconds",], found["spec_decode_off_seconds",]) == (0.001, 12.5)
    assert found["spec_decode_num_passes_total", "drafted"] == 10
    assert found["spec_decode_num_passes_per_length_total", "2"] == 10
    assert ("spec_decode_num_passes_per_length_total", "1") not in found
    reasons = {key[1]: value for key, value in found.items() if key[0] == "spec_decode_why_not"}
    assert set(reasons) == set(IN_WORDS)
    assert [reason for reason, value in reasons.items() if value] == ["network_too_slow"]
    assert found["spec_decode_treatment", "draft-model", "tried"] == 1
    assert found["spec_decode_treatment", "draft-model", "asked"] == 0
    assert found["spec_decode_draft_cost_seconds", "draft-model", "guess"] == 0.003
    assert found["spec_decode_acceptance", "draft-model", "0"] == 0.5
    assert found["spec_decode_num_judged_tokens_total", "draft-model", "0"] == 40
