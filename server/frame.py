"""The outermost layer: every response carries `x-request-id`, every request leaves one log line, and an
exception nobody expected becomes a 500 in OpenAI's shape.
"""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import internal
from server.logs import pairs

log = logging.getLogger(__name__)
WELL_FORMED = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Frame:
    """ASGI layer; `state["request_id"]` is the client's id if it is well-formed, else a fresh one."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        offered = Headers(scope=scope).get("x-request-id", "")
        request_id = offered if WELL_FORMED.fullmatch(offered) else f"req-{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id
        started = time.monotonic()
        status = 0

        async def stamped(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self.app(scope, receive, stamped)
        except Exception:
            log.exception("%s", pairs(event="unexpected", request_id=request_id))
            if not status:
                await internal().response()(scope, receive, stamped)
            # After the first byte, returning unfinished makes the HTTP server cut the connection.
        finally:
            log.debug(
                "%s",
                pairs(
                    event="http",
                    request_id=request_id,
                    method=scope["method"],
                    path=scope["path"],
                    status=status,
                    seconds=time.monotonic() - started,
                ),
            )
