"""The gate: holds the engine once it is loaded and says who may pass, by the engine's own status.

The port is open before the engine is loaded and stays open while the server drains, so every route asks here.
"""

from __future__ import annotations

from slipstream.engine.api import AsyncEngine, Status
from slipstream.server.http.error_table import Refused, internal, unavailable

REASONS = {"loading": "the model is loading", "draining": "the server is stopping"}


class Gate:
    """One server's engine and status. Without an engine it is loading."""

    def __init__(self, engine: AsyncEngine | None = None) -> None:
        self._engine = engine

    @property
    def status(self) -> Status:
        return self._engine.status if self._engine else "loading"

    @property
    def engine(self) -> AsyncEngine | None:
        return self._engine

    def open(self, engine: AsyncEngine) -> None:
        self._engine = engine

    def for_looking(self) -> AsyncEngine:
        """The engine for a route that only reads; it also answers while draining."""
        if self._engine is None or self.status == "loading":
            raise self.refusal()
        return self._engine

    def for_work(self) -> AsyncEngine:
        """The engine for a route that computes."""
        if self._engine is None or self.status != "ready":
            raise self.refusal()
        return self._engine

    def refusal(self) -> Refused:
        """Why nothing passes now."""
        status = self.status
        if status in REASONS:
            return unavailable(REASONS[status], status)
        return Refused(internal())
