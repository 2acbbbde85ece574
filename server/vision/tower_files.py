"""Which tensors of a checkpoint's files belong to the part that sees images, and how many bytes they will take.

Files name them with or without `model.`, depending on the release of transformers that wrote them; Gemma 3's on the hub
have the tower's own `vision_model.` in between, newer ones have not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from slipstream.engine.checkpoint.layouts import PIECES
from slipstream.engine.checkpoint.safetensors_folder import SafetensorsFolder
from slipstream.engine.checkpoint.weights import STORED_DTYPES
from slipstream.engine.errors import UnsupportedModel

NARROW = (*PIECES, "SCB", "absmax", "quant_map")  # what quantised files call the tensors of a matrix


def tower_tensors(names: Collection[str], modules: Collection[str]) -> dict[str, str]:
    """The model's name -> name in the files, of all tensors of these modules."""
    found = {}
    for name in names:
        own = re.sub(r"^(model\.)?(vision_tower\.)?(vision_model\.)?", r"\2", name)
        if own.partition(".")[0] in modules:
            found[own] = name
    return found


def tower_bytes(folder: Path, modules: Collection[str], dtype: torch.dtype) -> int:
    """Bytes of these modules in `dtype`, from the headers of the files. Raises `LoadError` naming the file."""
    files = SafetensorsFolder(folder)
    try:
        stored = tower_tensors(files.names, modules).values()
        return sum(math.prod(files.shape(name)) for name in stored) * dtype.itemsize
    finally:
        files.close()


def refuse_quantised(files: SafetensorsFolder, stored: Mapping[str, str]) -> None:
    """Raises `UnsupportedModel` if a tensor is stored narrow, or is one of those that stand for a narrow matrix."""
    for name in stored.values():
        if name.endswith(tuple(f".{piece}" for piece in NARROW)) or files.dtype(name) not in STORED_DTYPES:
            raise UnsupportedModel(
                f"{files.where(name)}: is quantised ({files.dtype(name)}), which is not read in the part that sees"
                " images; --no-vision serves the model for text alone"
            )
