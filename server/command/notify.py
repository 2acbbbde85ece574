"""Reports to systemd when a service of `Type=notify` is ready and when it stops (sd_notify(3)).

Without systemd's socket nothing is sent.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

Notify = Callable[[str], None]

READY, STOPPING = "READY=1", "STOPPING=1"


def silent(_state: str) -> None:
    """Does nothing: for servers that systemd did not start."""


def over(address: str | None) -> Notify:
    """A function that sends states to systemd's socket; `silent` if there is no socket.

    `address`: the value of `NOTIFY_SOCKET`; a leading @ means an abstract socket.
    """
    if not address or address[0] not in "/@":
        return silent
    name = "\0" + address[1:] if address[0] == "@" else address

    def notify(state: str) -> None:
        # A supervisor that is gone is no reason to stop serving.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
            link.connect(name)
            link.sendall(state.encode())

    return notify
