"""Ranks as threads of this process, so that networks divided over them can be compared with whole ones."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from slipstream.engine.cache.need import Sizes
from slipstream.engine.cache.spread import Others, SpreadHeld
from slipstream.engine.cache.store import Store
from slipstream.engine.models.network import Network
from slipstream.engine.models.registry import load_network
from slipstream.engine.ranks import Ranks
from slipstream.engine.service.run.follower import Follower
from tests.recording import kept, record

T = TypeVar("T")
CPU = torch.device("cpu")
c10d: Any = torch.distributed


class Gathering:
    """A process group whose gatherings can be recorded, as a CUDA graph has NCCL's."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def _allgather_base(self, parts: Tensor, part: Tensor) -> Gathering:
        kept(lambda parts, part: self._group._allgather_base(parts, part).wait(), parts, part)
        return self

    def wait(self) -> None:
        """It has waited."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


def together(n: int, work: Callable[[Ranks], T]) -> list[T]:
    """What each of n ranks makes of the work, in order of rank."""
    meeting = c10d.HashStore()

    def one(rank: int) -> T:
        return work(Ranks(rank, n, Gathering(c10d.ProcessGroupGloo(meeting, rank, n))))

    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(one, range(n)))


class Divided:
    """A checkpoint divided over n ranks: the first rank's network, with the others following in threads."""

    def __init__(
        self,
        folder: Path,
        n: int,
        dtype: torch.dtype,
        n_ctx: int,
        n_vocab: int | None,
        kept_dtype: torch.dtype | None = None,
    ) -> None:
        """kept_dtype: dtype of keys and values; None: the network's."""

        def load(ranks: Ranks) -> Network:
            return load_network(folder, dtype, CPU, n_ctx, n_vocab, ranks)

        def follower(network: Network) -> Follower:
            return Follower(network, network.ranks, kept_dtype, lambda device: record)

        self.network, *others = together(n, load)
        self._kept = kept_dtype
        ends = [Pipe() for _ in others]
        self.others = Others([ours for ours, _ in ends])
        self._threads = [
            threading.Thread(target=follower(network).serve, args=(its,), daemon=True)
            for network, (_, its) in zip(others, ends, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def store(self, sizes: Sizes) -> Store:
        """A store of the target on all ranks. The one before it is over."""
        network = self.network
        own, whole = (
            [need.kept_in(self._kept) for need in needs] for needs in (network.needs, network.whole_needs)
        )
        held = SpreadHeld((own, whole), sizes, network.dtype, CPU, (network.ranks, self.others))
        return Store(own, sizes, network.dtype, CPU, held)

    def close(self) -> None:
        """End the other ranks. Fails if one of them has failed, or does not end."""
        for connection in self.others.connections:
            connection.close()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()
