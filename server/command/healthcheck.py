"""`slipstream healthcheck`: asks a running server's `/health`, for container runtimes. Needs no curl and no API key."""

from __future__ import annotations

from urllib.parse import urlsplit

import httpx

from slipstream.engine.settings import Settings
from slipstream.server.command.client import client_of

TIMEOUT_S = 4.0  # container runtimes give a check five seconds


def healthcheck(settings: Settings, url: str | None) -> tuple[int, str]:
    """Exit status and a line to print: 0 if the server takes requests, else 1.

    The server is at `url`; without it, at the address of these settings.
    """
    try:
        if url is not None:
            _check(url)
        with client_of(settings, url, timeout=TIMEOUT_S, trust_env=False) as server:
            answer = server.get("/health")
    except (OSError, httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        return 1, f"no answer: {str(error) or type(error).__name__}"
    try:
        told = answer.json()["status"]
    except (ValueError, KeyError, TypeError):
        return (
            1,
            f"{answer.url} answers {answer.status_code} and no status: another server, or another --api-prefix?",
        )
    return (0 if answer.status_code == 200 else 1), str(told)


def _check(url: str) -> None:
    """Raises `ValueError` for what is no address."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("--url: must be http://HOST:PORT or https://HOST:PORT")
    try:
        _ = parts.port  # the system would take the port's last 16 bits, and the check ask another server
    except ValueError as error:
        raise ValueError(f"--url: {error}") from None
