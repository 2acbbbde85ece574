"""`/metrics`, read back with Prometheus' own parser."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from slipstream.engine.api import Failed
from slipstream.engine.drafting import Drafting
from slipstream.engine.errors import EngineStopped, Overloaded, TimedOut
from slipstream.engine.stats import DrafterCount
from tests.http.fake import FakeEngine, counted, delta, done
from tests.http.serving import Served, send, served, until

Samples = dict[tuple[str, ...], float]
HISTOGRAMS = (
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
    *("request_queue_time_seconds", "request_prompt_tokens", "request_generation_tokens"),
)


@pytest.fixture
def server() -> Iterator[Served]:
    """One per test: a request is logged and counted a moment after its reply."""
    with served() as one:
        yield one


def scrape(server: Served) -> Samples:
    """Every sample under its name and its label values in order of the label names."""
    answer = server.http.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found: Samples = {}
    for family in text_string_to_metric_families(answer.text):
        assert family.documentation
        for sample in family.samples:
            assert sample.name.startswith("slipstream:")
            key = (
                sample.name.removeprefix("slipstream:"),
                *(sample.labels[name] for name in sorted(sample.labels)),
            )
            assert key not in found
            found[key] = sample.value
    return found


def test_the_engine(server: Served) -> None:
    found = scrape(server)
    of_engine = {key: value for key, value in found.items() if len(key) == 1}
    for name in HISTOGRAMS:
        assert of_engine.pop((f"{name}_count",)) >= 0
        assert of_engine.pop((f"{name}_sum",)) >= 0
    assert of_engine == {
        ("prefix_cache_queries_total",): of_engine["prefix_cache_queries_total",],
        ("prefix_cache_hits_total",): of_engine["prefix_cache_hits_total",],
        ("prompt_tokens_total",): 20,
        ("generation_tokens_total",): 30,
        ("num_preemptions_total",): 0,
        ("num_requests_running",): 0,
        ("num_requests_waiting",): 0,
        ("kv_cache_usage_perc",): 2 / 64,
        ("spec_decode_gap_seconds",): 0.001,
        ("spec_decode_off_seconds",): 12.5,
    }


def test_parts_of_the_steps(server: Served) -> None:
    parts = {key[1]: value for key, value in scrape(server).items() if key[0] == "step_seconds_total"}
    assert parts == {"forward": 2.5, "keep": 0.25}


def test_drafters(server: Served) -> None:
    found = scrape(server)
    assert {key: value for key, value in found.items() if key[1:2] == ("ngram-simple",)} == {
        ("spec_decode_num_drafts_total", "ngram-simple"): 10,
        ("spec_decode_num_draft_tokens_total", "ngram-simple"): 20,
        ("spec_decode_num_accepted_tokens_total", "ngram-simple"): 5,
        ("spec_decode_num_accepted_tokens_per_pos_total", "ngram-simple", "0"): 5,
        ("wasted_verify_tokens_total", "ngram-simple"): 15,
        ("spec_decode_seconds_total", "ngram-simple", "begin"): 0.001,
        ("spec_decode_seconds_total", "ngram-simple", "draft"): 0.002,
        ("spec_decode_seconds_total", "ngram-simple", "accept"): 0.003,
        ("spec_decode_treatment", "ngram-simple", "asked"): 1,
        ("spec_decode_treatment", "ngram-simple", "tried"): 0,
        ("spec_decode_treatment", "ngram-simple", "left_out"): 0,
        ("spec_decode_treatment", "ngram-simple", "switched_off"): 0,
        ("spec_decode_draft_cost_seconds", "ngram-simple", "guess"): 0.00002,
        ("spec_decode_draft_cost_seconds", "ngram-simple", "fed_row"): 0,
        ("spec_decode_acceptance", "ngram-simple", "0"): 0.25,
        ("spec_decode_num_judged_tokens_total", "ngram-simple", "0"): 8,
    }
    assert found["spec_decode_num_draft_tokens_total", "prediction"] == 6
    assert not [key for key in found if "per_pos" in key[0] and key[1] == "prediction"]


class Counting(FakeEngine):
    """A fake whose figures may be set."""

    drafters: dict[str, DrafterCount] = {}  # noqa: RUF012 - replaced, never changed
    n_waiting = 0

    def stats(self):  # type: ignore[no-untyped-def]
        return replace(super().stats(), drafters=self.drafters, n_waiting=self.n_waiting)

    async def speculation(self) -> Drafting:
        raise EngineStopped("no figures of it")


def test_servers_share_nothing_and_scrapes_keep_nothing() -> None:
    first, second = Counting(), Counting()
    second.drafters, second.n_waiting = {'a"\\\n': counted(7, 3)}, 9
    with served(first) as one, served(second) as other:
        assert not [key for key in scrape(one) if key[0].startswith("spec_decode")]
        found = scrape(other)
        assert found["spec_decode_num_drafts_total", 'a"\\\n'] == 7
        assert (scrape(one)["num_requests_waiting",], found["num_requests_waiting",]) == (0, 9)
        second.drafters = {"suffix": replace(counted(8, 8), accepted_by_position=(8, 4, 2))}
        found = scrape(other)
        assert not [key for key in found if key[1:2] == ('a"\\\n',)]
        by_place = [
            found["spec_decode_num_accepted_tokens_per_pos_total", "suffix", place] for place in "012"
        ]
        assert by_place == [8, 4, 2]


def growth(server: Served, act: Callable[[], object], n_ended: int) -> Samples:
    """What `act`, after which `n_ended` requests are over, adds to the samples."""

    def n_over(found: Samples) -> float:
        return sum(
            value
            for key, value in found.items()
            if key[0] in ("request_success_total", "request_errors_total")
        )

    before = scrape(server)
    act()
    until(lambda: n_over(scrape(server)) == n_over(before) + n_ended)
    after = scrape(server)
    return {key: value - before.get(key, 0) for key, value in after.items() if value != before.get(key, 0)}


def test_a_reply_is_counted_where_it_ends(server: Served) -> None:
    grown = growth(server, lambda: server.chat(n=2, max_tokens=6), 2)
    assert grown.pop(("e2e_request_latency_seconds_sum",)) > 0
    assert {key: value for key, value in grown.items() if "_bucket" not in key[0]} == pytest.approx(
        {
            ("request_success_total", "length"): 2,
            ("prefix_cache_queries_total",): 6,
            ("prefix_cache_hits_total",): 2,
            ("time_to_first_token_seconds_count",): 2,
            ("time_to_first_token_seconds_sum",): 0.042,
            ("inter_token_latency_seconds_count",): 10,  # the first token of a choice has none
            ("inter_token_latency_seconds_sum",): 0.1,
            ("e2e_request_latency_seconds_count",): 1,
            ("request_queue_time_seconds_count",): 2,
            ("request_queue_time_seconds_sum",): 0.002,
            ("request_prompt_tokens_count",): 2,
            ("request_prompt_tokens_sum",): 6,
            ("request_generation_tokens_count",): 2,
            ("request_generation_tokens_sum",): 12,
        }
    )
    lowest = {
        bound: grown.get(("time_to_first_token_seconds_bucket", bound), 0)
        for bound in ("0.02", "0.05", "+Inf")
    }
    assert lowest == {"0.02": 0, "0.05": 2, "+Inf": 2}
    of_tokens = {
        bound: grown.get(("request_generation_tokens_bucket", bound), 0) for bound in ("5.0", "10.0")
    }
    assert of_tokens == {"5.0": 0, "10.0": 2}
    assert grown["inter_token_latency_seconds_bucket", "0.01"] == 10
    assert ("inter_token_latency_seconds_bucket", "0.005") not in grown


def test_streams_count_alike(server: Served) -> None:
    grown = growth(server, lambda: server.events(max_tokens=6), 1)
    assert grown["request_success_total", "length"] == 1
    assert grown["request_generation_tokens_sum",] == 6


def test_errors_are_counted_by_code(server: Served) -> None:
    def act() -> None:
        server.chat(temperature=-1)
        server.engine.refusal = Overloaded("64 wait", 1.0)
        server.chat()
        server.chat(stream=True)
        server.engine.refusal = None
        server.engine.script = lambda request: [delta("x"), Failed(TimedOut(1.0))]
        server.chat()
        server.events()
        server.http.get("/nothing")

    grown = growth(server, act, 6)
    assert {key: value for key, value in grown.items() if key[0] != "e2e_request_latency_seconds"} == {
        ("request_errors_total", "invalid_value"): 1,
        ("request_errors_total", "queue_full"): 2,
        ("request_errors_total", "request_timeout"): 2,
        ("request_errors_total", "not_found"): 1,
    }


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
def test_a_client_that_leaves_is_counted_as_aborted(server: Served, fields: dict[str, object]) -> None:
    server.engine.script = lambda request: [delta("x"), 30.0, done(request, 1)]

    def act() -> None:
        with send(server, n=2, **fields):
            until(lambda: len(server.engine.running) == 2)
            time.sleep(0.3)  # the reply is begun only when both are admitted

    assert growth(server, act, 2) == {("request_success_total", "abort"): 2}


def test_what_is_running(server: Served) -> None:
    (key,) = [key for key in scrape(server) if key[0] == "build_info"]
    assert key[1:4] == ("cpu", "float32", "fake-1")
    assert "fake/model" in key


def test_the_key_is_asked_for() -> None:
    with served(api_key="k") as server:
        assert server.http.get("/metrics").status_code == 401
        assert server.http.get("/metrics", headers={"x-api-key": "k"}).status_code == 200


@pytest.mark.parametrize(("status", "code"), [("draining", 200), ("failed", 200), ("loading", 503)])
def test_it_answers_as_long_as_there_is_an_engine(server: Served, status: str, code: int) -> None:
    server.engine.status = status
    assert server.http.get("/metrics").status_code == code
