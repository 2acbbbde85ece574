"""Whether sums over ranks give a row the same bits whatever is computed beside it, tried before anything is loaded.

What operators prove of themselves (`kernels.proof`), of the sums between them: `Ranks.add` on the processes, devices
and sizes that will serve. Parts are of very different sizes, so that adding them in another order gives other bits; of
two parts there is one sum only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from slipstream.engine.ranks import Ranks
from slipstream.kernels.proof.case import N_ROWS, Rows
from slipstream.kernels.proof.judge import bits, other_bits

_EXPONENTS = (-12, 13)  # of two: the range of what is added


@dataclass(frozen=True, slots=True)
class Sums:
    """The sums that a network will ask for."""

    n_rows: int  # of the widest pass
    d_model: int
    dtype: torch.dtype
    device: torch.device

    def problem(self, ranks: Ranks) -> str | None:
        """Why they are not to be trusted, as this rank sees it or says of another; None if all is well.

        All ranks have to call it. Raises `RankLost`.
        """
        dtypes = dict.fromkeys((self.dtype, torch.float32))  # some layers compute in float32
        found = [self._problem(ranks, dtype) for dtype in dtypes]  # none is left out: the others wait for it
        reason = next((one for one in found if one is not None), None)
        (failed,) = ranks.gathered([torch.tensor([reason is not None], device=self.device)])
        there = [rank for rank, one in enumerate(failed) if bool(one)]
        return f"on rank {there[0]}, see its log" if there and reason is None else reason

    def _problem(self, ranks: Ranks, dtype: torch.dtype) -> str | None:
        own, meant = self._parts(ranks, dtype)
        rows = Rows(partial(_added, ranks, own), len(own))
        whole, cuts = rows.whole(), list(rows.cuts())  # compared when all are made: the others wait in each
        if not torch.equal(bits(whole[0]), bits(meant)):
            return f"{dtype}: not the sum by rank, in float32 and rounded once"
        wrong = other_bits(cuts, whole)
        return None if wrong is None else f"{dtype}: {wrong}"

    def _parts(self, ranks: Ranks, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """This rank's part and the sum of all, [n_rows, d_model] each."""
        first = total = own = self._part(0, dtype)
        total = total.float()
        for rank in range(1, ranks.n):
            part = self._part(rank, dtype)
            if rank == ranks.n - 1:
                # What is left of the others is small, and keeps what their order made of it.
                part = part - first
            total = total + part
            own = part if rank == ranks.rank else own
        return own.to(self.device), total.to(dtype).to(self.device)

    def _part(self, rank: int, dtype: torch.dtype) -> Tensor:
        shape = (max(N_ROWS, self.n_rows), self.d_model)
        random = torch.Generator().manual_seed(rank)
        sizes = torch.randint(*_EXPONENTS, shape, generator=random).exp2()
        return torch.randn(shape, generator=random).mul(sizes).to(dtype)


def _added(ranks: Ranks, own: Tensor, first: int, n: int) -> Sequence[Tensor]:
    return [ranks.add(own[first : first + n])]
