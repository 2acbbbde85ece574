"""Where a model's files are: a local folder, or the local copy of a hub repository."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from slipstream.engine.errors import LoadError
from slipstream.engine.models.reading.config import DTYPES, ModelConfig

CHECKPOINT = ("*.json", "*.safetensors", "*.jinja")
CONFIGS = ("config.json", "generation_config.json")


def local_folder(name: str, patterns: Sequence[str] = CHECKPOINT) -> Path:
    """A local folder, or the local copy of a hub repository `org/name`. Raises `LoadError`.

    patterns: which of the repository's files are wanted.
    """
    path = Path(name)
    if path.is_dir():
        return path
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise LoadError(f"{name}: no such folder")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except (OSError, ValueError) as error:
        raise LoadError(f"{name}: no such folder, and the hub did not give it: {error}") from error


def run_dtype(config: ModelConfig, setting: str) -> torch.dtype:
    """The dtype a network runs in: the setting's, or the checkpoint's."""
    return config.dtype if setting == "auto" else DTYPES[setting]
