"""What an operator is run on in its proof: all rows at once for the definition, and cuts of them for the bits.

A row's result must not depend on what is computed with it: a token has the same logits whether it is decoded alone,
verified behind drafts or read in a prompt, beside any other request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from slipstream.kernels.proof.inputs import Inputs

WIDTHS = (1, 2, 3, 5, 8, 16, 32, 64)
N_ROWS = 70


class Cut(NamedTuple):
    """Some of a case's rows, computed in another way than all at once."""

    says: str
    rows: slice  # of each whole result, with which the results are equal in every bit
    results: Sequence[Tensor]


class Case(Protocol):
    """One use of an operator."""

    def whole(self) -> Sequence[Tensor]:
        """All rows in one call: what it returns, and what it changed."""
        ...

    def cuts(self) -> Iterator[Cut]: ...


Make = Callable[[Inputs], Case]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that know nothing of each other. compute: (first row, number of rows) -> results, each [n, …]."""

    compute: Callable[[int, int], Sequence[Tensor]]
    n_rows: int = N_ROWS  # at least as many

    def whole(self) -> Sequence[Tensor]:
        return self.compute(0, self.n_rows)

    def cuts(self) -> Iterator[Cut]:
        for width in WIDTHS:
            for first in sorted({0, 3, self.n_rows - width}):
                if first + width <= self.n_rows:
                    rows = slice(first, first + width)
                    yield Cut(f"{width} rows from row {first}", rows, self.compute(first, width))


class Feed(Protocol):
    """Feeds a sequence of N_ROWS to a recurrence in passes: (outputs [N_ROWS, …], state at the end)."""

    def __call__(self, lengths: Sequence[int], *, beside: bool, parks: bool = False) -> Sequence[Tensor]:
        """lengths: rows of each pass. beside: other slots move on too. parks: all rows of a pass but its first are
        parked, and folded into the state by the next pass."""
        ...


@dataclass(frozen=True, slots=True)
class Passes:
    """A sequence that may be cut into passes anywhere, with rows that are parked and folded later."""

    feed: Feed

    def whole(self) -> Sequence[Tensor]:
        return self.feed([N_ROWS], beside=False)

    def cuts(self) -> Iterator[Cut]:
        every = slice(None)
        for width in WIDTHS:
            lengths = [min(width, N_ROWS - start) for start in range(0, N_ROWS, width)]
            for beside in (False, True):
                company = ", beside others" if beside else ""
                yield Cut(f"passes of {width} rows{company}", every, self.feed(lengths, beside=beside))
        for width in (2, 5):
            lengths = [width] * (N_ROWS // width)
            parked = self.feed(lengths, beside=False, parks=True)
            yield Cut(f"passes of {width} rows, parked and folded", every, parked)


@dataclass(frozen=True, slots=True)
class Once:
    """A call whose rows are no sums: it is held against the definition alone."""

    call: Callable[[], Sequence[Tensor]]

    def whole(self) -> Sequence[Tensor]:
        return self.call()

    def cuts(self) -> Iterator[Cut]:
        return iter(())
