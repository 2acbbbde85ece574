"""The processes that compute one network together (tensor parallelism), as each of them sees the others.

Weights, heads and experts are divided over the ranks; rows are not. What every rank has computed of a row is gathered
and then added by rank: an all-reduce may add in an order that depends on the number of rows, and a row's bits must not.
Source of the division: Megatron-LM (Shoeybi et al., arXiv 1909.08053), section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.engine.errors import RankLost, SettingError

c10d: Any = torch.distributed  # its groups are not all typed
_MEETING = timedelta(minutes=5)  # for all ranks to find each other
# A lost rank closes its connections; a step that hangs is noticed by its time.
_FOR_EVER = timedelta(days=365)


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

    def gathered(self, parts: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """What all ranks have of each tensor, in order of rank. All have to call it. Raises `RankLost`."""
        return [self._gather(part).unbind(0) for part in parts]

    def _gather(self, part: Tensor) -> Tensor:  # [n, ...] of [...] each
        """As bytes: what they mean is nothing to the transport, and it does not know all dtypes."""
        parts = part.new_empty((self.n, *part.shape))
        try:
            self.group._allgather_base(as_bytes(parts), as_bytes(part)).wait()
        except RuntimeError as error:
            raise RankLost(f"the ranks could not be reached from rank {self.rank}") from error
        return parts


ALONE = Ranks()


def meet(folder: Path, rank: int, n: int, device: torch.device) -> Ranks:
    """This process among n, once all are there. Raises RuntimeError if they do not come."""
    store = c10d.FileStore(str(folder / "ranks"), n)
    store.set_timeout(_MEETING)
    if device.type == "cuda":
        return Ranks(rank, n, c10d.ProcessGroupNCCL(store, rank, n, c10d.ProcessGroupNCCL.Options()))
    options = c10d.ProcessGroupGloo._Options()
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = _MEETING
    group = c10d.ProcessGroupGloo(store, rank, n, options)
    group._set_default_timeout(_FOR_EVER)
    return Ranks(rank, n, group)


def as_bytes(tensor: Tensor) -> Tensor:
    """A tensor's bytes in order, [n_bytes] uint8; a view where it is contiguous."""
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))  # one number may have a stride of 0
    return flat.view(torch.uint8)


def share(count: int, what: str, n: int) -> int:
    """How many of a layer's parts each of n ranks computes. Raises `SettingError` if they do not come out even."""
    if count % n:
        raise SettingError("tensor_parallel_size", n, f"must divide the model's {count} {what}")
    return count // n


def share_or_repeat(count: int, what: str, n: int) -> int:
    """The same of parts that several ranks may hold, where there are fewer of them than ranks."""
    return 1 if n % count == 0 else share(count, what, n)


@dataclass(frozen=True, slots=True)
class Joint:
    """A dimension in which several matrices lie one behind the other, each of which is divided for itself."""

    dim: int
    sizes: Sequence[int]  # of the rank's own parts


def cut_of(
    ranks: Ranks, stored: Sequence[int], asked: Sequence[int], joint: Joint | None
) -> list[list[slice]] | None:
    """Per dimension the runs that a rank reads of a tensor; None if the asked shape is no part of the stored shape."""
    if len(stored) != len(asked):
        return None
    runs = []
    for dim, (have, want) in enumerate(zip(stored, asked, strict=True)):
        times, rest = (1, 0) if have == want else divmod(have, max(1, want))
        if rest or not times or ranks.n % times:
            return None
        sizes = [want]
        if joint is not None and joint.dim == dim and times > 1:
            # The codes of a narrow matrix may be fewer than its rows, in proportion.
            sizes = [one * want // sum(joint.sizes) for one in joint.sizes]
            if sum(sizes) != want:
                return None
        place, start, own = ranks.rank * times // ranks.n, 0, []
        for size in sizes:
            own.append(slice(start + place * size, start + (place + 1) * size))
            start += times * size
        runs.append(own)
    return runs


def cut(tensor: Tensor, runs: Sequence[Sequence[slice]]) -> Tensor:
    """These runs of each dimension. A view where each dimension has one, so that nothing else is read of a file."""
    for dim, own in enumerate(runs):
        parts = [tensor.narrow(dim, one.start, one.stop - one.start) for one in own]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return tensor


def joined(parts: Sequence[Tensor], whole: Sequence[int], joint: Joint | None) -> Tensor:
    """The opposite of `cut`: a tensor of the shape `whole` of what each rank has of it, in order of rank."""
    if joint is None:
        return parts[0]
    times = whole[joint.dim] // parts[0].shape[joint.dim]
    holders = [parts[i * len(parts) // times] for i in range(times)]  # the others repeat them
    pieces = [one.split_with_sizes(list(joint.sizes), joint.dim) for one in holders]
    return torch.cat([piece for same in zip(*pieces, strict=True) for piece in same], joint.dim)
