"""Grammars compiled in trial, by a process of its own that may be lost.

Compiling cannot be interrupted, and a schema of 40 bytes (`multipleOf` a large prime) can take minutes and gigabytes.
So each new grammar is compiled first by a child process with little processor time and memory; what was cheap there is
compiled again by the server, as a matcher cannot be sent between processes. The child holds the vocabulary and forks
for each trial: a grammar that uses up its limits ends the fork alone.

    python -m slipstream.engine.text.grammar.trial FD
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import NoReturn

from slipstream.engine.constraints import Grammar
from slipstream.engine.errors import InvalidRequest, Unsupported
from slipstream.engine.text.grammar.compiler import Compiler, Vocabulary
from slipstream.kernels.child_process import ChildProcess, limit_memory

log = logging.getLogger(__name__)

MOST_S = 0.5  # of processor time; the schemas of 128 tools take 0.1
MOST_MIB = 256  # beyond what the vocabulary takes
_PATIENCE_S = 60.0  # until an answer, by the clock: the child has low priority, and may have to start
_NICE = 10


class Trial:
    """The child process: started at first use, and again when it was lost. One thread at a time."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._child: ChildProcess | None = None

    def start(self) -> Connection:
        """The pipe to the child, which is started unless it runs, and may still be reading its vocabulary."""
        if self._child is None:
            self._child = ChildProcess(__name__)
            self._child.pipe.send_bytes(json.dumps(asdict(self.vocabulary)).encode())
        return self._child.pipe

    def check(self, grammar: Grammar) -> None:
        """Compile a grammar. Raises `InvalidRequest` if it cannot be used or takes more than the limits.

        Raises `Unsupported` if the child cannot be started, or was lost.
        """
        try:
            pipe = self.start()
            pipe.send_bytes(json.dumps(asdict(grammar)).encode())
            if not pipe.poll(_PATIENCE_S):
                raise TimeoutError(f"no answer within {_PATIENCE_S:g} s")
            answer = json.loads(pipe.recv_bytes())
        except (OSError, EOFError) as error:
            self.close()
            log.warning("the process that compiles grammars in trial was lost: %r", error)
            raise Unsupported(
                grammar.param, "the process that compiles grammars in trial was lost; try again"
            ) from None
        if answer["reason"] is not None:
            raise InvalidRequest(grammar.param, answer["reason"])

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.end()
            self._child = None


def _serve(pipe: Connection) -> None:
    """The child: try grammars until the pipe is closed."""
    os.nice(_NICE)
    compiler = Vocabulary(**json.loads(pipe.recv_bytes())).compiler("grammar")
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            grammar = Grammar(**json.loads(pipe.recv_bytes()))
            pid = os.fork()
            if not pid:
                _try(compiler, grammar, pipe)
            _, status = os.waitpid(pid, 0)
            if status:
                _answer(pipe, _limit(status))


def _try(compiler: Compiler, grammar: Grammar, pipe: Connection) -> NoReturn:
    """The fork: compile within limits, answer, end."""
    signal.setitimer(signal.ITIMER_PROF, MOST_S)  # its signal ends the process
    limit_memory(MOST_MIB << 20)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what an allocator says as it gives up
    reason = None
    try:
        compiler.matcher(grammar)
    except InvalidRequest as error:
        reason = str(error).removeprefix(f"{grammar.param}: ")
    except BaseException:  # noqa: BLE001 - no memory, or a panic
        os._exit(1)
    signal.setitimer(signal.ITIMER_PROF, 0)  # or there might be two answers
    _answer(pipe, reason)
    os._exit(0)


def _answer(pipe: Connection, reason: str | None) -> None:
    pipe.send_bytes(json.dumps({"reason": reason}).encode())


def _limit(status: int) -> str:
    """Why a fork ended without an answer."""
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        return f"compiling it takes more than {MOST_S:g} s of processor time"
    return f"compiling it takes more than {MOST_MIB} MiB of memory"


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
