"""One worker thread that many owners share: each owner's jobs in order, the owners in turn."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from slipstream.engine.fair_queue import FairQueue

T = TypeVar("T")


class Turns(Generic[T]):
    """However many jobs an owner has waiting, each other owner's next job waits for one of them at most."""

    def __init__(self, name: str) -> None:
        self._jobs: FairQueue[tuple[Future[T], Callable[[], T]]] = FairQueue()
        self._lock = threading.Lock()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    def add(self, owner: str, work: Callable[[], T]) -> Future[T]:
        """Run the work in the owner's turn. A future cancelled before that is passed over."""
        future: Future[T] = Future()
        with self._lock:
            self._jobs.add(owner, (future, work))
        self._worker.submit(self._next)
        return future

    def close(self) -> None:
        """Take no more jobs, and drop those that wait."""
        self._worker.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            while self._jobs:
                future, _ = self._jobs.pop()
                future.cancel()

    def _next(self) -> None:
        with self._lock:
            if not self._jobs:
                return  # closed a moment ago
            future, work = self._jobs.pop()
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised where it is awaited; panics are no `Exception`
            future.set_exception(error)
