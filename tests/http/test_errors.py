"""The error table: which class a client sees as which status, before a reply and inside a stream."""

from __future__ import annotations

import pytest

from slipstream.engine.api import Failed
from slipstream.engine.errors import (
    ContextTooLong,
    EngineError,
    EngineStopped,
    InvalidRequest,
    LoadError,
    Overloaded,
    ReplicasFailed,
    RequestError,
    StepFailed,
    TimedOut,
    Unsupported,
)
from slipstream.server.http.error_table import problem_of
from tests.http.fake import delta, done
from tests.http.serving import Served, chat, logged, raw, until

TABLE: list[tuple[Exception, int, str, str]] = [
    (InvalidRequest("stop", "is wrong"), 400, "invalid_request_error", "invalid_value"),
    (Unsupported("grammar", "is absent"), 400, "invalid_request_error", "unsupported_value"),
    (RequestError("no"), 400, "invalid_request_error", "invalid_request"),
    (ContextTooLong(600, 512), 400, "exceed_context_size_error", "context_length_exceeded"),
    (Overloaded("64 wait", 2.1), 429, "rate_limit_error", "queue_full"),
    (TimedOut(1.5), 504, "timeout_error", "request_timeout"),
    (EngineStopped("x"), 503, "unavailable_error", "server_stopping"),
    (ReplicasFailed("x"), 500, "server_error", "replicas_failed"),
    (StepFailed("x"), 500, "server_error", "internal_error"),
    (LoadError("x"), 500, "server_error", "internal_error"),
    (EngineError("x"), 500, "server_error", "internal_error"),
    (ZeroDivisionError("x"), 500, "server_error", "internal_error"),
]
IDS = [type(case[0]).__name__ for case in TABLE]


@pytest.mark.parametrize(("error", "status", "kind", "code"), TABLE, ids=IDS)
@pytest.mark.filterwarnings("ignore")
def test_refused_before_a_reply(server: Served, error: Exception, status: int, kind: str, code: str) -> None:
    server.engine.refusal = error
    for stream in (False, True):
        answer = server.chat(stream=stream)
        assert answer.status_code == status
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-request-id"]
        told = answer.json()["error"]
        assert (told["type"], told["code"]) == (kind, code)
        assert {"message", "type", "param", "code"} <= set(told)
    assert answer.headers.get("x-should-retry") == ("false" if status in (500, 504) else None)
    assert answer.headers.get("retry-after") == {429: "3", 503: "5"}.get(status)


@pytest.mark.parametrize(("error", "status", "kind", "code"), TABLE, ids=IDS)
def test_failed_on_the_way(server: Served, error: Exception, status: int, kind: str, code: str) -> None:
    last = Failed(error) if isinstance(error, EngineError) else error
    server.engine.script = lambda request: [delta("x"), last]
    answer = server.chat()
    assert answer.status_code == status
    assert (answer.json()["error"]["type"], answer.json()["error"]["code"]) == (kind, code)
    chunks = server.events()
    assert [chunk.get("object") for chunk in chunks] == ["chat.completion.chunk"] * 2 + [None]
    assert (chunks[-1]["error"]["type"], chunks[-1]["error"]["code"]) == (kind, code)
    until(lambda: all(stream.closed for stream in server.engine.streams))


def test_context_tells_both_numbers(server: Served) -> None:
    error = server.error(400, messages=[{"role": "user", "content": "x " * 600}])
    assert (error["n_prompt_tokens"], error["n_ctx"], error["param"]) == (601, 512, "messages")
    answer = server.post("/v1/completions", {"prompt": [1] * 600, "stream": True})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"


def test_our_own_faults_say_nothing() -> None:
    assert "0x" not in problem_of(StepFailed("at 0x7f")).message
    assert "secret" not in problem_of(ValueError("secret")).message


def test_why_a_cluster_gave_a_request_up_is_told() -> None:
    assert problem_of(ReplicasFailed("it has lost 4 replicas")).message == "it has lost 4 replicas"


def test_one_refused_choice_refuses_all(server: Served) -> None:
    server.engine.max_running = 2
    assert server.chat(n=3).status_code == 429
    assert [stream.closed for stream in server.engine.streams] == [True, True]
    assert server.post("/v1/completions", {"prompt": ["a", "b " * 600], "stream": True}).status_code == 400
    assert server.engine.streams[-1].closed


def test_one_failed_choice_ends_all(server: Served) -> None:
    def script(request: object) -> list[object]:
        first = len(server.engine.requests) == 1
        return [delta("x"), Failed(StepFailed("x"))] if first else [delta("y"), 5.0, done(request, 1)]

    server.engine.script = script
    assert server.chat(n=2).status_code == 500
    server.engine.requests.clear()
    assert "error" in server.events(n=2)[-1]
    until(lambda: all(stream.closed for stream in server.engine.streams))


def test_a_stream_that_just_stops_is_an_error(server: Served) -> None:
    server.engine.script = lambda request: [delta("x")]
    assert server.chat().status_code == 500
    assert server.events()[-1]["error"]["code"] == "internal_error"


def test_unknown_paths_and_methods(server: Served) -> None:
    for path in ("/complete", "/v1/nothing", "/v1/models/", "/../etc/passwd", "/index.html"):
        answer = server.http.get(path)
        assert answer.status_code == 404, path
        assert answer.json()["error"]["type"] == "not_found_error"
    answer = server.http.get("/v1/chat/completions")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"
    assert answer.json()["error"]["code"] == "method_not_allowed"
    assert answer.headers["x-request-id"]
    # A path of several routes: the router itself names the methods of the first.
    assert server.http.patch("/v1/responses/resp_0").headers["allow"] == "DELETE, GET"


def test_requests_are_not_pipelined_into_each_other(server: Served) -> None:
    """A refused body must be read to its end, so that its rest is not taken for the next request."""
    head = b"POST /nothing HTTP/1.1\r\nhost: localhost\r\ncontent-length: 40\r\n\r\n"
    inner = b"GET /live HTTP/1.1\r\nhost: a\r\n\r\n".ljust(40)
    answer = raw(
        server.port, head + inner + b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    )
    assert answer.count(b"HTTP/1.1 ") == 2
    assert answer.endswith(b'{"status":"ok"}')


def test_the_queue_is_full(server: Served) -> None:
    server.engine.max_running = 0
    answer = server.chat()
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")
    assert server.post("/v1/completions", {"prompt": "x"}).status_code == 429
    assert chat()["messages"]


class Panic(BaseException):
    """As pyo3 raises for a panic: no `Exception`."""


def test_a_panic_outside_the_engine(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    """As the parser of bodies might have one."""
    server.engine.refusal = Panic("put in")  # type: ignore[assignment]
    for stream in (False, True):
        caplog.clear()
        answer = server.post(
            "/v1/chat/completions", chat(stream=stream), headers={"x-request-id": f"panic-{stream}"}
        )
        assert (answer.status_code, answer.headers["x-request-id"]) == (500, f"panic-{stream}")
        assert answer.json()["error"]["code"] == "internal_error"
        assert [one["event"] for one in logged(caplog, "unexpected")] == ["unexpected"]
        assert not [one for one in caplog.records if one.name.startswith("uvicorn")]
