"""Tells systemd how far a service of `Type=notify` is (sd_notify(3)). Without its socket nothing is told."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

Notify = Callable[[str], None]

READY, STOPPING = "READY=1", "STOPPING=1"


def silent(_state: str) -> None:
    """For servers that nobody supervises."""


def over(address: str | None) -> Notify:
    """Sends states to the socket that systemd names in `NOTIFY_SOCKET`; @ begins an abstract one."""
    if not address or address[0] not in "/@":
        return silent
    name = "\0" + address[1:] if address[0] == "@" else address

    def notify(state: str) -> None:
        # A supervisor that is gone is no reason to stop serving.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
            link.connect(name)
            link.sendall(state.encode())

    return notify
