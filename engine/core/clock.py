"""Where a step's time goes: every moment of it belongs to one named part.

A device goes on working after a launch has returned. So the parts say which call the host was in, and waiting for a
device's results is a part of its own: on a GPU `forward` and `pick` are launches, and what the device needs beyond
them is `wait`; on the CPU they are the work itself, and `wait` is nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

PARTS: Mapping[str, str] = {
    "plan": "late requests, free slots, what runs, pages for it",
    "draft": "drafters guess, the best drafts are chosen",
    "batch": "the pass as tensors",
    "forward": "the target's pass; on a GPU its launch",
    "pick": "a token for every row; on a GPU the launch",
    "wait": "until the picks can be read",
    "keep": "drafts judged, tokens and text kept, lengths committed",
    "learn": "drafters given what was kept",
    "publish": "full pages offered, ended requests let go",
    "tell": "the engine's state and the clients' events handed over",
}

_VERIFYING = ("batch", "forward", "pick", "wait")
_WEIGHT = 1 / 64  # of a step in the moving averages


class Clock:
    """Laps of the steps: `start` at a step's beginning, `lap` where a part ends.

    What comes between a step's last lap and the next `start` (requests taken in, idling) belongs to no part. Costs
    about 5 µs a step.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        """now: seconds from any moment on."""
        self.now = now
        self.n_steps = 0
        self._total = dict.fromkeys(PARTS, 0.0)
        self._before = dict(self._total)  # at the running step's start
        self._average = dict(self._total)
        self._since = 0.0
        self._passes: dict[int, tuple[int, float]] = {}
        self.watch: Callable[[str, float, float], None] | None = None  # gets each lap: part, start, end

    def start(self) -> None:
        """A step begins; the step before is over."""
        if self.n_steps:
            weight = max(_WEIGHT, 1 / self.n_steps)
            for part, seconds in self._total.items():
                average = self._average[part]
                self._average[part] = average + weight * (seconds - self._before[part] - average)
                self._before[part] = seconds
        self.n_steps += 1
        self._since = self.now()

    def lap(self, part: str) -> None:
        """The part has lasted from the last lap until now."""
        now = self.now()
        self._total[part] += now - self._since
        if self.watch is not None:
            self.watch(part, self._since, now)
        self._since = now

    def passed(self, n_rows: int, seconds: float) -> None:
        """A pass of so many rows has run, its picks included."""
        most = 1 << (n_rows - 1).bit_length()
        n, total = self._passes.get(most, (0, 0.0))
        self._passes[most] = n + 1, total + seconds

    @property
    def rounds_s(self) -> tuple[float, float]:
        """Seconds since the start in which drafts were made, and in which the target ran and was read."""
        return self._total["draft"], sum(self._total[part] for part in _VERIFYING)

    def totals(self) -> dict[str, float]:
        """Seconds of each part since the start."""
        return dict(self._total)

    def passes(self) -> dict[int, tuple[int, float]]:
        """Rows, rounded up to a power of two -> (passes, seconds of all)."""
        return dict(self._passes)

    def averages(self) -> dict[str, float]:
        """Seconds of each part in a step, of the steps before the running one: moving averages."""
        return dict(self._average)
