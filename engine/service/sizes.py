"""The sizes a server works out at start: context, rows of a pass, pages. Not settings; logged, shown in `/props`."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from engine.cache.cache import Cache
from engine.cache.snapshots import Snapshots
from engine.cache.store import Need, Sizes, Store
from engine.errors import SettingError
from engine.models.config import ModelConfig
from engine.models.network import Network
from engine.models.registry import decoder_spec
from engine.settings import Settings

PAGE_SIZE = 64
_CPU_SHARE = 0.25  # of free host memory for the cache
_CUDA_SHARE = 0.9  # of device memory left after the weights
_CONTEXT_MOST = 32768  # unless asked for: longer ones are rarely meant and cost every slot its share of pages
_CONTEXT_LEAST = 512
_SNAPSHOT_MOST = 8192  # MiB of host memory for snapshots, unless asked for
_ROWS = {
    "cuda": 2048,
    "cpu": 128,
}  # on CPU a pass is short, so that a prompt never holds up other streams for long


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint folder and how it will run."""

    path: Path
    config: ModelConfig
    device: torch.device
    dtype: torch.dtype

    @property
    def needs(self) -> list[Need]:
        """What each layer needs from the cache."""
        return [block.mixer.need for block in decoder_spec(self.config, 1).blocks]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return sum(need.token_bytes(self.dtype) for need in self.needs)

    def fixed_bytes(self, settings: Settings) -> int:
        """Bytes of recurrent states and parked rows of all slots."""
        return _fixed_bytes(self.needs, self.dtype, settings)

    @property
    def file_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.path.glob("*.safetensors"))


def context(settings: Settings, sources: Sequence[Checkpoint], head_bytes: int = 0) -> int:
    """Most tokens of one sequence: as set, or as many as model and memory allow. The target comes first.

    head_bytes: of one token's keys and values in a draft head.
    """
    most = min(one.config.n_ctx_train for one in sources)
    if settings.ctx_size is not None:
        if settings.ctx_size > most:
            raise SettingError(
                "ctx_size", settings.ctx_size, f"is more than the {most} positions of the model"
            )
        return settings.ctx_size
    room = _cache_bytes(settings, sources[0].device, sum(one.file_bytes for one in sources))
    room -= sum(one.fixed_bytes(settings) for one in sources)
    token_bytes = head_bytes + sum(one.token_bytes for one in sources)
    n_fitting = int(room / token_bytes) - settings.draft_max - 2 * PAGE_SIZE
    return min(most, _CONTEXT_MOST, max(n_fitting, _CONTEXT_LEAST))


def batch_size(settings: Settings, device: torch.device) -> int:
    """Rows of one pass."""
    size = settings.batch_size or _ROWS[device.type]
    if settings.parallel >= size:
        raise SettingError(
            "parallel",
            settings.parallel,
            f"must be less than the {size} rows of a pass (--batch-size), or prompts would never run",
        )
    return size


def n_parked(settings: Settings) -> int:
    """Rows of drafts that recurrent layers can keep: every slot's longest draft."""
    return settings.parallel * settings.draft_max


def _fixed_bytes(needs: Sequence[Need], dtype: torch.dtype, settings: Settings) -> int:
    slots = sum(need.slot_bytes(dtype) for need in needs) * settings.parallel
    return slots + sum(need.parked_bytes(dtype) for need in needs) * n_parked(settings)


class HasLayers(Protocol):
    """What has cached state: a whole network, or a head, which runs as its target does."""

    @property
    def needs(self) -> list[Need]: ...


def make_cache(
    settings: Settings, networks: Mapping[str, HasLayers], n_ctx: int, followers: Collection[str] = ()
) -> Cache:
    """Pages for twice all slots at full length, or as many as the memory allows; at least one full sequence.

    `networks` by the name of their store, the target's first; their weights are loaded. `followers` are those whose
    rows are made while the target computes.
    """
    target = next(iter(networks.values()))
    assert isinstance(target, Network)
    runs = {
        name: (getattr(one, "dtype", target.dtype), getattr(one, "device", target.device))
        for name, one in networks.items()
    }
    page_bytes = PAGE_SIZE * sum(
        need.token_bytes(runs[name][0]) for name, network in networks.items() for need in network.needs
    )
    pages_each = -(-(n_ctx + settings.draft_max) // PAGE_SIZE) + 1
    fixed = sum(_fixed_bytes(network.needs, runs[name][0], settings) for name, network in networks.items())
    room = _cache_bytes(settings, target.device, fixed)
    n_pages = int(room // page_bytes)
    if settings.cache_size is None:
        n_pages = min(n_pages, 2 * pages_each * settings.parallel)
    if n_pages < pages_each:
        raise SettingError(
            "cache_size",
            settings.cache_size or "(free memory)",
            f"gives {n_pages} pages, one sequence of --ctx-size {n_ctx} needs {pages_each};"
            f" a page has {page_bytes / 2**20:.2f} MiB",
        )
    sizes = Sizes(
        n_slots=settings.parallel, n_pages=n_pages, page_size=PAGE_SIZE, n_parked=n_parked(settings)
    )
    stores = {name: Store(network.needs, sizes, *runs[name]) for name, network in networks.items()}
    return Cache(
        stores, settings.parallel, n_pages, PAGE_SIZE, followers, Snapshots(snapshot_bytes(settings))
    )


def snapshot_bytes(settings: Settings) -> int:
    """Most host memory for snapshots of recurrent states: as set, or a share of what is free."""
    if settings.cache_ram is not None:
        return settings.cache_ram * 2**20
    return min(_SNAPSHOT_MOST * 2**20, int(_CPU_SHARE * _free_memory()))


def _cache_bytes(settings: Settings, device: torch.device, other_bytes: int) -> float:
    """Bytes for all pages: as set, or a share of what is free once `other_bytes` more are taken."""
    if settings.cache_size is not None:
        return settings.cache_size * 2.0**20
    if device.type == "cuda":
        return _CUDA_SHARE * (torch.cuda.mem_get_info(device)[0] - other_bytes)
    return _CPU_SHARE * (_free_memory() - other_bytes)


def _free_memory() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
