"""From a checkpoint's files to the part of it that sees images, if there is one."""

from __future__ import annotations

import logging
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from slipstream.engine.checkpoint.safetensors_folder import SafetensorsFolder
from slipstream.engine.errors import LoadError
from slipstream.engine.images import Vision
from slipstream.engine.naming import is_gguf
from slipstream.engine.settings import Settings
from slipstream.engine.text.json_file import read_object
from slipstream.server.vision import tower_files
from slipstream.server.vision.family import Family, Parts
from slipstream.server.vision.watching import Watching

log = logging.getLogger(__name__)

# Most tokens of an image on a CPU, unless a setting says more. One core looks at some 80 a second with a tower of 0.4 B
# (docs/images.md); a photograph at the 16,384 that Qwen allows would take minutes.
CPU_TOKENS = 1024

# `model_type` of config.json -> the module whose FAMILY it is. Others are not imported: transformers takes
# seconds for its image processors, which a model of text alone would wait for too.
FAMILIES = {
    "qwen2_5_vl": "qwen_images",
    "qwen3_vl": "qwen_images",
    "qwen3_vl_moe": "qwen_images",
    "qwen3_5": "qwen_images",
    "qwen3_5_moe": "qwen_images",
    "gemma3": "gemma3_images",
    "gemma4": "gemma4_images",
    "mistral3": "pixtral_images",
}


_OF_IMAGES = (
    *("image_max_tokens", "image_cache", "image_limit", "image_pixels", "image_timeout"),
    *("allow_remote_images", "remote_image_hosts", "media_path"),
)


def open_vision(path: Path, dtype: torch.dtype, device: torch.device, settings: Settings) -> Vision | None:
    """What sees images for the checkpoint at `path`, with a thread of its own until it is closed; None: nothing does.

    dtype: of its weights and of the rows that it gives. Raises `LoadError` naming the file, tensor or setting.
    """
    family = family_of(path) if settings.vision else None
    if family is None:
        _warn_of_idle(settings)
        return None
    from slipstream.server.vision import tower

    config = read_config(path)
    model = tower.build(config, family.modules)
    n_bytes = tower.load(model, path, family.modules, dtype, device)
    most = settings.image_max_tokens or (CPU_TOKENS if device.type == "cpu" else None)
    parts = Parts(path, config, model, added_tokens(path), most, dtype, device)
    log.info("image tower loaded model_type=%s n_bytes=%d", config.model_type, n_bytes)
    return Watching(family(parts), settings.image_cache << 20)


def _warn_of_idle(settings: Settings) -> None:
    """Log which settings of images a model that sees none has been given."""
    idle = [
        f"--{one.name.replace('_', '-')}"
        for one in fields(settings)
        if one.name in _OF_IMAGES and getattr(settings, one.name) != one.default
    ]
    if idle:
        log.warning("without effect, as the model sees no images: %s", ", ".join(idle))


def vision_bytes(path: Path, dtype: torch.dtype) -> int:
    """Bytes that the weights of `open_vision` will take, from config and headers alone; 0 where it gives None."""
    family = family_of(path)
    return 0 if family is None else tower_files.tower_bytes(path, family.modules, dtype)


def family_of(path: Path) -> type[Family] | None:
    """The family of a checkpoint that sees images; None, with a line in the log, if it does not or not here."""
    if is_gguf(path):
        log.info("images are not seen: a GGUF file holds a language model alone")
        return None
    said = read_object(path / "config.json")
    kind = said.get("model_type")
    name = FAMILIES.get(kind) if isinstance(kind, str) else None
    if name is None:
        if said.get("vision_config") is not None:
            log.info("images are not seen: models of type %s are served for text alone", kind)
        return None
    family: type[Family] = import_module(f"slipstream.server.vision.{name}").FAMILY
    files = SafetensorsFolder(path)
    try:
        has_tower = bool(tower_files.tower_tensors(files.names, family.modules))
    finally:
        files.close()
    if not has_tower:
        log.info("images are not seen: the model's files hold no tensors of %s", family.modules[0])
    return family if has_tower else None


def read_config(path: Path) -> Any:
    """transformers' config of the whole model. Raises `LoadError`."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # noqa: BLE001 - its checks raise errors of many kinds
        raise LoadError(f"{path / 'config.json'}: not understood by transformers ({error})") from None


def added_tokens(path: Path) -> dict[int, str]:
    """The tokens that the tokenizer finds before it cuts the text, by id. Raises `LoadError`."""
    listed = read_object(path / "tokenizer.json").get("added_tokens")
    if not isinstance(listed, list):
        raise LoadError(f"{path / 'tokenizer.json'}: lists no added_tokens, of which images need some")
    return {
        one["id"]: one["content"]
        for one in listed
        if isinstance(one, dict) and isinstance(one.get("id"), int) and isinstance(one.get("content"), str)
    }
