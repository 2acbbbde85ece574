"""A process that runs a module of this package, reached through a socket; it ends with this process.

What may die, never return, or take too much of the machine is computed in one.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import weakref
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

import slipstream


class ChildProcess:
    """Started when made. `pipe` leads to it; `end` kills it with all that it started, as dropping the object does."""

    def __init__(self, module: str, *arguments: str, output: IO[bytes] | None = None) -> None:
        """The module's last argument is the number of its socket. output: of what it writes; None: ours.

        Raises `OSError`.
        """
        ours, its = socket.socketpair()
        with its:
            self.process = subprocess.Popen(
                # -P: a file of the user's folder must not pass for a library.
                [sys.executable, "-P", "-m", module, *arguments, str(its.fileno())],
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=_environment(),
                start_new_session=True,  # a terminal's interrupt is for this process alone
            )
        self.pipe = Connection(ours.detach())
        self.end = weakref.finalize(self, _end, self.process, self.pipe)


def limit_memory(n_bytes: int) -> None:
    """Let this process have so many bytes more than it has now, and leave no picture of its memory."""
    with contextlib.suppress(OSError), open("/proc/self/statm") as file:  # absent beyond Linux
        used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + n_bytes, used + n_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _environment() -> dict[str, str]:
    """Of a process that finds the package where this one found it, installed or not."""
    place = str(Path(slipstream.__path__[0]).parent)
    ours = dict(os.environ)  # noqa: TID251 - handed on as it is
    return ours | {"PYTHONPATH": os.pathsep.join(filter(None, (place, ours.get("PYTHONPATH"))))}


def _end(process: subprocess.Popen[bytes], pipe: Connection) -> None:
    pipe.close()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # one that has ended by itself keeps its status
    process.wait()
