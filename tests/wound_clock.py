"""A clock that stands still until it is wound: what a test says of time does not hang on the machine it runs on."""

from __future__ import annotations


class WoundClock:
    """Seconds. `tick`: how far it moves on by itself each time that it is looked at, as if all work took that long."""

    def __init__(self, tick: float = 0.0) -> None:
        self.seconds = 0.0
        self._tick = tick

    def __call__(self) -> float:
        self.seconds += self._tick
        return self.seconds

    def wind(self, seconds: float) -> None:
        """So much time goes by."""
        self.seconds += seconds
