"""Errors as clients get them: the only table from exception class to status, type, code, headers and extra keys.

The body is OpenAI's `{"error": {"message", "type", "param", "code"}}`, in a response and in a stream's event alike.
Clients retry 408, 409, 429 and every status from 500 on, so those carry `retry-after` or `x-should-retry: false`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
from starlette.responses import Response

from slipstream.engine.errors import (
    ContextTooLong,
    DeviceLost,
    EngineFault,
    EngineStopped,
    InvalidRequest,
    Overloaded,
    ReplicasFailed,
    RequestError,
    SlotFileRefused,
    SlotNotSaved,
    TextTooLong,
    TimedOut,
    Unsupported,
)
from slipstream.server.report.meter import record

RETRY_AFTER_S = 5  # while loading or draining: by then a proxy has noticed a restart


@dataclass(eq=False)
class Refused(Exception):
    """An error as a client gets it: status, headers and the parts of the body.

    Raised where the HTTP server decides by itself; `problem_of` makes one of every other error.
    """

    status: int
    type: str
    code: str | None
    message: str
    param: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message

    def content(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
                **self.extra,
            }
        }

    def response(self) -> Response:
        record().code = self.code or self.type
        body = orjson.dumps(self.content())
        return Response(body, self.status, dict(self.headers), media_type="application/json")


def bad_request(message: str, *, param: str | None = None, code: str = "invalid_value") -> Refused:
    return Refused(400, "invalid_request_error", code, message, param)


def bad_field(param: str, reason: str, *, code: str = "invalid_value") -> Refused:
    return bad_request(f"{param}: {reason}", param=param, code=code)


def unsupported(param: str, reason: str) -> Refused:
    return bad_field(param, reason, code="unsupported_value")


def unauthorized() -> Refused:
    headers = {"www-authenticate": "Bearer"}
    message = "a valid API key is needed: 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'"
    return Refused(401, "authentication_error", "invalid_api_key", message, headers=headers)


def wrong_host() -> Refused:
    message = "this server listens on loopback and answers only to its own host names (see --host)"
    return Refused(403, "permission_error", "host_not_allowed", message)


def not_found(message: str, *, code: str = "not_found", param: str | None = None) -> Refused:
    return Refused(404, "not_found_error", code, message, param)


def two_lengths() -> Refused:
    """400 for a body whose end is announced in two ways; the connection is closed."""
    message = "Content-Length and Transfer-Encoding are both given"
    closing = {"connection": "close"}
    return Refused(400, "invalid_request_error", "malformed_request", message, headers=closing)


def too_large(limit_mib: int) -> Refused:
    message = f"the body is larger than {limit_mib} MiB; --max-body sets the limit"
    return Refused(413, "invalid_request_error", "body_too_large", message)


def too_slow(limit_s: float) -> Refused:
    message = (
        f"the body did not arrive in time; --timeout sets the limit ({limit_s:g} s, and more for long bodies)"
    )
    headers = {"x-should-retry": "false", "connection": "close"}
    return Refused(408, "timeout_error", "body_timeout", message, headers=headers)


def not_json() -> Refused:
    message = "send the body as JSON with the header 'content-type: application/json'"
    return Refused(415, "invalid_request_error", "unsupported_media_type", message)


def compressed() -> Refused:
    message = "compressed bodies are not read here; send the body without 'content-encoding: gzip'"
    return Refused(415, "invalid_request_error", "unsupported_media_type", message)


def unavailable(message: str, code: str) -> Refused:
    headers = {"retry-after": str(RETRY_AFTER_S)}
    return Refused(503, "unavailable_error", code, message, headers=headers)


def internal() -> Refused:
    """A 500 that hides the cause from the client: it is in the log, under the request's id."""
    message = "the server failed on this request; its log has the cause under this x-request-id"
    return Refused(500, "server_error", "internal_error", message, headers={"x-should-retry": "false"})


def _request(code: str) -> Callable[[Any], Refused]:
    return lambda error: Refused(400, "invalid_request_error", code, str(error), error.param)


def _too_long(error: ContextTooLong) -> Refused:
    return _exceeds(error, {"n_prompt_tokens": error.n_prompt, "n_ctx": error.n_ctx})


def _exceeds(error: RequestError, extra: Mapping[str, Any]) -> Refused:
    return Refused(
        400, "exceed_context_size_error", "context_length_exceeded", str(error), error.param, extra
    )


def _overloaded(error: Overloaded) -> Refused:
    headers = {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}
    return Refused(429, "rate_limit_error", "queue_full", str(error), headers=headers)


def _timed_out(error: TimedOut) -> Refused:
    # Another try would take as long.
    return Refused(504, "timeout_error", "request_timeout", str(error), headers={"x-should-retry": "false"})


def _failed(code: str) -> Callable[[EngineFault], Refused]:
    headers = {"x-should-retry": "false"}
    return lambda error: Refused(500, "server_error", code, str(error), headers=headers)


def _device_lost(error: DeviceLost) -> Refused:
    return unavailable(str(error), "device_failed")


def _stopped(_error: EngineStopped) -> Refused:
    return unavailable("the server is stopping", "server_stopping")


# The first match wins; any other exception is a fault of this server and becomes `internal`.
TABLE: tuple[tuple[type[Exception], Callable[[Any], Refused]], ...] = (
    (Refused, lambda error: error),
    (ContextTooLong, _too_long),
    (TextTooLong, lambda error: _exceeds(error, {})),
    (SlotFileRefused, _request("slot_file_refused")),
    (Unsupported, _request("unsupported_value")),
    (InvalidRequest, _request("invalid_value")),
    (RequestError, _request("invalid_request")),
    (Overloaded, _overloaded),
    (TimedOut, _timed_out),
    (DeviceLost, _device_lost),
    (EngineStopped, _stopped),
    (SlotNotSaved, _failed("slot_not_saved")),
    (ReplicasFailed, _failed("replicas_failed")),
)


def problem_of(error: Exception) -> Refused:
    """The error that a client gets for the exception `error`."""
    for kind, tell in TABLE:
        if isinstance(error, kind):
            return tell(error)
    return internal()


def renamed(error: Exception, names: Mapping[str, str]) -> Refused:
    """`error` with the name that a request's field has in its own dialect. `names`: by the field's name in a chat."""
    problem = problem_of(error)
    field, more = _parted(problem.param or "")
    if field not in names:
        return problem
    message = problem.message
    if message.startswith(field):
        message = names[field] + message.removeprefix(field)
    return replace(problem, param=names[field] + more, message=message)


def _parted(param: str) -> tuple[str, str]:
    """`messages[0].content` as the field's name and what follows it."""
    end = next((i for i, char in enumerate(param) if char in ".["), len(param))
    return param[:end], param[end:]
