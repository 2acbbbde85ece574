"""The layer around the others that may answer, for what holds for every request: an `x-request-id` in the response, an
access line in the log, counts for `/metrics`, and a 500 in OpenAI's shape for an exception that no handler took.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from functools import partial
from typing import Any

import structlog
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.server.http.auth import HEALTH
from slipstream.server.http.connection import ClientGone
from slipstream.server.http.error_table import internal
from slipstream.server.http.sse import CLIENT_LEFT
from slipstream.server.openai import figures
from slipstream.server.report import meter as meters
from slipstream.server.report import tally
from slipstream.server.report.logs import logger
from slipstream.server.report.meter import Meter, Record
from slipstream.server.report.tracing import Tracing

log = logger(__name__)
WELL_FORMED = re.compile(r"[A-Za-z0-9._-]{1,64}")
# Routes that generate, below `/v1` or without it, with OpenTelemetry's names for what they do.
GENERATING = {
    **dict.fromkeys(("/chat/completions", "/messages", "/responses"), "chat"),
    **dict.fromkeys(("/completions", "/completion", "/infill"), "text_completion"),
}
# Asked every few seconds by monitoring; a 503 of theirs while the model loads is no reason for a warning.
PROBES = HEALTH | {"/metrics"}
# Not faults, but ends: of the request, of the process.
ENDS = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)


class Envelope:
    """ASGI layer; `state["request_id"]` is the client's `x-request-id` if it is well-formed, else a fresh id."""

    def __init__(self, app: ASGIApp, meter: Meter, traces: Tracing | None) -> None:
        self.app = app
        self.meter = meter
        self.traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        offered = Headers(scope=scope).get("x-request-id", "")
        request_id = offered if WELL_FORMED.fullmatch(offered) else f"req-{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id
        record = meters.opened()
        started, started_ns = time.perf_counter(), time.time_ns()
        status = 0

        async def stamped(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                message = {**message, "headers": headers}
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                await self.app(scope, receive, stamped)
            except ENDS:
                raise
            except ClientGone:
                status = status or CLIENT_LEFT
            except BaseException:  # panics of libraries written in Rust are no `Exception`
                log.exception("unexpected")
                if not status:
                    await internal().response()(scope, receive, stamped)
                # Once the response has begun, returning before its end makes uvicorn cut the connection.
            finally:
                end = partial(self._end, record, scope, status, started, started_ns)
                if record.background is None:
                    end()
                else:
                    record.background.add_done_callback(lambda _: end())

    def _end(self, record: Record, scope: Scope, status: int, started: float, started_ns: int) -> None:
        """A request has ended: count it, and write its access line and its span."""
        seconds = time.perf_counter() - started
        path = scope["path"]  # without --api-prefix, which an inner layer removed
        operation = GENERATING.get(path.removeprefix("/v1")) if scope["method"] == "POST" else None
        if path not in PROBES:
            self.meter.ended(record, seconds)
        if self.traces and operation:
            self.traces.tell(record, operation, Headers(scope=scope), status, started_ns)
        _log(_level(path, operation, status), record, scope, status, seconds)


def _level(path: str, operation: str | None, status: int) -> int:
    """The log level of a request's access line."""
    if path in PROBES:
        return logging.DEBUG
    if status >= 500:
        return logging.WARNING
    return logging.INFO if operation or status >= 400 else logging.DEBUG


def _log(level: int, record: Record, scope: Scope, status: int, seconds: float) -> None:
    """The access line: counts and times, never text."""
    log.log(
        level,
        "request",
        method=scope["method"],
        path=scope["path"][:200],
        status=status,
        seconds=seconds,
        code=record.code,
        id=record.reply_id or None,
        reason=",".join(record.reasons[:8]) or None,
        n_images=record.n_images or None,
        **(_figures(record) if record.ends else {}),
    )


def _figures(record: Record) -> dict[str, Any]:
    ends = record.ends
    usage = figures.usage(ends, record.n, predicted=False)
    metrics = figures.metrics(ends)
    speculation = metrics.get("speculative_decoding", {})
    return {
        "n_prompt": usage["prompt_tokens"],
        "n_cached": usage["prompt_tokens_details"]["cached_tokens"],
        "n_completion": usage["completion_tokens"],
        "queue_ms": metrics["queue_time_ms"],
        "ttft_ms": metrics["time_to_first_token_ms"],
        "itl_ms": metrics["mean_itl_ms"],
        "acceptance_length": speculation.get("mean_acceptance_length"),
        "acceptance_rate": speculation.get("draft_acceptance_rate"),
        "drafters": tally.in_short(figures.drafters(ends)),
    }
