"""A client of a running server, for the subcommands that ask one."""

from __future__ import annotations

import ssl
from typing import Any

import httpx

from slipstream.engine.settings import Settings
from slipstream.server.http.address import url_of
from slipstream.server.http.limits import unix_path


def client_of(settings: Settings, url: str | None, **options: Any) -> httpx.Client:
    """A client of the server at `url`, or at the address that the settings mean. options: of `httpx.Client`."""
    path = unix_path(settings.host)
    if url is None and path is not None:
        address = f"http://localhost{settings.api_prefix}"
        return httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url=address, **options)
    if url is None:  # our own server on this machine: its certificate is for its public name
        return httpx.Client(base_url=url_of(settings, settings.port), verify=False, **options)
    # The certificates that the system trusts, not those that httpx brings with it.
    return httpx.Client(base_url=url, verify=ssl.create_default_context(), **options)
