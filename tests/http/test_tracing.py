"""OpenTelemetry: one span per generation, kept in memory; nothing leaves the machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from slipstream.engine.api import Failed
from slipstream.engine.errors import StepFailed
from slipstream.server.report import tracing
from tests.commanded import read_settings
from tests.http.fake import delta, words
from tests.http.serving import Served, chat, served, until

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Served, InMemorySpanExporter]]:
    """A server whose spans arrive in memory once it has ended its batches."""
    exporter = InMemorySpanExporter()
    asked: list[str] = []
    monkeypatch.setattr(tracing, "exporter_to", lambda endpoint: asked.append(endpoint) or exporter)
    with served(otlp_endpoint="http://collector:4318") as server:
        yield server, exporter
    assert asked == ["http://collector:4318"]


def spans(traced: tuple[Served, InMemorySpanExporter], n: int) -> list[object]:
    """The n spans; the last one ends a moment after its reply's last byte."""
    server, exporter = traced

    def arrived() -> bool:
        server.traces._provider.force_flush()
        return len(exporter.get_finished_spans()) >= n

    until(arrived)
    found = exporter.get_finished_spans()
    assert len(found) == n
    return list(found)


def test_a_reply_is_a_span(traced: tuple[Served, InMemorySpanExporter]) -> None:
    server, _ = traced
    secret = "words that must not be traced"
    answer = server.post(
        "/v1/chat/completions",
        chat(messages=[{"role": "user", "content": secret}], n=2, max_tokens=4),
        headers={"traceparent": f"00-{TRACE}-{PARENT}-01"},
    )
    server.http.get("/health")
    (span,) = spans(traced, 1)
    assert (span.name, span.kind) == ("chat fake/model", SpanKind.SERVER)
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT
    assert span.status.status_code == StatusCode.UNSET
    assert 0 < span.end_time - span.start_time < 5e9
    told = dict(span.attributes)
    assert told.pop("gen_ai.response.time_to_first_chunk") > 0
    assert told == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "slipstream",
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.id": answer.json()["id"],
        "gen_ai.response.model": "fake/model",
        "gen_ai.response.finish_reasons": ("length", "length"),
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.cache_read.input_tokens": 1,
        "gen_ai.usage.output_tokens": 8,
        "http.response.status_code": 200,
        "slipstream.draft_tokens": 8,
        "slipstream.accepted_draft_tokens": 4,
        "slipstream.steps": 4,
    }
    assert span.resource.attributes["service.name"] == "slipstream"


def test_errors_and_streams(traced: tuple[Served, InMemorySpanExporter]) -> None:
    server, _ = traced
    server.chat(temperature=-1)
    spans(traced, 1)
    server.engine.script = lambda request: [delta("x"), Failed(StepFailed("x"))]
    server.events()
    spans(traced, 2)
    server.engine.script = words
    server.events("/v1/completions")
    wrong, broken, good = spans(traced, 3)
    assert (wrong.attributes["error.type"], wrong.status.status_code) == ("invalid_value", StatusCode.UNSET)
    assert (broken.attributes["error.type"], broken.status.status_code) == (
        "internal_error",
        StatusCode.ERROR,
    )
    assert (good.name, good.attributes["gen_ai.usage.output_tokens"]) == ("text_completion fake/model", 10)
    assert all(span.parent is None for span in (wrong, broken, good))


def test_a_wrong_traceparent_begins_a_trace(traced: tuple[Served, InMemorySpanExporter]) -> None:
    server, _ = traced
    server.post("/v1/chat/completions", chat(), headers={"traceparent": "00-nonsense-x-01"})
    (span,) = spans(traced, 1)
    assert span.parent is None


def test_missing_packages_end_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["-m", "x", "--otlp-endpoint", "http://localhost:4318"]
    assert read_settings(arguments, {}).otlp_endpoint == "http://localhost:4318"
    monkeypatch.setattr(tracing, "NEEDED", ("opentelemetry.sdk", "opentelemetry.no_such.thing"))
    with pytest.raises(SystemExit) as caught:
        read_settings(arguments, {})
    assert caught.value.code == 2
    assert "needs opentelemetry.no_such.thing: pip install 'slipstream[otel]'" in capsys.readouterr().err


def test_opentelemetrys_own_variable_is_read() -> None:
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://one:4318"}
    assert read_settings(["-m", "x"], environ).otlp_endpoint == "http://one:4318"
    assert read_settings(["-m", "x", "--otlp-endpoint", "http://two"], environ).otlp_endpoint == "http://two"
    both = {**environ, "SLIPSTREAM_OTLP_ENDPOINT": "http://three"}
    assert read_settings(["-m", "x"], both).otlp_endpoint == "http://three"


def test_without_an_endpoint_nothing_is_loaded() -> None:
    code = (
        "import sys; from slipstream.engine.settings import Settings;"
        "from slipstream.server.http.app import create_app; from slipstream.server.http.gate import Gate;"
        "create_app(Gate(), Settings()); print('opentelemetry.sdk' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/completions", {"prompt": "a"}, "text_completion fake/model"),
        ("/completion", {"prompt": "a"}, "text_completion fake/model"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "text_completion fake/model"),
        ("/v1/messages", {"messages": chat()["messages"], "max_tokens": 4}, "chat fake/model"),
        ("/v1/responses", {"input": "a"}, "chat fake/model"),
        ("/v1/responses", {"input": "a", "background": True}, "chat fake/model"),
    ],
)
def test_every_endpoint_that_generates_is_traced(
    traced: tuple[Served, InMemorySpanExporter], path: str, body: dict[str, object], name: str
) -> None:
    server, _ = traced
    assert server.post(path, body).status_code == 200
    (span,) = spans(traced, 1)
    assert span.name == name
    assert span.attributes["gen_ai.usage.output_tokens"] > 0
    server.http.get("/v1/responses/resp_0")  # looks at what is kept, and generates nothing
    spans(traced, 1)
