"""transformers' model without its language model, and its tensors from a checkpoint's files.

Nothing of the language model is allocated or read: the model is built on the meta device, where tensors have shapes
alone, and the modules that see images take theirs from the files.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel

from slipstream.engine.checkpoint.safetensors_folder import SafetensorsFolder
from slipstream.engine.errors import CheckpointMismatch, LoadError
from slipstream.server.vision.tower_files import refuse_quantised, tower_tensors

META = torch.device("meta")
LIMITS = (
    "input_min",
    "input_max",
    "output_min",
    "output_max",
)  # of Gemma 4's layers; infinite where there is none


def build(config: Any, modules: Collection[str]) -> Any:
    """The model of a config with these of its modules alone, its tensors without memory."""
    with META:
        kind: Any = AutoModel
        model = kind.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    for name, _ in list(model.named_children()):
        if name not in modules:
            setattr(model, name, None)
    return model.eval().requires_grad_(requires_grad=False)


def load(model: Any, folder: Path, modules: Collection[str], dtype: torch.dtype, device: torch.device) -> int:
    """Give the model its tensors, in `dtype` on the device; returns how many bytes they take.

    Raises `CheckpointMismatch` naming tensors that are missing or surplus, `LoadError` for another shape and for
    values that are not finite, `UnsupportedModel` for quantised ones.
    """
    files = SafetensorsFolder(folder)
    try:
        stored = tower_tensors(files.names, modules)  # the model's name -> name in the files
        refuse_quantised(files, stored)
        wanted = model.state_dict()
        missing = sorted(wanted.keys() - stored.keys())
        surplus = sorted(files.in_file(stored[name]) for name in stored.keys() - wanted.keys())
        if missing or surplus:
            raise CheckpointMismatch(str(folder), missing, surplus)
        taken = {name: _read(files, stored[name], one, dtype, device) for name, one in wanted.items()}
    finally:
        files.close()
    model.load_state_dict(taken, assign=True)
    _compute_buffers(model, device)
    return sum(one.nbytes for one in taken.values())


def _read(
    files: SafetensorsFolder, name: str, wanted: Tensor, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A fresh copy of one tensor."""
    if files.shape(name) != tuple(wanted.shape):
        raise LoadError(
            f"{files.where(name)}: has shape {list(files.shape(name))}, the config asks for {list(wanted.shape)}"
        )
    tensor = files.read(name).to(device=device, dtype=dtype, copy=True)
    if not name.endswith(LIMITS) and not math.isfinite(float(tensor.abs().max())):
        raise LoadError(f"{files.where(name)}: holds values that are not finite; the file is damaged")
    return tensor


def _compute_buffers(model: nn.Module, device: torch.device) -> None:
    """Give memory to what no file holds, as rotary frequencies: modules compute it of their config when made."""
    for module in _with_buffers_on_meta(model):
        made: Any = type(module)(module.config)
        for name, buffer in made.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


def _with_buffers_on_meta(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        if any(buffer.device == META for buffer in module.buffers(recurse=False)):
            yield module
