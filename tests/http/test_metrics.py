"""`/metrics`, read back with Prometheus' own parser."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.api import DrafterCount
from tests.http.fake import FakeEngine, counted
from tests.http.serving import Served, served

Samples = dict[tuple[str, ...], float]


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
    assert {key: value for key, value in found.items() if len(key) == 1} == {
        ("prompt_tokens_total",): 20,
        ("generation_tokens_total",): 30,
        ("num_preemptions_total",): 0,
        ("num_requests_running",): 0,
        ("num_requests_waiting",): 0,
        ("kv_cache_usage_perc",): 2 / 64,
    }


def test_drafters(server: Served) -> None:
    found = scrape(server)
    assert {key: value for key, value in found.items() if key[1:2] == ("ngram-simple",)} == {
        ("spec_decode_num_drafts_total", "ngram-simple"): 10,
        ("spec_decode_num_draft_tokens_total", "ngram-simple"): 20,
        ("spec_decode_num_accepted_tokens_total", "ngram-simple"): 5,
        ("spec_decode_num_accepted_tokens_per_pos_total", "ngram-simple", "0"): 5,
        ("spec_decode_seconds_total", "ngram-simple", "begin"): 0.001,
        ("spec_decode_seconds_total", "ngram-simple", "draft"): 0.002,
        ("spec_decode_seconds_total", "ngram-simple", "accept"): 0.003,
    }
    assert found["spec_decode_num_draft_tokens_total", "prediction"] == 6
    assert not [key for key in found if "per_pos" in key[0] and key[1] == "prediction"]


class Counting(FakeEngine):
    """A fake whose figures may be set."""

    drafters: dict[str, DrafterCount] = {}  # noqa: RUF012 - replaced, never changed
    n_waiting = 0

    def stats(self):  # type: ignore[no-untyped-def]
        return replace(super().stats(), drafters=self.drafters, n_waiting=self.n_waiting)


def test_servers_share_nothing_and_scrapes_keep_nothing() -> None:
    first, second = Counting(), Counting()
    second.drafters, second.n_waiting = {'a"\\\n': counted(7, 3)}, 9
    with served(first) as one, served(second) as other:
        assert not [key for key in scrape(one) if len(key) > 1]
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


def test_the_key_is_asked_for() -> None:
    with served(api_key="k") as server:
        assert server.http.get("/metrics").status_code == 401
        assert server.http.get("/metrics", headers={"x-api-key": "k"}).status_code == 200


@pytest.mark.parametrize(("status", "code"), [("draining", 200), ("failed", 200), ("loading", 503)])
def test_it_answers_as_long_as_there_is_an_engine(server: Served, status: str, code: int) -> None:
    server.engine.status = status
    assert server.http.get("/metrics").status_code == code
