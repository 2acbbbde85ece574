"""Standard streams that are closed, at the start or later, and end no server: `>&-`, a pipe or a terminal that goes.

A server whose output has no reader still serves. What it logs is lost then, as the logging module leaves it.
"""

from __future__ import annotations

import contextlib
import os
import sys

STREAMS = ("stdin", "stdout", "stderr")


def hold() -> None:
    """Open the null device for standard streams that are closed. Call it first.

    Otherwise a socket or a file would be given such a stream's number, and be written to by whatever prints.
    """
    for number, name in enumerate(STREAMS):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w" if number else "r", encoding="utf-8"))  # noqa: SIM115


def show(text: str) -> None:
    """Write to standard output, if that is still there."""
    with contextlib.suppress(OSError):
        sys.stdout.write(text)
        sys.stdout.flush()


def let_go() -> None:
    """Write what waits in output streams. Where one is gone, Python would make that the exit status."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
