"""Checkpoints by name for benchmarks: the demo at the size of real models, with what drafts for it.

Written once into a cache folder, whose name tells sizes and sources, and read from there; the largest are built
straight into device memory and have no files.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from slipstream import kernels
from tests.bench.inflate import inflate
from tests.oracle.lab import DEMO, Folders, Lab
from tests.oracle.lossless import HYBRID

CACHE = Path(tempfile.gettempdir()) / "slipstream-bench"
Sizes = Mapping[str, int]
WORDS = 151_936  # of Qwen3's vocabulary


@dataclass(frozen=True, slots=True)
class Model:
    """The demo pair at other sizes; sizes that are not given stay."""

    source: Folders
    target: Sizes = field(default_factory=dict)
    draft: Sizes = field(default_factory=dict)
    in_memory: bool = False  # too large to be written first


_DRAFT_44 = {"hidden": 512, "layers": 6, "ffn": 2048, "heads": 8, "kv_heads": 4}
_DRAFT_8 = {"hidden": 2048, "layers": 8, "ffn": 6144, "heads": 16, "kv_heads": 8, "vocab": WORDS}
_DRAFT_27 = {"hidden": 2048, "layers": 12, "ffn": 6144, "heads": 8, "kv_heads": 2, "vocab": 248_320}
MODELS: Mapping[str, Model] = {
    "demo": Model(DEMO),
    "demo-hybrid": Model(HYBRID),
    "0.44B": Model(DEMO, {"hidden": 1024, "layers": 28, "ffn": 4096, "heads": 8, "kv_heads": 4}, _DRAFT_44),
    "0.54B-hybrid": Model(
        HYBRID,
        {
            "hidden": 1280,
            "layers": 24,
            "ffn": 3584,
            "heads": 8,
            "kv_heads": 2,
            "linear_key_heads": 8,
            "linear_value_heads": 16,
        },
        {"hidden": 512, "layers": 4, "ffn": 1024},
    ),
    "0.6B": Model(
        DEMO,
        {"hidden": 1024, "layers": 28, "ffn": 3072, "heads": 16, "kv_heads": 8, "vocab": WORDS},
        {**_DRAFT_44, "vocab": WORDS},
    ),
    # For tests of what is built in memory, on a CPU too.
    "small": Model(
        DEMO,
        {"hidden": 1024, "layers": 6, "ffn": 640, "vocab": 5000},
        {"hidden": 512, "layers": 3, "vocab": 5000},
        in_memory=True,
    ),
    "small-hybrid": Model(
        HYBRID,
        {"hidden": 1280, "layers": 8, "vocab": 5000},
        {"hidden": 512, "vocab": 5000},
        in_memory=True,
    ),
    # Llama-3 8B with Qwen's vocabulary, and Qwen3.5-27B.
    "8B": Model(
        DEMO,
        {"hidden": 4096, "layers": 32, "ffn": 14336, "heads": 32, "kv_heads": 8, "vocab": WORDS},
        _DRAFT_8,
        in_memory=True,
    ),
    "27B-hybrid": Model(
        HYBRID,
        {"hidden": 5120, "layers": 64, "ffn": 17408, "heads": 24, "kv_heads": 4, "vocab": 248_320}
        | {"linear_key_heads": 16, "linear_value_heads": 48},
        _DRAFT_27,
        in_memory=True,
    ),
}


def folders(name: str, cache: Path) -> Folders:
    """Where a model's checkpoints lie; those that are not there yet are written. name: of `MODELS`, or a folder.

    Raises ValueError for an unknown name and for models that have no files.
    """
    if name not in MODELS:
        if not (Path(name) / "config.json").exists():
            raise ValueError(f"--model {name}: no checkpoint folder, and none of {', '.join(MODELS)}")
        return Folders(Path(name), None)
    model = MODELS[name]
    if model.in_memory:
        raise ValueError(f"--model {name}: is built in the device's memory and has no files")
    if not model.target:
        return model.source
    draft = model.source.draft
    assert draft is not None
    target = _written(model.source.target, model.target, cache, name)
    heads = {
        drafter: target if folder == model.source.target else _head(folder, target)
        for drafter, folder in model.source.heads.items()
        if drafter != "draft-dspark"  # its tables have a row per word, which `inflate_heads` does not make up
    }
    return Folders(target, _written(draft, model.draft, cache, name), heads)


def _written(source: Path, sizes: Sizes, cache: Path, name: str) -> Path:
    """The inflated checkpoint's folder; it has its name only when it is whole."""
    told = json.dumps(sizes, sort_keys=True).encode() + (source / "model.safetensors").read_bytes()
    folder = cache / f"{name}-{source.name}-{hashlib.sha256(told).hexdigest()[:12]}"
    if not folder.exists():
        unfinished = folder.with_suffix(".part")
        shutil.rmtree(unfinished, ignore_errors=True)
        inflate(source, unfinished, dict(sizes))
        unfinished.rename(folder)
    return folder


def _head(source: Path, target: Path) -> Path:
    """The same of a draft head, which lies beside the target it is made for."""
    from tests.bench.inflate_heads import inflate_head

    folder = target.with_name(f"{target.name}-{source.name}")
    if not folder.exists():
        unfinished = folder.with_suffix(".part")
        shutil.rmtree(unfinished, ignore_errors=True)
        inflate_head(source, target, unfinished)
        unfinished.rename(folder)
    return folder


def load(name: str, cache: Path, dtype: torch.dtype, device: torch.device, n_ctx: int) -> Lab:
    """The model with its drafts on a device. Raises ValueError as `folders` does."""
    for one in (dtype, torch.float32):
        kernels.select(device, one)
    if name in MODELS and MODELS[name].in_memory:
        from tests.gpu.inflated import InflatedLab

        return InflatedLab(MODELS[name], dtype, device, n_ctx)
    return Lab(folders(name, cache), dtype, n_ctx, str(device))


def make(name: str, cache: Path) -> Path | None:
    """Write what is missing of a model; the target's folder, or None if it has no files."""
    if name in MODELS and MODELS[name].in_memory:
        return None
    return folders(name, cache).target
