"""API keys: a Bearer token or X-Api-Key on every path except the public paths.

The offered key is compared with every accepted key, each in constant time, so that timing reveals nothing; only digests
are kept. The matching key's digest becomes the tenant, which keeps the cached prompts of different keys apart.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from functools import cache
from pathlib import Path

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from slipstream.engine.errors import SettingError
from slipstream.engine.settings import Settings
from slipstream.server.http.error_table import unauthorized
from slipstream.server.http.web_page import FILES

HEALTH = frozenset({"/health", "/v1/health", "/ping", "/live", "/ready"})
PUBLIC = HEALTH | FILES.keys()


def keys_of(settings: Settings) -> tuple[str, ...]:
    """The accepted keys, from the setting and from the file; empty if neither is set.

    Raises `SettingError` for a source that holds no key or cannot be read, so that it does not leave the server open.
    """
    keys = [key for part in (settings.api_key or "").split(",") if (key := part.strip())]
    if settings.api_key is not None and not keys:
        raise SettingError("api_key", "''", "no key in it")
    if settings.api_key_file is not None:
        keys += _keys_in(settings.api_key_file)
    return tuple(dict.fromkeys(keys))


@cache  # a pipe gives its text once, and a file may be gone by the time the model is loaded
def _keys_in(path: str) -> tuple[str, ...]:
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # Windows' editors write a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise SettingError("api_key_file", path, reason or str(error)) from error
    keys = tuple(key for line in text.splitlines() if (key := line.strip()) and not key.startswith("#"))
    if not keys:
        raise SettingError("api_key_file", path, "no key in it")
    return keys


def open_to_others(path: str) -> bool:
    """Whether other users of this machine may read or change the file."""
    return bool(Path(path).stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO))


def tenant_of(request: Request) -> str:
    """Whose request it is: the tenant of its API key; "" where keys are not checked."""
    return getattr(request.state, "tenant", "")


def salted(tenant: str, cache_salt: str | None) -> str:
    """The tenant whose cached prompts a request shares: its API key's, or a part of that set apart by its salt."""
    return f"{tenant}:{cache_salt}" if cache_salt else tenant


def is_of(tenant: str, key_tenant: str) -> bool:
    """Whether a request's tenant is that of an API key, or a part of it; without keys every request's is."""
    return not key_tenant or tenant == key_tenant or tenant.startswith(f"{key_tenant}:")


class Auth:
    """ASGI layer that answers 401 unless the request has an accepted key, and sets `state["tenant"]`.

    Without accepted keys every request passes.
    """

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self.app = app
        self.digests = tuple(_digest(os.fsencode(key)) for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self.digests and scope["path"] not in PUBLIC:
            tenant = self._tenant(Headers(scope=scope))
            if tenant is None:
                await unauthorized().response()(scope, receive, send)
                return
            scope.setdefault("state", {})["tenant"] = tenant
        await self.app(scope, receive, send)

    def _tenant(self, headers: Headers) -> str | None:
        offered = headers.get("authorization") or headers.get("x-api-key") or ""
        scheme, _, token = offered.partition(" ")
        # Other spaces are, as this text is read, the ends of other characters.
        key = (token if scheme.lower() == "bearer" else offered).strip(" \t")
        digest = _digest(key.encode("latin-1"))
        found = [mine for mine in self.digests if hmac.compare_digest(mine, digest)]
        return found[0].hex()[:16] if found else None


def _digest(key: bytes) -> bytes:
    """Of a key in UTF-8, which is what most clients send; bytes that are none are Latin-1, as browsers have it."""
    try:
        key.decode("utf-8")
    except UnicodeDecodeError:
        key = key.decode("latin-1").encode("utf-8")
    return hashlib.sha256(key).digest()
