"""The network that drafts beside the target: where it comes from, what it costs per token, and how it is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from slipstream.engine.cache.store import Need
from slipstream.engine.checkpoint.weights import Weights
from slipstream.engine.errors import SettingError, UnsupportedModel
from slipstream.engine.models.heads.dflash import load_dflash
from slipstream.engine.models.heads.dspark import load_dspark
from slipstream.engine.models.heads.eagle3 import load_eagle3
from slipstream.engine.models.heads.kinds import kind_of
from slipstream.engine.models.heads.mtp import load_mtp, mtp_tensors
from slipstream.engine.models.network import Network
from slipstream.engine.service.start.sizes import KV_DTYPES, Checkpoint
from slipstream.engine.settings import Settings

DRAFT_MODEL, DRAFT_MTP = "draft-model", "draft-mtp"

_KEYS = ".self_attn.k_proj.weight"
_BLOCK_MOST = 128  # rows of a draft block, the last of which may stand past the context


class Follows(Protocol):
    """What all heads have in common: their streams, their layers, their size."""

    @property
    def taps(self) -> tuple[int, ...]: ...

    @property
    def needs(self) -> list[Need]: ...

    @property
    def n_params(self) -> int: ...


@dataclass(frozen=True, slots=True)
class DraftSource:
    """A folder that holds a draft network, and the drafter that uses it."""

    name: str
    path: Path


def draft_source(model_draft: Path | None, target: Checkpoint) -> DraftSource | None:
    """What `--model-draft` holds, or else the MTP layers in the target's own folder, if it has any."""
    if model_draft is not None:
        return DraftSource(kind_of(model_draft), model_draft)
    if mtp_tensors(_names(target.path), target.config.n_layers):
        return DraftSource(DRAFT_MTP, target.path)
    return None


def _names(path: Path) -> frozenset[str]:
    return Weights(path, torch.float32, torch.device("cpu")).names  # opened, not read


def head_token_bytes(source: DraftSource, target: Checkpoint, settings: Settings) -> int:
    """Bytes of one token's keys and values in a head; its tensors say, as configs of heads are often copies."""
    weights = Weights(source.path, torch.float32, torch.device("cpu"), target.config.quantization)
    names = weights.names
    if source.path == target.path:
        names = mtp_tensors(names, target.config.n_layers)
    widths = [weights.shape(name)[0] for name in names if name.endswith(_KEYS)]
    return 2 * sum(widths) * (KV_DTYPES[settings.kv_cache_dtype] or target.dtype).itemsize


def load_head(source: DraftSource, target: Network, n_ctx: int, taps: str | None) -> Follows:
    """The head of a folder. taps: the setting that overrides what its files say. Raises `LoadError`."""
    chosen = None if taps is None else _read_taps(taps, target.config.n_layers + 1)
    if source.name == DRAFT_MTP:
        if chosen is not None:
            raise SettingError(
                "draft_taps", taps, "has no use with draft-mtp, which reads the target's last state"
            )
        return load_mtp(source.path, target, n_ctx)
    if source.name == "draft-eagle3":
        return load_eagle3(source.path, target, n_ctx, chosen)
    load = load_dflash if source.name == "draft-dflash" else load_dspark
    head = load(source.path, target, n_ctx + _BLOCK_MOST, chosen)
    if head.block_size > _BLOCK_MOST:
        raise UnsupportedModel(f"{source.path}: block_size {head.block_size} is more than {_BLOCK_MOST}")
    return head


def _read_taps(text: str, last: int) -> list[int]:
    names = [one.strip() for one in text.split(",")]
    if not all(one.isascii() and one.isdecimal() and int(one) <= last for one in names):
        raise SettingError("draft_taps", text, f"must be a comma list of numbers from 0 to {last}")
    return [int(one) for one in names]
