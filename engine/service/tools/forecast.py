"""What a server would take of a device's memory, from configs alone: no weights, no device.

Layers are those that a load would build (`engine/models/blueprint.py`), sizes are worked out by the functions that
a start uses (`sizes.py`). So a forecast differs from a start only in the amount of memory it is given.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from slipstream.engine.checkpoint.weights import tensor_names
from slipstream.engine.core import forward
from slipstream.engine.errors import SettingError, UnsupportedModel
from slipstream.engine.models.blueprint import CUDA, Outline, draw_mtp, mtp_layers
from slipstream.engine.models.heads.mtp import found_layers
from slipstream.engine.models.reading.config import ModelConfig
from slipstream.engine.models.reading.documents import checkpoint_files
from slipstream.engine.models.registry import read_model
from slipstream.engine.service.start.checkpoint_path import CONFIGS, local_checkpoint, run_dtype
from slipstream.engine.service.start.drafters import drafter_types
from slipstream.engine.service.start.sizes import (
    CUDA_SHARE,
    PAGE_SIZE,
    Checkpoint,
    Demand,
    Memory,
    context,
    n_parked,
    page_bytes,
    page_count,
    pages_each,
    shared_size,
)
from slipstream.engine.settings import Settings
from slipstream.engine.settings_check import check
from slipstream.engine.speculate.network import draft_model
from slipstream.engine.speculate.registry import kind_of

MODEL, MTP = "draft-model", "draft-mtp"  # the draft networks whose size a config gives

# Keys that only a draft head's config has; the rest of it looks like a model's.
HEAD_KEYS = ("draft_vocab_size", "eagle_config", "dflash_config", "markov_rank", "speculators_model_type")


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkForecast:
    """One network of a server."""

    architecture: str
    dtype: str
    n_params: int
    weight_bytes: int
    token_bytes: int  # of one token's keys and values
    slot_bytes: int  # of one slot's recurrent states
    parked_bytes: int  # of one drafted token that recurrent layers keep


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """Bytes of the device's memory by what takes them. Buffers of a pass come on top."""

    weights: int
    tower: int  # of what sees images, as far as the files of a checkpoint are there
    tables: int  # of rotary embeddings, for every position
    states: int  # recurrent states of all slots
    parked: int  # rows of drafts in recurrent layers, for all slots
    windows: int  # keys and values of layers that look back over a window, for all slots
    spare: int  # the spare page of keys and values
    pages: int  # keys and values; 0 if not even one sequence of full length fits

    @property
    def fixed(self) -> int:
        """All but the pages."""
        return self.weights + self.tower + self.tables + self.states + self.parked + self.windows + self.spare


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A server's memory."""

    networks: Mapping[str, NetworkForecast]  # by the name of their store, the target's first
    drafters: Sequence[str]
    n_ctx: int
    n_ctx_train: int  # positions that the networks are made for
    n_slots: int
    draft_max: int
    page_size: int  # tokens
    page_bytes: int
    n_pages: int
    pages_each: int  # that one sequence of full length takes
    taken: Taken
    total_bytes: int
    memory_bytes: int | None  # None: as much as it takes
    needed_one: int | None  # bytes of free memory for one sequence of n_ctx; None where --cache-size is set
    needed_all: int | None  # for a sequence in every slot
    longest_one: int  # tokens of one sequence if it has all pages; 0: no sequence fits
    longest_all: int  # of each if every slot has a sequence
    refusal: str | None  # why the server would not start; None if it would


@dataclass(frozen=True)
class _Mtp(Checkpoint):
    """The MTP layers of a target."""

    n_layers: int = 1

    @cached_property
    def outline(self) -> Outline:
        return draw_mtp(self.config, self.dtype, self.n_layers)


@dataclass(frozen=True, slots=True)
class _Server:
    """Networks with settings and memory, asked for one context after another."""

    settings: Settings
    networks: Mapping[str, Checkpoint]
    free: float  # bytes before the server starts
    tower_bytes: int = 0  # of what sees images, which a start loads first

    @property
    def demands(self) -> list[Demand]:
        return [one.demand(self.settings) for one in self.networks.values()]

    @property
    def n_positions(self) -> int:
        """Most tokens of a sequence that all networks are made for."""
        return min(one.config.n_ctx_train for one in self.networks.values())

    def context(self) -> int:
        """The context as a start would choose it."""
        free = self.free - self.tower_bytes
        return context(self.settings, [*self.networks.values()], Memory(free, CUDA_SHARE))

    def taken(self, n_ctx: int) -> Taken:
        """What is taken before there are pages."""
        outlines = [one.outline for one in self.networks.values()]
        return Taken(
            weights=sum(one.weight_bytes for one in outlines),
            tower=self.tower_bytes,
            tables=n_ctx * sum(one.position_bytes for one in outlines),
            states=self.settings.parallel * sum(one.slot_bytes for one in self.demands),
            parked=n_parked(self.settings) * sum(one.parked_bytes for one in self.demands),
            windows=sum(one.window_bytes(self.settings) for one in self.demands),
            spare=page_bytes(self.demands),
            pages=0,
        )

    def pages(self, n_ctx: int) -> tuple[int, str | None]:
        """(pages, None), or (0, why the server would not start)."""
        settings, free, taken = self.settings, self.free, self.taken(n_ctx)
        if taken.fixed > free:
            return 0, f"without pages it takes {_gib(taken.fixed)}, there are {_gib(free)}"
        memory = Memory(free - taken.weights - taken.tower - taken.tables, CUDA_SHARE)
        try:
            n_pages = page_count(settings, n_ctx, self.demands, memory)
        except SettingError as error:
            return 0, str(error)
        return n_pages, None

    def longest(self, n: int) -> int:
        """The longest context of which n sequences fit at once, 0 if none does."""

        def too_long(n_ctx: int) -> bool:
            return self.pages(n_ctx)[0] < n * pages_each(self.settings, n_ctx)

        return bisect_left(range(1, self.n_positions + 1), 1, key=too_long)

    def needed(self, n_ctx: int, n: int) -> int | None:
        """Free memory with which n sequences fit at once; None where the size of the cache is set."""
        if self.settings.cache_size is not None:
            return None
        pages = n * pages_each(self.settings, n_ctx) * page_bytes(self.demands)
        return self.taken(n_ctx).fixed + math.ceil(pages / CUDA_SHARE) + 1


# Bytes that what sees images takes, of a checkpoint's folder in a dtype.
VisionBytes = Callable[[Path, torch.dtype], int]


def forecast(
    settings: Settings, memory_bytes: int | None = None, vision_bytes: VisionBytes | None = None
) -> Forecast:
    """The memory of a server with these settings, whose models may be folders, config files or hub names.

    memory_bytes: what is free on the device before the server starts; None: as much as it takes. Raises `LoadError`
    for configs that cannot be read or served and for settings that cannot take effect. That the memory does not
    suffice is no error but the forecast's `refusal`.
    """
    check(settings)
    shared_size(settings, CUDA)
    networks, drafters = _networks(settings)
    tower = 0
    if vision_bytes is not None and settings.vision:
        own = [one for one in networks.values() if not isinstance(one, _Mtp) and _has_weights(one.path)]
        tower = sum(vision_bytes(one.path, one.dtype) for one in own)
    server = _Server(settings, networks, math.inf if memory_bytes is None else memory_bytes, tower)
    n_ctx, size = server.context(), page_bytes(server.demands)
    n_pages, refusal = server.pages(n_ctx)
    if refusal is not None:  # then report the context of a server with enough memory
        n_ctx = replace(server, free=math.inf).context()
    taken = replace(server.taken(n_ctx), pages=n_pages * size)
    return Forecast(
        networks={name: _summary(network, network.demand(settings)) for name, network in networks.items()},
        drafters=drafters,
        n_ctx=n_ctx,
        n_ctx_train=server.n_positions,
        n_slots=settings.parallel,
        draft_max=settings.draft_max,
        page_size=PAGE_SIZE,
        page_bytes=size,
        n_pages=n_pages,
        pages_each=pages_each(settings, n_ctx),
        taken=taken,
        total_bytes=taken.fixed + taken.pages,
        memory_bytes=memory_bytes,
        needed_one=server.needed(n_ctx, 1),
        needed_all=server.needed(n_ctx, settings.parallel),
        longest_one=server.longest(1),
        longest_all=server.longest(settings.parallel),
        refusal=refusal,
    )


def _gib(n_bytes: float) -> str:
    return f"{n_bytes / 2**30:.2f} GiB"


def _summary(network: Checkpoint, demand: Demand) -> NetworkForecast:
    return NetworkForecast(
        architecture=network.config.architecture,
        dtype=str(network.dtype).removeprefix("torch."),
        n_params=network.n_params,
        weight_bytes=network.outline.weight_bytes,
        token_bytes=demand.token_bytes,
        slot_bytes=demand.slot_bytes,
        parked_bytes=demand.parked_bytes,
    )


def _networks(settings: Settings) -> tuple[dict[str, Checkpoint], tuple[str, ...]]:
    """(the networks by the name of their store, the drafters): those that a server would load."""
    path = _path(settings.model)
    config = read_model(path)
    n_ranks = settings.tensor_parallel_size
    target = Checkpoint(path, config, CUDA, run_dtype(config, settings.dtype, CUDA), n_ranks)
    if settings.model_draft is not None:
        types = drafter_types(settings, MODEL)
        if MODEL not in types:
            return {forward.STORE: target}, types
        path = _path(settings.model_draft)
        config = _read_draft(path)
        draft = Checkpoint(path, config, CUDA, run_dtype(config, settings.dtype, CUDA))
        return {forward.STORE: target, draft_model.STORE: draft}, types
    n_mtp = _mtp_layers(path, config)
    types = drafter_types(settings, MTP if n_mtp else None)
    if MTP not in types:
        return {forward.STORE: target}, types
    return {forward.STORE: target, MTP: _Mtp(path, config, CUDA, target.dtype, n_layers=n_mtp)}, types


def _path(name: str) -> Path:
    path = Path(name)
    return path if path.is_file() else local_checkpoint(name, CONFIGS)


def _has_weights(path: Path) -> bool:
    return any(checkpoint_files(path)[1])


def _mtp_layers(path: Path, config: ModelConfig) -> int:
    """MTP layers of a target: those in its files if it has any, else those its config declares."""
    if not _has_weights(path):
        return mtp_layers(config)
    return len(found_layers(tensor_names(path), config.n_layers))


def _read_draft(path: Path) -> ModelConfig:
    """The config of a draft model. Raises `UnsupportedModel` for a head, whose size its config does not give."""
    kind = kind_of(path) if _has_weights(path) else MODEL
    if kind != MODEL:
        raise UnsupportedModel(f"{path}: is a {kind}; of draft networks given apart, only models are planned")
    config = read_model(path)
    for key in HEAD_KEYS:
        if config.fields.has(key):
            raise config.fields.refuse(key, "the config of a draft head; only draft models are planned")
    return config
