"""A clock that stands still until it is wound: what a test says of time does not hang on the machine it runs on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.engine.batch import Download

if TYPE_CHECKING:  # the labs' clock, and they run on a bare machine
    import pytest


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


class DeviceClock(WoundClock):
    """The clock of a host whose device works on while the host goes ahead, and which waits where it reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self._free_at = 0.0  # when the device will be done with all that was launched
        make = Download.__init__

        def launch(download: Download, *args: object) -> None:
            make(download, *args)  # type: ignore[arg-type]
            ready_at = self._free_at
            download._wait = lambda: self.wait(ready_at)

        monkeypatch.setattr(Download, "__init__", launch)

    def launch(self, seconds: float) -> None:
        """The device is given work."""
        self._free_at = max(self._free_at, self.seconds) + seconds

    def wait(self, until: float | None = None) -> None:
        """The host waits for the device; until: not for what was launched later."""
        self.seconds = max(self.seconds, self._free_at if until is None else until)
