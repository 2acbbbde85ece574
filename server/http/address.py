"""The address a server listens on, a TCP port or a unix socket, and the URL under which clients reach it.

The socket is bound before the model is loaded, so that a taken port is reported at once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat

from slipstream.engine.errors import SettingError
from slipstream.engine.settings import Settings
from slipstream.server.http.limits import unix_path

BACKLOG = 2048
# Other refusals are of the address: one of another machine, or no IPv6 here.
_OF_THE_PORT = (errno.EADDRINUSE, errno.EACCES)


def bind(settings: Settings) -> socket.socket:
    """A listening socket for `settings.host` and `settings.port`.

    Raises `SettingError`; where the operating system refused, its cause is the `OSError`.
    """
    path = unix_path(settings.host)
    return _bind_unix(path) if path is not None else _bind_tcp(settings)


def is_taken(error: SettingError) -> bool:
    """Whether `bind` failed because another process listens at this address."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE


def _bind_tcp(settings: Settings) -> socket.socket:
    try:
        found = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        # `localhost` has an IPv4 and an IPv6 address. IPv4 is preferred: clients try it at least as often.
        family, kind, protocol, _, address = sorted(found, key=lambda one: one[0] != socket.AF_INET)[0]
        port = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:  # the latter for names that DNS cannot have, as `a..b`
        raise SettingError("host", settings.host, str(error)) from error
    try:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind(address)
        port.listen(BACKLOG)
    except OSError as error:
        port.close()
        name = "port" if error.errno in _OF_THE_PORT else "host"
        raise SettingError(name, getattr(settings, name), error.strerror or str(error)) from error
    return port


def _bind_unix(path: str) -> socket.socket:
    """A socket whose file only this user may open. The file of a dead server is replaced; any other file is kept."""
    port = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        before = os.umask(0o177)
        try:
            port.bind(path)
        finally:
            os.umask(before)
        port.listen(BACKLOG)
    except OSError as error:
        port.close()
        raise SettingError("host", path, error.strerror or str(error)) from error
    return port


def _remove_stale(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise OSError(errno.EEXIST, "a file that is no socket is in the way")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(path)
            except ConnectionRefusedError:  # no process listens on it
                os.unlink(path)
            else:
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def mark_of(settings: Settings) -> int | None:
    """The inode of this server's socket file, by which `release` recognizes it; None for a TCP port.

    Another server may have replaced the file by then.
    """
    path = unix_path(settings.host)
    return None if path is None else os.stat(path).st_ino


def release(settings: Settings, mark: int | None) -> None:
    """Remove the socket file of a server that ends, unless `mark` (from `mark_of`) says that it is another server's."""
    path = unix_path(settings.host)
    with contextlib.suppress(OSError):
        if path is not None and os.stat(path).st_ino == mark:
            os.unlink(path)


def reachable(host: str) -> str:
    """A host name that a client on this machine can connect to."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def url_of(settings: Settings, port: int | None) -> str:
    """The server's address as it is shown in messages: a URL, or `unix:` and the path of a unix socket."""
    if (path := unix_path(settings.host)) is not None:
        return f"unix:{path}{settings.api_prefix}"
    host = reachable(settings.host)
    scheme = "https" if settings.ssl_cert_file else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{settings.api_prefix}"
