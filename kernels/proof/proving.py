"""Runs proofs in processes of their own, several at a time, and keeps what was proven for later starts.

An implementation may end the process it runs in, spoil its device or never return. Such a process is given up, what
it was trying has failed, and another one tries the next. That the processes are several is also how kernels are
compiled on all cores: what they compile is kept on the disk, where the server finds it.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import IO, Any

from slipstream.kernels.child_process import ChildProcess

log = logging.getLogger(__name__)

PATIENCE_S = 300.0  # for an implementation, its compilation included
_START_S = 120.0  # for a process to import torch
_MOST_PROCESSES = 8
_N_TAIL = 300  # characters of a dead process' last words
_CHILD = "slipstream.kernels.proof.child"


@dataclass(frozen=True, slots=True)
class Task:
    """An op to be proven, and its implementations, best first."""

    device: str
    dtype: str
    op: str
    implementations: tuple[str, ...]
    leaves_out: tuple[str, ...] = ()  # cases that the server has no use for
    weights: str | None = None  # of a type that few models have: its cases alone
    rounds: bool = False  # whether products round their inputs to eight bits

    def says(self, implementation: str) -> str:
        """The implementation, and what of it is to be proven."""
        of = "" if self.weights is None else f" of {self.weights}"
        return f"{self.op}.{implementation}{of}{' with rounded inputs' if self.rounds else ''}"

    def key(self, implementation: str) -> str:
        """Of what is proven, within one state of sources and machine."""
        return " ".join((self.device, self.dtype, self.says(implementation), *self.leaves_out))


@dataclass(frozen=True, slots=True)
class Tried:
    """What became of a task."""

    task: Task
    proven: str | None  # the implementation that proved itself; None: none did, or nothing could be tried
    failed: tuple[tuple[str, str], ...] = ()  # (implementation, reason) of those before it


class NotTriedError(RuntimeError):
    """No process could be started in which implementations might have proven themselves."""


def run(
    tasks: Sequence[Task],
    n_threads: int,
    *,
    child: Sequence[str] = (_CHILD,),
    patience_s: float = PATIENCE_S,
    done: Callable[[Tried], None] = lambda tried: None,
) -> list[Tried]:
    """Try every task, several at a time. Raises NotTriedError if no process could be started at all.

    n_threads: torch's in each process, as in the server. child: the module that tries, and its first arguments. done:
    called as each task ends, in some thread.
    """
    waiting = iter(tasks)  # shared: a task goes to the first worker that is free
    untried: list[tuple[Task, NotTriedError]] = []

    def work() -> list[Tried]:
        found = []
        with _Worker(child, n_threads, patience_s) as worker:
            for task in waiting:
                try:
                    found.append(worker.try_all(task))
                except NotTriedError as error:
                    untried.append((task, error))
                    break  # the others go on
                done(found[-1])
        return found

    n_workers = min(len(tasks), os.cpu_count() or 1, _MOST_PROCESSES)
    with ThreadPoolExecutor(max(1, n_workers), thread_name_prefix="proof") as pool:
        futures = [pool.submit(work) for _ in range(n_workers)]
        found = [tried for one in futures for tried in one.result()]
    if untried and not found:
        raise untried[0][1]
    for task, error in untried:
        log.warning("operator %s was not proven, as no process for it could be started: %s", task.op, error)
    return found + [Tried(task, None) for task, _ in untried]


def _nameless_file() -> IO[bytes]:
    """In memory on Linux, where a start then needs no folder for temporary files."""
    if sys.platform == "linux":
        return open(os.memfd_create("proof"), "w+b")
    return tempfile.TemporaryFile()


class _Lost(Exception):
    """The process ended or was given up."""


class _Worker:
    """One process at a time, replaced when it is lost."""

    def __init__(self, child: Sequence[str], n_threads: int, patience_s: float) -> None:
        self._child, self._n_threads, self._patience_s = child, n_threads, patience_s
        self._running: ChildProcess | None = None
        self._log = _nameless_file()

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._give_up()
        self._log.close()

    def try_all(self, task: Task) -> Tried:
        """A task's implementations up to the first that proves itself."""
        failed: dict[str, str] = {}
        while left := [name for name in task.implementations if name not in failed]:
            trying, proven = left[0], None
            try:
                for answer in self._answers(task, left):
                    trying = answer.get("trying", trying)
                    if "tried" in answer and answer["reason"] is None:
                        proven = trying
                    elif "tried" in answer:
                        failed[trying] = answer["reason"]
            except _Lost as lost:
                failed[trying] = str(lost)
            if proven is not None:
                return Tried(task, proven, tuple(failed.items()))
        return Tried(task, None, tuple(failed.items()))

    def _answers(self, task: Task, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """What the process says of the implementations. Raises `_Lost`, with the process' last words."""
        pipe = self._started()
        try:
            pipe.send_bytes(json.dumps({**asdict(task), "implementations": names}).encode())
            while answer := self._heard(pipe, self._patience_s):
                yield answer
        except TimeoutError as error:
            self._give_up()
            raise _Lost(str(error)) from None
        except (OSError, EOFError):
            raise _Lost(f"the process that tried it ended: {self._give_up()}") from None

    def _heard(self, pipe: Connection, patience_s: float) -> dict[str, Any]:
        if not pipe.poll(patience_s):
            raise TimeoutError(f"it did not end within {patience_s:g} s")
        answer: dict[str, Any] = json.loads(pipe.recv_bytes())
        return answer

    def _started(self) -> Connection:
        """The pipe to the process, which is started unless it runs. Raises NotTriedError."""
        if self._running is not None:
            return self._running.pipe
        self._running = ChildProcess(*self._child, str(self._n_threads), output=self._log)
        try:
            self._heard(self._running.pipe, _START_S)
        except (OSError, EOFError) as error:
            raise NotTriedError(self._give_up() or repr(error)) from None
        return self._running.pipe

    def _give_up(self) -> str:
        """End the process and all it started. Returns its last words."""
        if self._running is None:
            return ""
        self._running.end()
        status = self._running.process.returncode
        self._running = None
        self._log.seek(0)
        said = self._log.read().decode(errors="replace").strip()
        self._log.truncate(0)
        return said[-_N_TAIL:] or f"status {status}"
