"""A few seconds of what `make fuzz` does, and the mutator itself."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.engine.api import Request
from slipstream.engine.errors import InvalidRequest
from slipstream.engine.text.grammar.grammars import Grammars
from slipstream.engine.text.tokenizer import Tokenizer
from tests.fuzz import grammars
from tests.fuzz.mutate import Mutator, aftermath, fault, run
from tests.fuzz.requests import REQUESTS
from tests.http.fake import FakeEngine, Step, words
from tests.http.serving import Served, served

ROOT = Path(__file__).parents[2]
ERROR = json.dumps({"error": {"message": "m", "type": "t", "param": None, "code": None}}).encode()


@pytest.fixture(scope="module")
def server() -> Iterable[Served]:
    engine = FakeEngine()
    # A template that knows tools, so that requests with them are valid.
    told = json.loads((ROOT / "demo" / "target" / "tokenizer_config.json").read_text())
    engine.info = replace(engine.info, chat_template=told["chat_template"])
    with served(engine) as one:
        yield one


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_what_it_begins_with_is_valid(server: Served, path: str, body: Mapping[str, Any]) -> None:
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text


def test_mutants(server: Served) -> None:
    findings = run(server.url, seed=1, n_requests=1200)
    assert findings.wrong == []
    assert findings.statuses[200] > 80
    assert findings.statuses[400] > 400
    assert aftermath(server.url) is None


def test_grammars_are_followed_or_refused() -> None:
    """Whatever they are; how long they take is for `python -m tests.fuzz.grammars`."""
    dice, tokenizer = random.Random(1), Tokenizer(ROOT / "demo" / "target")
    source, made = grammars.Source(dice), Grammars(tokenizer, tokenizer.vocab_size)
    n_followed = n_refused = 0
    for _ in range(60):
        try:
            constraint = made.constraint(grammars.as_grammar(*source.next()), "", "").result()
        except InvalidRequest:
            n_refused += 1
        else:
            grammars.slowest(constraint, 10, dice)
            n_followed += 1
    made.close()
    assert n_followed > 30
    assert n_refused > 5


def test_the_same_seed_makes_the_same_mutants() -> None:
    one, same, other = Mutator(5), Mutator(5), Mutator(6)
    made = [one.next() for _ in range(50)]
    assert made == [same.next() for _ in range(50)]
    assert made != [other.next() for _ in range(50)]


def test_a_fault_is_found() -> None:
    def failing(request: Request) -> Iterable[Step]:
        yield from list(words(request))[:1]
        raise ZeroDivisionError

    with served(FakeEngine(failing)) as one:
        findings = run(one.url, seed=1, n_requests=500)
    assert any("a failure in the stream" in found for found in findings.wrong)
    assert any("the server failed" in found for found in findings.wrong)


@pytest.mark.parametrize(
    ("status", "kind", "body", "told"),
    [
        (200, "application/json", b"{}", None),
        (200, "text/event-stream", b"data: {}\n\ndata: [DONE]\n\n", None),
        (200, "text/event-stream", b"data: {}\n\n", "no end"),
        (200, "text/event-stream", b"event: response.completed\ndata: {}\n\n", None),
        (200, "text/event-stream", b"event: response.created\ndata: {}\n\n", "no end"),
        (200, "text/event-stream", b'event: response.failed\ndata: {"code":"server_error"}\n\n', "a failure"),
        (200, "text/event-stream", b"event: message_stop\ndata: {}\n\n", None),
        (200, "text/event-stream", b'event: error\ndata: {"type":"api_error"}\n\n', "a failure"),
        (400, "application/json", ERROR, None),
        (400, "application/json", b'{"type": "error", "error": {"message": "m", "type": "t"}}', None),
        (400, "application/json", b'{"type": "error", "error": {"type": "t", "message": ""}}', "its fields"),
        (400, "application/json", b'{"error": {"message": "m", "type": "t"}}', "without its fields"),
        (400, "application/json", ERROR.replace(b'"m"', b'"Traceback (most"'), "traceback"),
        (418, "application/json", ERROR, "does not have"),
        (503, "application/json", ERROR, "failed"),
    ],
)
def test_what_counts_as_a_fault(status: int, kind: str, body: bytes, told: str | None) -> None:
    found = fault(status, kind, body)
    assert found is None if told is None else told in (found or "")
