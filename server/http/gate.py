"""The gate gives routes the engine, or refuses: with a 503 while the model is loading, the server is draining or its
device has failed, with a 500 once the engine has failed by itself.

The port is open before the engine is loaded and stays open while the server drains, so every route asks here.
"""

from __future__ import annotations

from slipstream.engine.api import AsyncEngine, Status
from slipstream.server.http.error_table import Refused, internal, problem_of, unavailable

REASONS = {"loading": "the model is loading", "draining": "the server is stopping"}


class Gate:
    """A server's engine and status. While there is no engine the status is "loading"."""

    def __init__(self, engine: AsyncEngine | None = None) -> None:
        self.engine = engine

    @property
    def status(self) -> Status:
        return self.engine.status if self.engine else "loading"

    def for_looking(self) -> AsyncEngine:
        """The engine for a route that only reads, which also answers while draining. Raises `Refused`."""
        if self.engine is None or self.status == "loading":
            raise self.refusal()
        return self.engine

    def for_work(self) -> AsyncEngine:
        """The engine for a route that computes: only while it is ready. Raises `Refused`."""
        if self.engine is None or self.status != "ready":
            raise self.refusal()
        return self.engine

    def refusal(self) -> Refused:
        """The error for a request that may not pass now."""
        status = self.status
        if status in REASONS:
            return unavailable(REASONS[status], status)
        if self.engine is not None and self.engine.device_loss is not None:
            return problem_of(self.engine.device_loss)
        return internal()
