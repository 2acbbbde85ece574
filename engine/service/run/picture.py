"""The engine's figures for readers on other threads: a picture taken between two steps, at most every 20 ms."""

from __future__ import annotations

from slipstream.engine.core.engine import Engine
from slipstream.engine.stats import EngineStats

_FRESH_S = 0.02  # a picture costs 5 % of a tiny model's step


class Picture:
    """The engine's figures. They are renewed on the engine's thread and read on any."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._taken_s, self._n_moves = engine.now(), engine.seats.n_moves
        self.stats: EngineStats = engine.stats()

    def renew(self) -> None:
        """Take a new picture; while the same requests run, a picture less than 20 ms old is kept."""
        now, n_moves = self._engine.now(), self._engine.seats.n_moves
        if self._engine.busy and n_moves == self._n_moves and now - self._taken_s < _FRESH_S:
            return
        self.stats, self._taken_s, self._n_moves = self._engine.stats(), now, n_moves
