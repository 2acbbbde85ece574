"""`slipstream healthcheck`: asks a running server's `/health`, for container runtimes. Needs no curl and no API key."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from contextlib import closing
from urllib.parse import urlsplit

from slipstream.engine.settings import Settings
from slipstream.server.http.address import reachable
from slipstream.server.http.limits import unix_path

TIMEOUT_S = 4.0  # container runtimes give a check five seconds


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


def healthcheck(settings: Settings, url: str | None) -> tuple[int, str]:
    """Exit status and a line to print: 0 if the server takes requests, else 1.

    The server is at `url`; without it, at the address of these settings.
    """
    try:
        with closing(_connection(settings, url)) as connection:
            path = settings.api_prefix if url is None else urlsplit(url).path.rstrip("/")
            connection.request("GET", f"{path}/health")
            answer = connection.getresponse()
            told = json.loads(answer.read(65536))["status"]
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        return 1, f"no answer: {str(error) or type(error).__name__}"
    return (0 if answer.status == 200 else 1), str(told)


def _connection(settings: Settings, url: str | None) -> http.client.HTTPConnection:
    if url is not None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("--url: must be http://HOST:PORT or https://HOST:PORT")
        secure, host, port = parts.scheme == "https", parts.hostname, parts.port
    elif path := unix_path(settings.host):
        return _UnixConnection(path, TIMEOUT_S)
    else:
        secure, host, port = settings.ssl_cert_file is not None, reachable(settings.host), settings.port
    if not secure:
        return http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    context = ssl.create_default_context()
    if url is None:
        # Our own server on this machine: its certificate is for its public name.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=context)
