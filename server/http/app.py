"""`create_app` makes the ASGI application: routes, error handlers and the layers (middleware) around them.

Layers from the outside in: errors of the Messages API, request id and last-resort 500, host check, path prefix, CORS,
API key, body limit, routes.
Importing this module must not import torch.
"""

from __future__ import annotations

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match

from slipstream.engine.errors import EngineError
from slipstream.engine.settings import Settings
from slipstream.server import version
from slipstream.server.anthropic import routes as messages
from slipstream.server.anthropic.error_shape import MessagesErrors
from slipstream.server.describe import openapi
from slipstream.server.http import web_page as pages
from slipstream.server.http.auth import Auth, keys_of
from slipstream.server.http.envelope import Envelope
from slipstream.server.http.error_table import Refused, not_found, problem_of
from slipstream.server.http.gate import Gate
from slipstream.server.http.limits import (
    LOCAL_ORIGIN,
    LOCALHOST,
    BodyLimit,
    HostCheck,
    Prefix,
    most_body,
    origins_of,
)
from slipstream.server.http.sse import CLIENT_LEFT
from slipstream.server.images.looking import Looking
from slipstream.server.native import routes as native
from slipstream.server.native import slots
from slipstream.server.openai import absent
from slipstream.server.openai import routes as openai
from slipstream.server.openai.formats.reading import Knowing
from slipstream.server.openai.serving import Serving
from slipstream.server.report import metrics, speculation, status, tracing
from slipstream.server.report.meter import Meter
from slipstream.server.responses import routes as responses
from slipstream.server.responses.kept import KeptResponses

METHODS = ("DELETE", "GET", "HEAD", "POST")  # of all routes


def create_app(gate: Gate, settings: Settings, knowing: Knowing | None = None) -> FastAPI:
    """The HTTP application of the gate's engine, which may still be loading.

    `knowing`: what keeps the model's chat format, if its maker wants to know it as well.
    """
    knowing, meter, traces = knowing or Knowing(settings), Meter(), None
    if settings.otlp_endpoint:
        traces = tracing.Tracing(tracing.exporter_to(settings.otlp_endpoint), version())
    # `describe/openapi.py` serves the document, behind the API key. FastAPI's interactive pages load remote scripts.
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    serving = Serving(gate, settings, knowing, Looking(settings))
    app.include_router(openai.routes(serving), tags=["OpenAI"])
    kept = KeptResponses(settings.responses_store, settings.responses_kept)
    app.include_router(responses.routes(serving, kept), tags=["OpenAI"])
    app.include_router(messages.routes(serving), tags=["Anthropic"])
    app.include_router(absent.routes())
    app.include_router(native.routes(serving), tags=["llama-server"])
    app.include_router(slots.routes(gate, settings), tags=["llama-server"])
    app.include_router(status.routes(gate, settings, knowing), tags=["status"])
    app.include_router(speculation.routes(gate, settings), tags=["status"])
    app.include_router(metrics.routes(gate, meter), tags=["status"])
    app.include_router(openapi.routes(settings.api_prefix, keyed=bool(keys_of(settings))), tags=["status"])
    if settings.webui:
        app.include_router(pages.routes(), tags=["chat page"])
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _left)
    for kind in (Refused, EngineError):
        app.add_exception_handler(kind, _told)
    # The layer added last is the outermost.

    def limit_mib() -> int:
        return most_body(gate.engine.info if gate.engine else None, settings)

    app.add_middleware(BodyLimit, limit_mib=limit_mib, timeout_s=settings.timeout)
    app.add_middleware(Auth, keys=keys_of(settings))
    if origins := origins_of(settings):
        # The server uses no cookies, so credentials are not allowed. Preflights carry no key and end in this layer.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_origin_regex=LOCAL_ORIGIN if LOCALHOST in origins else None,
            allow_methods=list(METHODS),
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_middleware(Prefix, prefix=settings.api_prefix)
    app.add_middleware(HostCheck, host=settings.host)
    app.add_middleware(Envelope, meter=meter, traces=traces)
    app.add_middleware(MessagesErrors, prefix=settings.api_prefix)
    app.state.traces, app.state.kept = traces, kept
    return app


async def _told(_request: Request, error: Exception) -> Response:
    return problem_of(error).response()


async def _left(_request: Request, _error: Exception) -> Response:
    """The client left while its body was being read."""
    return Response(status_code=CLIENT_LEFT)


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods, which the router refuses by itself, in OpenAI's error shape."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return not_found("this path does not exist here").response()
    if error.status_code == 405:
        message = "this path does not take this method"
        headers = {"allow": ", ".join(sorted(_methods(request)))}
        return Refused(
            405, "invalid_request_error", "method_not_allowed", message, headers=headers
        ).response()
    message, headers = str(error.detail), dict(error.headers or {})
    return Refused(error.status_code, "invalid_request_error", None, message, headers=headers).response()


def _methods(request: Request) -> set[str]:
    """What the request's path takes. The router names the methods of the first of its routes only."""
    asked = [{**request.scope, "method": method} for method in METHODS]
    return {
        one["method"]
        for one in asked
        if any(route.matches(one)[0] is Match.FULL for route in request.app.routes)
    }
