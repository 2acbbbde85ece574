"""Ranks as threads of this process, so that networks divided over them can be compared with whole ones."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch.distributed as dist

from slipstream.engine.ranks import Ranks

T = TypeVar("T")


def together(n: int, work: Callable[[Ranks], T]) -> list[T]:
    """What each of n ranks makes of the work, in order of rank."""
    store = dist.HashStore()

    def one(rank: int) -> T:
        return work(Ranks(rank, n, dist.ProcessGroupGloo(store, rank, n)))

    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(one, range(n)))
