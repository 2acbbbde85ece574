"""A request's own speculation settings: what reaches the engine, and what the reply tells of them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.http.serving import Served


@pytest.mark.parametrize(
    ("fields", "types", "n_max", "n_min", "p_min"),
    [
        ({}, None, None, None, None),
        ({"speculative.n_max": 2, "speculative.n_min": 1, "speculative.p_min": 0.5}, None, 2, 1, 0.5),
        ({"speculative": {"n_max": 2}, "speculative.p_min": 1}, None, 2, None, 1.0),
        (
            {"speculative.types": "ngram-simple, draft-model"},
            ("ngram-simple", "draft-model"),
            None,
            None,
            None,
        ),
        ({"speculative": {"types": ["ngram-simple"]}}, ("ngram-simple",), None, None, None),
        ({"speculative.types": "none"}, (), None, None, None),
        ({"speculative.types": "auto"}, None, None, None, None),
        ({"speculative": None, "speculative.n_max": 0}, None, 0, None, None),
        ({"speculative": {"n_max": None}}, None, None, None, None),
    ],
)
def test_speculation_keys(
    server: Served, fields: dict[str, Any], types: Any, n_max: Any, n_min: Any, p_min: Any
) -> None:
    assert server.chat(**fields).status_code == 200
    asked = server.engine.requests[-1].speculate
    assert (asked.types, asked.n_max, asked.n_min, asked.p_min) == (types, n_max, n_min, p_min)


def test_ngram_settings(server: Served) -> None:
    told = server.chat(**{"speculative.ngram_size_n": 3, "speculative": {"ngram_size_m": 1024}}).json()
    asked = server.engine.requests[-1].speculate
    assert (asked.ngram_size_n, asked.ngram_size_m, asked.ngram_min_hits) == (3, 1024, None)
    assert told["speculative"]["ngram_size_n"] == 3
    assert told["speculative"]["ngram_size_m"] == 1024
    assert "ngram_min_hits" not in told["speculative"]
    last = server.events(speculative={"ngram_min_hits": 2})[-1]
    assert server.engine.requests[-1].speculate.ngram_min_hits == 2
    assert last["speculative"]["ngram_min_hits"] == 2


def test_n_max_above_the_servers_is_lowered_and_told(server: Served) -> None:
    assert server.chat(**{"speculative.n_max": 1000}).json()["speculative"]["n_max"] == 4
