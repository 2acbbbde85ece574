"""One worker thread that many tenants share: each tenant's jobs in order, the tenants in turn."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """However many jobs a tenant has waiting, each other tenant's next job waits for one of them at most."""

    def __init__(self, name: str) -> None:
        self._jobs: OrderedDict[str, deque[tuple[Future[T], Callable[[], T]]]] = OrderedDict()
        self._lock = threading.Lock()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    def add(self, tenant: str, work: Callable[[], T]) -> Future[T]:
        """Run the work in the tenant's turn. A future cancelled before that is passed over."""
        future: Future[T] = Future()
        with self._lock:
            self._jobs.setdefault(tenant, deque()).append((future, work))
        self._worker.submit(self._next)
        return future

    def close(self) -> None:
        """Take no more jobs, and drop those that wait."""
        self._worker.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for jobs in self._jobs.values():
                for future, _ in jobs:
                    future.cancel()

    def _next(self) -> None:
        with self._lock:
            tenant, jobs = self._jobs.popitem(last=False)
            future, work = jobs.popleft()
            if jobs:
                self._jobs[tenant] = jobs
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised where it is awaited; panics are no `Exception`
            future.set_exception(error)
