"""The proof of sums over ranks: those that serve pass it, and those whose bits depend on other rows do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from slipstream.engine.ranks import Ranks
from slipstream.engine.service.start.sums import Sums
from tests.ranks import CPU, c10d, together

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def told(n: int, dtype: torch.dtype, kind: Callable[[int, int, object], Ranks] = Ranks) -> list[str | None]:
    """What each of n ranks says of sums as `kind` makes them."""
    sums = Sums(96, 24, dtype, CPU)
    return together(n, lambda ranks: sums.problem(kind(ranks.rank, ranks.n, ranks.group)))


@pytest.mark.sampled(keep=4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_sums_that_serve_prove_themselves(n: int, dtype: torch.dtype) -> None:
    assert told(n, dtype) == [None] * n


class AllReduce(Ranks):
    """Sums as the transport makes them: gloo's ring begins with another rank in each run of numbers."""

    def add(self, part: Tensor) -> Tensor:
        total = part.clone()
        options = c10d.AllreduceOptions()
        options.reduceOp = c10d.ReduceOp.SUM
        self.group.allreduce([total], options).wait()
        return total


class OrderBySize(Ranks):
    """Sums of many rows begin with the last rank."""

    def add(self, part: Tensor) -> Tensor:
        parts = self._gather(part).float()
        if len(part) > 16:
            parts = parts.flip(0)
        total = parts[0]
        for other in parts[1:]:
            total = total + other
        return total.to(part.dtype)


class Narrow(Ranks):
    """Sums by rank, but rounded after each."""

    def add(self, part: Tensor) -> Tensor:
        parts = self._gather(part)
        total = parts[0]
        for other in parts[1:]:
            total = total + other
        return total


@pytest.mark.sampled(keep=4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [AllReduce, OrderBySize])
def test_sums_in_an_order_that_depends_on_their_size_do_not(dtype: torch.dtype, kind: type[Ranks]) -> None:
    said = told(3, dtype, kind)
    assert all(one is not None for one in said), said


@pytest.mark.sampled(keep=4)
def test_what_is_wrong_is_said() -> None:
    assert (
        told(3, torch.bfloat16, Narrow)
        == ["torch.bfloat16: not the sum by rank, in float32 and rounded once"] * 3
    )
    widest_first = told(3, torch.float32, WidestOnly)
    assert widest_first == ["torch.float32: result 0 has other bits in 1 rows from row 0 than among all"] * 3


@dataclass(frozen=True, slots=True)
class WidestOnly(Ranks):
    """The whole is as it should be; a row alone is not."""

    def add(self, part: Tensor) -> Tensor:
        return Ranks.add(self, part) if len(part) > 1 else Ranks.add(self, part) + 1


@dataclass(frozen=True, slots=True)
class WrongOnOne(Ranks):
    """The second rank goes on with other numbers than the others."""

    def add(self, part: Tensor) -> Tensor:
        return Ranks.add(self, part) + (self.rank == 1)


def test_all_ranks_know_of_one_that_is_wrong() -> None:
    first, second, third = told(3, torch.float32, WrongOnOne)
    assert first == third == "on rank 1, see its log"
    assert second == "torch.float32: not the sum by rank, in float32 and rounded once"
