"""What a request may be before anyone reads it: its size and the host name it was sent to.

The host check keeps a web page elsewhere from reaching a loopback server through a rebound DNS name.
"""

from __future__ import annotations

import ipaddress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import too_large, wrong_host


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class HostCheck:
    """ASGI layer that, on a loopback server, refuses requests meant for another host name."""

    def __init__(self, app: ASGIApp, host: str) -> None:
        self.app = app
        self.checks = is_loopback(host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self.checks:
            named = Headers(scope=scope).get("host")
            # HTTP/1.0 may leave the header out; no browser does.
            if named is not None and not is_loopback(_without_port(named)):
                await wrong_host().problem.response()(scope, receive, send)
                return
        await self.app(scope, receive, send)


def _without_port(named: str) -> str:
    if named.startswith("["):
        return named[1:].partition("]")[0]
    return named.partition(":")[0].lower()


class BodyLimit:
    """ASGI layer that refuses a body over the limit: by its announced length, and while it is read."""

    def __init__(self, app: ASGIApp, limit_mib: int) -> None:
        self.app = app
        self.limit_mib = limit_mib

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limit = self.limit_mib << 20
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "0")
        if not announced.isdecimal() or int(announced[:20]) > limit:
            await too_large(self.limit_mib).problem.response()(scope, receive, send)
            return
        n_read = 0

        async def counting() -> Message:
            nonlocal n_read
            message = await receive()
            n_read += len(message.get("body", b""))
            if n_read > limit:
                raise too_large(self.limit_mib)
            return message

        await self.app(scope, counting, send)
