"""OpenAI's Predicted Outputs: what reaches the engine, and what the reply tells of it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.http.fake import delta, done, words
from tests.http.serving import Served, logged, served, until

TEXT = {"type": "content", "content": "w0 w1 w2"}


def details(body: dict[str, Any]) -> dict[str, int]:
    return body["usage"]["completion_tokens_details"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("def f():\n", "def f():\n"),
        ([{"type": "text", "text": "de"}, {"type": "text", "text": "f f"}], "def f"),
        ("", None),
        ([], None),
        ([{"type": "text", "text": ""}], None),
    ],
)
def test_the_text_reaches_the_engine(server: Served, content: Any, expected: str | None) -> None:
    prediction = {"type": "content", "content": content}
    assert server.chat(prediction=prediction).status_code == 200
    assert server.engine.requests[-1].prediction == expected
    assert server.post("/v1/completions", {"prompt": "a", "prediction": prediction}).status_code == 200
    assert server.engine.requests[-1].prediction == expected


def test_no_prediction_no_details(server: Served) -> None:
    for fields in ({}, {"prediction": None}):
        body = server.chat(**fields).json()
        assert server.engine.requests[-1].prediction is None
        assert "completion_tokens_details" not in body["usage"]


def test_choices_add_up(server: Served) -> None:
    # Each of the three choices: five drafts of two tokens, one accepted.
    body = server.chat(prediction=TEXT, n=3).json()
    assert details(body) == {"accepted_prediction_tokens": 15, "rejected_prediction_tokens": 15}
    assert [one.prediction for one in server.engine.requests] == ["w0 w1 w2"] * 3


def test_only_the_prediction_counts(server: Served) -> None:
    fields = {"prediction": TEXT, "speculative.types": "draft-model"}
    body = server.chat(**fields).json()
    assert body["timings"]["drafters"]["draft-model"]["draft_n"] == 10
    assert details(body) == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}


def test_an_empty_prediction_is_counted_as_nothing(server: Served) -> None:
    body = server.chat(prediction={"type": "content", "content": ""}).json()
    assert details(body) == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_the_usage_chunk_tells_it(server: Served, path: str) -> None:
    *earlier, last = server.events(path, prediction=TEXT, stream_options={"include_usage": True})
    assert details(last) == {"accepted_prediction_tokens": 5, "rejected_prediction_tokens": 5}
    assert not any(chunk["usage"] for chunk in earlier)


def test_the_log_line_tells_drafters(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="slipstream"), served() as server:
        answers = [server.chat(prediction=TEXT)]
        server.engine.script = lambda request: [delta("x"), done(request, 1)]
        answers.append(server.chat())
        server.engine.script = words
        answers.append(server.chat(n=2))
        # A line is written once its reply has gone, so another server's may still come.
        ids = [answer.json()["id"] for answer in answers]
        until(lambda: set(ids) <= {line.get("id") for line in logged(caplog, "request")})
    told = {line.get("id"): line.get("drafters") for line in logged(caplog, "request")}
    assert [told[one] for one in ids] == ["prediction:5/10", None, "ngram-simple:10/20"]
