"""The network that drafts beside the target: where it comes from, what it costs per token, and how it is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slipstream.engine.checkpoint.weights import Weights, tensor_names
from slipstream.engine.errors import SettingError
from slipstream.engine.models.heads.draft_parts import matrix_shape
from slipstream.engine.models.heads.head_choices import HeadChoices
from slipstream.engine.models.network import Network
from slipstream.engine.service.start.sizes import KV_DTYPES, Checkpoint
from slipstream.engine.settings import Settings
from slipstream.engine.speculate.registry import NETWORKS, NetworkKind, kind_of

_KEYS = ".self_attn.k_proj.weight"


@dataclass(frozen=True, slots=True)
class DraftSource:
    """A folder that holds a draft network, and the drafter that uses it."""

    name: str
    path: Path

    @property
    def kind(self) -> NetworkKind:
        return NETWORKS[self.name]


def draft_source(model_draft: Path | None, target: Checkpoint) -> DraftSource | None:
    """What `--model-draft` holds, or else a head in the target's own folder, if it has any."""
    if model_draft is not None:
        return DraftSource(kind_of(model_draft), model_draft)
    names = tensor_names(target.path)
    for name, kind in NETWORKS.items():
        if kind.within is not None and kind.within(names, target.config.n_layers):
            return DraftSource(name, target.path)
    return None


def head_token_bytes(source: DraftSource, target: Checkpoint, settings: Settings) -> int:
    """Bytes of one token's keys and values in a head, by its tensors: configs of heads are often copies."""
    weights = Weights(source.path, torch.float32, torch.device("cpu"), target.config.quantization)
    names = weights.names
    if source.path == target.path and source.kind.within is not None:
        names = source.kind.within(names, target.config.n_layers)
    widths = [matrix_shape(weights, name)[0] for name in names if name.endswith(_KEYS)]
    return 2 * sum(widths) * (KV_DTYPES[settings.kv_cache_dtype] or target.dtype).itemsize


def load_head(source: DraftSource, target: Network, n_ctx: int, settings: Settings) -> Any:
    """The head of a folder. settings: what overrides its files. Raises `LoadError`."""
    assert source.kind.load is not None  # a draft model is loaded as its target is
    taps = settings.draft_taps
    chosen = HeadChoices(
        None if taps is None else _read_taps(taps, target.config.n_layers + 1),
        settings.draft_recycled,
        settings.draft_position,
    )
    return source.kind.load(source.path, target, n_ctx, chosen)


def _read_taps(text: str, last: int) -> list[int]:
    names = [one.strip() for one in text.split(",")]
    if not all(one.isascii() and one.isdecimal() and int(one) <= last for one in names):
        raise SettingError("draft_taps", text, f"must be a comma list of numbers from 0 to {last}")
    return [int(one) for one in names]
