"""API keys: a Bearer token or X-Api-Key on every path but the public ones.

Keys are compared in constant time, and against all of them, so that timing tells nothing. The matching key's
hash becomes the tenant, which salts prefix-cache keys.
"""

from __future__ import annotations

import hashlib
import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.settings import Settings
from server.errors import unauthorized

PUBLIC = frozenset({"/health", "/v1/health", "/live"})


def keys_of(settings: Settings) -> tuple[str, ...]:
    return tuple(key for part in (settings.api_key or "").split(",") if (key := part.strip()))


def salted(tenant: str, cache_salt: str | None) -> str:
    """Whose prefix cache a request shares: its API key's, or the part of it that its salt sets apart."""
    return f"{tenant}:{cache_salt}" if cache_salt else tenant


class Auth:
    """ASGI layer that answers 401 unless a key is right, and sets `state["tenant"]`."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...], public: frozenset[str]) -> None:
        self.app = app
        self.keys = tuple(key.encode() for key in keys)
        self.public = public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self.keys and scope["path"] not in self.public:
            tenant = self._tenant(Headers(scope=scope))
            if tenant is None:
                await unauthorized().problem.response()(scope, receive, send)
                return
            scope.setdefault("state", {})["tenant"] = tenant
        await self.app(scope, receive, send)

    def _tenant(self, headers: Headers) -> str | None:
        offered = headers.get("authorization") or headers.get("x-api-key") or ""
        scheme, _, token = offered.partition(" ")
        key = (token if scheme.lower() == "bearer" else offered).strip().encode("utf-8", "replace")
        found = [mine for mine in self.keys if hmac.compare_digest(mine, key)]
        return hashlib.sha256(found[0]).hexdigest()[:16] if found else None
