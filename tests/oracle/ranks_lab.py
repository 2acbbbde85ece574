"""The bench for losslessness over a target that is divided over ranks; its drafts run on the first alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from slipstream.engine.cache.need import Sizes
from slipstream.engine.cache.store import Store
from slipstream.engine.core.engine import Engine
from slipstream.engine.models.network import Network
from slipstream.engine.slot import Slot
from slipstream.engine.speculate.registry import NETWORKS
from tests.oracle.lab import Bench, Folders, Lab
from tests.ranks import Divided


class RanksLab(Lab):
    """As `Lab`, on n ranks. Only its newest engine runs: the others' memory is one engine's at a time."""

    def __init__(self, folders: Folders, dtype: torch.dtype, n: int, n_ctx: int = 1024) -> None:
        self._n = n
        heads = {name: folder for name, folder in folders.heads.items() if not NETWORKS[name].reads_cache}
        super().__init__(replace(folders, heads=heads), dtype, n_ctx)

    def _load_target(self, folder: Path, dtype: torch.dtype, where: torch.device) -> Network:
        self.divided = Divided(folder, self._n, dtype, self.n_ctx, self.tokenizer.vocab_size)
        return self.divided.network

    def _store(self, network: Any, sizes: Sizes) -> Store:
        return self.divided.store(sizes) if network is self.target else super()._store(network, sizes)

    def engine(self, bench: Bench, future: Callable[[Slot], Sequence[int]] | None = None) -> Engine:
        """Replays are not launched ahead: what a frame is given on the device, other ranks do not have."""
        return super().engine(replace(bench, overlaps=bench.overlaps and not bench.captured), future)
