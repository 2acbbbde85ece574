"""Fixed sizes of a running engine, and how many rows a pass may have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# A pass of prompts alone has twice the rows while a row then takes so much less, and the pass is over in so many
# seconds: a request that comes meanwhile waits for it, and one that is cancelled keeps the device until then.
_CHEAPER, _LONGEST_S = 0.93, 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Sizes that do not change after the start."""

    n_slots: int
    n_ctx: int
    batch_size: int  # rows of one pass
    eos_ids: frozenset[int]
    shared_size: int | None = None  # rows of one in which slots decode; None: as many
    overlaps: bool = False  # a pass may be launched while the pass before it is unread

    def budget(self, seconds_of: Callable[[int], float], *, is_shared: bool) -> int:
        """Most rows of the next pass. No text depends on it: a row's bits are the same in any pass.

        seconds_of: what a pass of so many rows takes. is_shared: slots decode in it, which a long pass would hold up.
        """
        n_rows = self.shared_size or self.batch_size
        while not is_shared and 2 * n_rows <= self.batch_size:
            longer_s = seconds_of(2 * n_rows)
            if longer_s > min(_LONGEST_S, 2.0 * _CHEAPER * seconds_of(n_rows)):
                break
            n_rows *= 2
        return n_rows
