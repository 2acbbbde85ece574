"""The sizes a server works out at start: context, rows of a pass, pages. Not settings; logged, shown in `/props`."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch

from slipstream.engine.cache.cache import Cache
from slipstream.engine.cache.need import Need, Sizes
from slipstream.engine.cache.snapshots import Snapshots
from slipstream.engine.cache.spread import Others, SpreadHeld
from slipstream.engine.cache.store import Store
from slipstream.engine.errors import SettingError
from slipstream.engine.models.blueprint import CUDA, Outline, draw
from slipstream.engine.models.network import Network
from slipstream.engine.models.reading.config import ModelConfig
from slipstream.engine.service.start.free_memory import free_memory
from slipstream.engine.settings import Settings

log = logging.getLogger(__name__)

PAGE_SIZE = 64
CPU_SHARE = 0.25  # of free host memory for the cache
CUDA_SHARE = 0.9  # of device memory left after the weights
_CONTEXT_MOST = 32768  # unless set: longer is rarely meant, and costs every slot its share of pages
_CONTEXT_LEAST = 512
# Of keys and values, by `--kv-cache-dtype`; None: the network's.
KV_DTYPES = {"auto": None, "fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn}
_SNAPSHOT_MOST = 8192  # MiB of host memory for snapshots, unless asked for
# Of a pass at most. On the CPU one in which slots decode is short, so that a prompt never holds up other streams for
# long; without such slots weights that come from memory serve more rows.
_ROWS, _SHARED_ROWS = {"cuda": 2048, "cpu": 256}, {"cuda": 2048, "cpu": 128}


@dataclass(frozen=True, slots=True)
class Demand:
    """What the layers of one network ask of the cache."""

    needs: Sequence[Need]
    dtype: torch.dtype
    device: torch.device = CUDA

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return sum(need.token_bytes(self.dtype) for need in self.needs)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot's recurrent states."""
        return sum(need.slot_bytes(self.dtype) for need in self.needs)

    @property
    def parked_bytes(self) -> int:
        """Bytes of one parked row in all layers."""
        return sum(need.parked_bytes(self.dtype) for need in self.needs)

    def n_window_pages(self, settings: Settings) -> int:
        """Pages of layers with a window: what all slots can hold at once, and as much again for prefixes."""
        windows = [need.window for need in self.needs if need.window is not None]
        if not windows:
            return 0
        # One page more for a window that begins within a page, one for a copied page.
        n_tokens = max(windows) + batch_size(settings, self.device) + settings.draft_max
        return 2 * settings.parallel * (-(-n_tokens // PAGE_SIZE) + 2)

    def window_bytes(self, settings: Settings) -> int:
        """Bytes of those pages, and of the spare page."""
        each = PAGE_SIZE * sum(need.window_bytes(self.dtype) for need in self.needs)
        return each * (self.n_window_pages(settings) + 1)

    def fixed_bytes(self, settings: Settings) -> int:
        """Bytes of recurrent states, parked rows and windows of all slots, and of the spare page."""
        states = self.slot_bytes * settings.parallel + self.parked_bytes * n_parked(settings)
        return states + self.window_bytes(settings) + PAGE_SIZE * self.token_bytes


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of a device: how much is free, and which share of it the cache may take."""

    free: float  # bytes; infinite if there is as much as it takes
    share: float

    @classmethod
    def of(cls, device: torch.device, n_ranks: int = 1) -> Memory:
        """As it is now, of each rank: on a CPU they share it."""
        if device.type == "cuda":
            return cls(torch.cuda.mem_get_info(device)[0], CUDA_SHARE)
        return cls(free_memory() / n_ranks, CPU_SHARE)

    def cache_bytes(self, settings: Settings, other_bytes: int) -> float:
        """Bytes for all pages: as set, or the share of what is free once `other_bytes` more are taken."""
        if settings.cache_size is not None:
            return settings.cache_size * 2.0**20
        return self.share * (self.free - other_bytes)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder and how it will run."""

    path: Path
    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    n_ranks: int = 1  # processes that compute it together

    @cached_property
    def outline(self) -> Outline:
        """What one rank's part of it will take of memory."""
        return draw(self.config, self.dtype, self.device, self.n_ranks)

    @cached_property
    def n_params(self) -> int:
        """Of all ranks' parts together, what several have counted once."""
        if self.n_ranks == 1:
            return self.outline.n_params
        return draw(self.config, self.dtype, self.device).n_params

    def demand(self, settings: Settings) -> Demand:
        """What its layers ask of the cache."""
        return Demand(kept(settings, self.outline.needs), self.dtype, self.device)


def kept(settings: Settings, needs: Sequence[Need]) -> list[Need]:
    """What layers need, their keys and values in the dtype that is set."""
    return [need.kept_in(KV_DTYPES[settings.kv_cache_dtype]) for need in needs]


def context(settings: Settings, sources: Sequence[Checkpoint], memory: Memory, head_bytes: int = 0) -> int:
    """Most tokens of one sequence: as set, or as many as models and memory allow.

    memory: before any weights are loaded. head_bytes: of one token's keys and values in a draft head. Raises
    `SettingError` if more is set than a model has positions.
    """
    least = min(sources, key=lambda one: one.config.n_ctx_train)
    n_positions = least.config.n_ctx_train
    if settings.ctx_size is not None:
        if settings.ctx_size > n_positions:
            reason = f"is more than the {n_positions} positions of {least.path}"
            raise SettingError("ctx_size", settings.ctx_size, reason)
        return settings.ctx_size
    outlines, demands = [one.outline for one in sources], [one.demand(settings) for one in sources]
    room = memory.cache_bytes(settings, sum(one.weight_bytes for one in outlines))
    room -= sum(one.fixed_bytes(settings) for one in demands)
    each = head_bytes + sum(one.token_bytes for one in demands) + sum(one.position_bytes for one in outlines)
    n_fitting = room / each - settings.draft_max - 2 * PAGE_SIZE
    return int(min(n_positions, _CONTEXT_MOST, max(n_fitting, _CONTEXT_LEAST)))


def why_shorter(settings: Settings, n_ctx: int, positions: Sequence[int], free: float) -> str | None:
    """Why a context is shorter than the model's own; None if it is not.

    positions: that the model has, then those of a draft model, if there is one. free: bytes of the device.
    """
    if n_ctx >= positions[0]:
        return None
    if settings.ctx_size is not None:
        return f"--ctx-size {settings.ctx_size}"
    if n_ctx in positions[1:]:
        return "the draft model has no more positions"
    if n_ctx == _CONTEXT_MOST:
        return "longer ones are seldom meant; --ctx-size takes them"
    room = f"{free / 2**20:.0f} MiB of free memory" if settings.cache_size is None else "--cache-size"
    return f"more does not fit {room}; --ctx-size and --cache-size set it"


def batch_size(settings: Settings, device: torch.device) -> int:
    """Rows of one pass."""
    return settings.batch_size or _ROWS[device.type]


def shared_size(settings: Settings, device: torch.device) -> int:
    """Rows of a pass in which slots decode. Raises `SettingError` if it has not one more than slots."""
    size = settings.batch_size or _SHARED_ROWS[device.type]
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


def pages_each(settings: Settings, n_ctx: int) -> int:
    """Pages that one sequence of full length takes with its drafts, and one more for a copied page."""
    return -(-(n_ctx + settings.draft_max) // PAGE_SIZE) + 1


def page_bytes(demands: Iterable[Demand]) -> int:
    """Bytes of one page in the stores of all networks."""
    return PAGE_SIZE * sum(one.token_bytes for one in demands)


def page_count(settings: Settings, n_ctx: int, demands: Sequence[Demand], memory: Memory) -> int:
    """Pages for twice all slots at full length, or as many as the memory allows; at least one full sequence.

    memory: as it is once the weights are loaded. Raises `SettingError` if not even one sequence fits, or if more is set
    than is free, which the system would answer by killing the process.
    """
    if settings.cache_size is not None and settings.cache_size * 2**20 > memory.free:
        n_free = int(memory.free) // 2**20
        raise SettingError(
            "cache_size", settings.cache_size, f"at most {n_free} MiB are free once the weights are loaded"
        )
    each, size = pages_each(settings, n_ctx), page_bytes(demands)
    room = memory.cache_bytes(settings, sum(one.fixed_bytes(settings) for one in demands))
    # Where all layers have windows, pages are mere numbers.
    fitting = room / size if size else math.inf if room >= 0 else 0
    wanted = math.inf if settings.cache_size is not None and size else 2 * each * settings.parallel
    n_pages = int(min(fitting, wanted))
    if n_pages < each:
        raise SettingError(
            "cache_size",
            settings.cache_size or "(free memory)",
            f"gives {max(n_pages, 0)} pages, one sequence of --ctx-size {n_ctx} needs {each};"
            f" a page has {size / 2**20:.2f} MiB; {_fitting(settings, n_pages)}",
        )
    return n_pages


def _fitting(settings: Settings, n_pages: int) -> str:
    """The longest context for which so many pages would do."""
    n_ctx = (n_pages - 1) * PAGE_SIZE - settings.draft_max
    return f"--ctx-size {n_ctx} would fit" if n_ctx >= PAGE_SIZE else "no context would fit"


class HasLayers(Protocol):
    """What has cached state: a whole network, or a head, which runs as its target does."""

    @property
    def needs(self) -> list[Need]: ...


def make_cache(
    settings: Settings, networks: Mapping[str, HasLayers], n_ctx: int, others: Others | None = None
) -> Cache:
    """The stores of all networks, with as many pages as `page_count` says.

    `networks` by the name of their store, the target's first; their weights are loaded. others: the ranks that have the
    other parts of the target.
    """
    target = next(iter(networks.values()))
    assert isinstance(target, Network)
    demands = {
        name: Demand(
            kept(settings, network.needs),
            getattr(network, "dtype", target.dtype),
            getattr(network, "device", target.device),
        )
        for name, network in networks.items()
    }
    on_device: dict[torch.device, list[Demand]] = {}
    for one in demands.values():
        on_device.setdefault(one.device, []).append(one)
    n_ranks = target.ranks.n
    n_pages = min(
        page_count(settings, n_ctx, own, Memory.of(device, n_ranks)) for device, own in on_device.items()
    )
    n_full = n_pages // pages_each(settings, n_ctx)
    if n_full < settings.parallel:
        log.warning(
            "of the %d slots %d at a time can have a sequence of %d tokens; requests beyond that are preempted"
            " and go on later. --ctx-size, --parallel and --cache-size set it",
            settings.parallel,
            n_full,
            n_ctx,
        )
    sizes = Sizes(
        n_slots=settings.parallel, n_pages=n_pages, page_size=PAGE_SIZE, n_parked=n_parked(settings)
    )
    stores = {}
    for name, one in demands.items():
        own, held = replace(sizes, n_window_pages=one.n_window_pages(settings)), None
        if others is not None and networks[name] is target:
            whole = kept(settings, target.whole_needs)
            held = SpreadHeld((one.needs, whole), own, one.dtype, one.device, (target.ranks, others))
        stores[name] = Store(one.needs, own, one.dtype, one.device, held)
    if settings.cache_ram is not None and not any(store.parking for store in stores.values()):
        raise SettingError("cache_ram", settings.cache_ram, "has no use with models without recurrent layers")
    snapshots = Snapshots(snapshot_bytes(settings))
    for name, one in demands.items():
        _log_store(name, one, settings)
    return Cache(stores, settings.parallel, n_pages, PAGE_SIZE, snapshots)


def _log_store(name: str, demand: Demand, settings: Settings) -> None:
    """What a network's layers take: per token, per slot, per parked row, of windows."""
    log.info(
        "store network=%s token_bytes=%d slot_bytes=%d parked_row_bytes=%d n_parked=%d window_bytes=%d",
        name,
        demand.token_bytes,
        demand.slot_bytes,
        demand.parked_bytes,
        n_parked(settings) if demand.parked_bytes else 0,
        demand.window_bytes(settings),
    )


def snapshot_bytes(settings: Settings) -> int:
    """Most host memory for snapshots of recurrent states: as set, or a share of what is free."""
    if settings.cache_ram is not None:
        return settings.cache_ram * 2**20
    return min(_SNAPSHOT_MOST * 2**20, int(CPU_SHARE * free_memory()))
