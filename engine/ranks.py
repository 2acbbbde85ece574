"""The processes that compute one network together (tensor parallelism), as each of them sees the others.

Weights, heads and experts are divided over the ranks; rows are not. What every rank has computed of a row is gathered
and then added by rank: an all-reduce may add in an order that depends on the number of rows, and a row's bits must not.
Source of the division: Megatron-LM (Shoeybi et al., arXiv 1909.08053), section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.engine.errors import RankLost, SettingError


@dataclass(frozen=True, slots=True)
class Ranks:
    """One rank among `n`. `group` is what torch makes of them; a rank that is alone needs none."""

    rank: int = 0
    n: int = 1
    group: Any = None  # torch.distributed.ProcessGroupGloo, or NCCL's

    def add(self, part: Tensor) -> Tensor:
        """The sum over the ranks of what each computed, [n_rows, d] each; the same bits on every rank.

        All ranks have to call it with the same shape. Added in float32 at least, and rounded once. Raises `RankLost`.
        """
        if self.n == 1:
            return part
        parts = self._gather(part)  # [n, n_rows, d]
        total = parts[0].to(torch.promote_types(part.dtype, torch.float32))  # [n_rows, d]
        for other in parts[1:]:
            total = total + other
        return total.to(part.dtype)

    def join(self, part: Tensor) -> Tensor:
        """What the ranks computed of each row, side by side: [n_rows, d] each -> [n_rows, n * d]."""
        if self.n == 1:
            return part
        return self._gather(part).transpose(0, 1).flatten(1)

    def _gather(self, part: Tensor) -> Tensor:  # [n, ...] of [...] each
        """As bytes: what they mean is nothing to the transport, and it does not know all dtypes."""
        parts = part.new_empty((self.n, *part.shape))
        sent = part.contiguous()
        try:
            self.group._allgather_base(parts.view(-1).view(torch.uint8), sent.view(-1).view(torch.uint8)).wait()
        except RuntimeError as error:
            raise RankLost(f"the ranks could not be reached from rank {self.rank}") from error
        return parts


ALONE = Ranks()


def share(count: int, what: str, n: int) -> int:
    """How many of a layer's parts each of n ranks computes. Raises `SettingError` if they do not come out even."""
    if count % n:
        raise SettingError("tensor_parallel_size", n, f"must divide the model's {count} {what}")
    return count // n


def share_or_repeat(count: int, what: str, n: int) -> int:
    """The same of parts that several ranks may hold, where there are fewer of them than ranks."""
    return 1 if n % count == 0 else share(count, what, n)
