"""OpenTelemetry: one span per generation, in the GenAI semantic conventions. Counts and times, never text.

A caller's `traceparent` (W3C Trace Context) becomes the span's parent. The packages are an optional extra, so they
are imported only when an endpoint is set.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from slipstream.server.report.meter import Record

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

NEEDED = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
EXPORT_TIMEOUT_S = 5.0
PROVIDER = "slipstream"


def missing() -> str | None:
    """The first package that tracing needs and that is not installed; None if all are."""
    for name in NEEDED:
        try:
            found = find_spec(name)
        except ModuleNotFoundError:  # a package above it is missing
            found = None
        if found is None:
            return name
    return None


def exporter_to(endpoint: str) -> SpanExporter:
    """An exporter that sends spans to the collector at `endpoint`, by OTLP over HTTP."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_TIMEOUT_S)


class Tracing:
    """A server's spans. `close` sends those that are still waiting; it may block, so call it in a thread."""

    def __init__(self, exporter: SpanExporter, version: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.name": PROVIDER, "service.version": version})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer(PROVIDER, version)
        self._propagator = TraceContextTextMapPropagator()

    def tell(
        self, record: Record, operation: str, headers: Mapping[str, str], status: int, started_ns: int
    ) -> None:
        """Record the span of a request that has just ended. `started_ns`: its beginning, in ns of Unix time."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        span = self._tracer.start_span(
            f"{operation} {record.model}".rstrip(),
            self._propagator.extract({name: headers.get(name, "") for name in ("traceparent", "tracestate")}),
            SpanKind.SERVER,
            _attributes(record, operation, status),
            start_time=started_ns,
        )
        if status >= 500 or (status == 200 and record.code):
            span.set_status(Status(StatusCode.ERROR, record.code))
        span.end()

    def close(self) -> None:
        self._provider.shutdown()


def _attributes(record: Record, operation: str, status: int) -> dict[str, Any]:
    told: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "http.response.status_code": status,
    }
    if record.code:
        told["error.type"] = record.code
    if record.n_choices:
        told["gen_ai.response.id"] = record.reply_id
        told["gen_ai.response.model"] = record.model
        told["gen_ai.request.choice.count"] = record.n
        told["gen_ai.response.finish_reasons"] = record.reasons
    if record.replicas:
        told["slipstream.replicas"] = record.replicas
    if ends := record.ends:
        prompts = [end.usage for end in ends[:: record.n]]
        speculated = [end.speculation for end in ends]
        told["gen_ai.usage.input_tokens"] = sum(one.n_prompt for one in prompts)
        told["gen_ai.usage.cache_read.input_tokens"] = sum(one.n_cached for one in prompts)
        told["gen_ai.usage.output_tokens"] = sum(end.usage.n_completion for end in ends)
        told["gen_ai.response.time_to_first_chunk"] = max(
            end.timings.queue_s + end.timings.prompt_s for end in ends
        )
        told["slipstream.draft_tokens"] = sum(one.n_drafted for one in speculated)
        told["slipstream.accepted_draft_tokens"] = sum(one.n_accepted for one in speculated)
        told["slipstream.steps"] = sum(one.n_steps for one in speculated)
    return told
