"""Reports to systemd when a service of `Type=notify` is ready and when it stops (sd_notify(3))."""

from __future__ import annotations

import contextlib
import socket

READY, STOPPING = "READY=1", "STOPPING=1"


def notify(address: str | None, state: str) -> None:
    """Send a state to systemd's socket; nothing where systemd did not start the server.

    `address`: the value of `NOTIFY_SOCKET`; a leading @ means an abstract socket.
    """
    if not address or address[0] not in "/@":
        return
    name = "\0" + address[1:] if address[0] == "@" else address
    # A supervisor that is gone is no reason to stop serving.
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
        link.connect(name)
        link.sendall(state.encode())
