"""ASGI layers that check a request before its route: the path's prefix, the body's size and time, the host name.

The host check keeps web pages of other sites from reaching a loopback server through a rebound DNS name.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import time
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.engine.api import ModelInfo
from slipstream.engine.errors import SettingError
from slipstream.engine.settings import Settings
from slipstream.server.http.error_table import not_found, too_large, too_slow, two_lengths, wrong_host

PREFIX = re.compile(r"(/[A-Za-z0-9._~-]+)*")
ORIGIN = re.compile(r"https?://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")
COLLECTOR = re.compile(r"https?://[^/?#\s]", re.IGNORECASE)
LEAST_BYTES_PER_S = 1 << 14  # of a long body: 16 KiB/s, which a slow mobile link still has


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def unix_path(host: str) -> str | None:
    """The path of a unix socket, if `host` names one."""
    if host.startswith("unix:"):
        return host.removeprefix("unix:")
    return host if host.endswith(".sock") else None


# `--cors-origins localhost`: pages that this machine serves, at any port.
LOCALHOST, LOCAL_ORIGIN = "localhost", r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?"


def origins_of(settings: Settings) -> list[str]:
    return [one for part in (settings.cors_origins or "").split(",") if (one := part.strip())]


def check(settings: Settings) -> None:
    """Raises `SettingError` for wrong settings of the HTTP server, which `engine.settings.check` does not check."""
    if not PREFIX.fullmatch(settings.api_prefix):
        raise SettingError(
            "api_prefix", settings.api_prefix, "must begin with / and not end with it, as in /llm"
        )
    for origin in origins_of(settings):
        if origin != LOCALHOST and not ORIGIN.fullmatch(origin):
            reason = f"is neither {LOCALHOST} nor an exact origin, as in https://my.example:8443; * is not accepted"
            raise SettingError("cors_origins", origin, reason)
    if (settings.ssl_key_file is None) != (settings.ssl_cert_file is None):
        absent, given = ("key", "cert") if settings.ssl_key_file is None else ("cert", "key")
        reason = f"--ssl-{absent}-file is needed too"
        raise SettingError(f"ssl_{given}_file", getattr(settings, f"ssl_{given}_file"), reason)
    if settings.otlp_endpoint and not COLLECTOR.match(settings.otlp_endpoint):
        reason = "must be an http or https address, as in http://localhost:4318"
        shown = settings.otlp_endpoint.rpartition("@")[2]  # without a password
        raise SettingError("otlp_endpoint", shown, reason)
    if unix_path(settings.host) == "":
        raise SettingError("host", settings.host, "a path is needed after unix:")
    if settings.remote_image_hosts is not None and not settings.allow_remote_images:
        raise SettingError(
            "remote_image_hosts", settings.remote_image_hosts, "has no use without --allow-remote-images"
        )


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
                await wrong_host().response()(scope, receive, send)
                return
        await self.app(scope, receive, send)


def _without_port(named: str) -> str:
    if named.startswith("["):
        host, _, rest = named[1:].partition("]")
        return host if not rest or rest.startswith(":") else named
    return named.partition(":")[0].lower()


class Prefix:
    """ASGI layer that serves everything below `prefix`, and nothing beside it."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self.app = app
        self.prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self.prefix:
            path, below = scope["path"], f"{self.prefix}/"
            if path == self.prefix:
                # The web page's links are relative, so its path must end with a slash.
                await RedirectResponse(below, 308)(scope, receive, send)
                return
            if not path.startswith(below):
                problem = not_found("this path does not exist here; --api-prefix is in front of every route")
                await problem.response()(scope, receive, send)
                return
            # Changed in place, so that `Envelope` outside logs and counts the route's own path.
            scope["path"] = path[len(self.prefix) :]
            scope["raw_path"] = scope["raw_path"][len(self.prefix) :]
        await self.app(scope, receive, send)


TEXT_MIB, IMAGES_MIB = 8, 48  # of a body, unless it is set; photographs are written as base64


def most_body(info: ModelInfo | None, settings: Settings) -> int:
    """MiB that a body may have. info: None while the model is loading."""
    if settings.max_body is not None:
        return settings.max_body
    return IMAGES_MIB if info is not None and "image" in info.modalities else TEXT_MIB


class BodyLimit:
    """ASGI layer that refuses a body over the limit: by its announced length, and while it is read.

    A body may take `timeout_s`, and a second more for every LEAST_BYTES_PER_S that have arrived.
    """

    def __init__(self, app: ASGIApp, limit_mib: Callable[[], int], timeout_s: float) -> None:
        self.app = app
        self.limit_mib = limit_mib
        self.timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        limit_mib = self.limit_mib()
        limit = limit_mib << 20
        headers = Headers(scope=scope)
        if "content-length" in headers and "transfer-encoding" in headers:
            # What a proxy in front took for the body's end may be another place (RFC 9112, 6.1).
            await two_lengths().response()(scope, receive, send)
            return
        announced = headers.get("content-length", "0")
        if not announced.isdecimal() or int(announced[:20]) > limit:
            await too_large(limit_mib).response()(scope, receive, send)
            return
        n_read, has_more, started = 0, True, time.monotonic()

        async def counting() -> Message:
            nonlocal n_read, has_more
            if not has_more:  # the route waits for the client to disconnect
                return await receive()
            allowed = self.timeout_s + n_read / LEAST_BYTES_PER_S
            try:
                async with asyncio.timeout(started + allowed - time.monotonic()):
                    message = await receive()
            except TimeoutError:
                raise too_slow(self.timeout_s) from None
            n_read += len(message.get("body", b""))
            has_more = message.get("more_body", False)
            if n_read > limit:
                raise too_large(limit_mib)
            return message

        await self.app(scope, counting, send)
