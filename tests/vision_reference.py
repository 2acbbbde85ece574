"""What transformers makes of messages with images: its processors' input and its models' logits, in float32.

The processors themselves need torchvision, for videos; so their parts are called one by one: the image processor, the
placeholder's expansion, the tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers as hf
from PIL.Image import Image
from torch import Tensor
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor

from tests.vision_families import TINY, TinyVision

Messages = Sequence[Mapping[str, Any]]


def family_of(folder: Path) -> str:
    return str(json.loads((folder / "config.json").read_text())["model_type"])


def image_processor(folder: Path) -> Any:
    """The image processor of a checkpoint, which runs on Pillow."""
    tiny = TINY[family_of(folder)]
    said = json.loads((folder / tiny.file).read_text())
    kind = type(tiny.processor())
    return kind(
        **{key: value for key, value in said.get("image_processor", said).items() if "_type" not in key}
    )


def model_of(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The checkpoint in transformers."""
    tiny = TINY[family_of(folder)]
    return tiny.model.from_pretrained(folder, attn_implementation="eager", dtype=dtype).eval()


def pixel_inputs(folder: Path, images: Sequence[Image]) -> dict[str, Any]:
    """What the image processor makes of images, tensors where the model takes tensors."""
    processor, more = image_processor(folder), {}
    if family_of(folder) == "mistral3":
        more = {"patch_size": 4 * 2}  # as PixtralProcessor._process_images has it
    return dict(processor(list(images), return_tensors="pt", **more))


def expansion(folder: Path, made: Mapping[str, Any], index: int) -> str:
    """What transformers' processor writes for an image in place of what the template writes."""
    family = family_of(folder)
    tiny = TINY[family]
    parts: dict[str, Any] = {"image_processor": image_processor(folder), **tiny.processing}
    if family == "gemma3":
        boi, eoi, one = (tiny.special[name] for name in ("boi_token", "eoi_token", "image_token"))
        parts["full_image_sequence"] = f"\n\n{boi}{one * tiny.processing['image_seq_length']}{eoi}\n\n"
        kind: Any = Gemma3Processor
    elif family == "gemma4":
        parts.update({name: tiny.special[name] for name in ("boi_token", "eoi_token", "image_token")})
        kind = Gemma4Processor
    elif family == "mistral3":
        return pixtral_expansion(made["image_sizes"][index].tolist(), 4 * 2)
    else:
        parts["image_token"] = "<|image_pad|>"
        kind = Qwen2_5_VLProcessor  # Qwen3-VL's and Qwen3.5's are the same for images
    return str(kind.replace_image_token(SimpleNamespace(**parts), made, index))


def pixtral_expansion(size: Sequence[int], patch_size: int) -> str:
    """As `PixtralProcessor.replace_image_token`, whose module cannot be imported without torchvision."""
    height, width = size
    rows = [["[IMG]"] * (width // patch_size) + ["[IMG_BREAK]"]] * (height // patch_size)
    tokens = [one for row in rows for one in row]
    tokens[-1] = "[IMG_END]"
    return "".join(tokens)


def marker_of(tiny: TinyVision) -> str:
    """The token that the template writes for an image."""
    return next(
        one for one in ("<start_of_image>", "<|image|>", "[IMG]", "<|image_pad|>") if one in tiny.control
    )


def reference_inputs(
    folder: Path, messages: Messages, images: Sequence[Image], *, add_generation_prompt: bool = True
) -> dict[str, Any]:
    """Keyword arguments of the model's forward for a chat; images are those of its parts, in their order."""
    tiny, tokenizer = TINY[family_of(folder)], hf.AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
    )
    made = pixel_inputs(folder, images) if images else {}
    pieces = re.split(re.escape(marker_of(tiny)), text)
    assert len(pieces) == len(images) + 1, "as many images as the template writes"
    for index in range(len(images)):
        pieces[index] += expansion(folder, made, index)
    ids = tokenizer("".join(pieces), add_special_tokens=False, return_tensors="pt")["input_ids"]
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    family = family_of(folder)
    if family != "mistral3":
        config = hf.AutoConfig.from_pretrained(folder)
        kinds = (ids == config.image_token_id).int()
        inputs["token_type_ids" if family == "gemma3" else "mm_token_type_ids"] = kinds
    taken = ("pixel_values", "image_grid_thw", "image_position_ids", "image_sizes")
    return inputs | {key: value for key, value in made.items() if key in taken}


def reference_logits(
    folder: Path, messages: Messages, images: Sequence[Image], *, add_generation_prompt: bool = True
) -> tuple[Tensor, Tensor]:
    """Token ids [n] of a chat with images, and transformers' logits [n, vocab] float32 behind each of them."""
    inputs = reference_inputs(folder, messages, images, add_generation_prompt=add_generation_prompt)
    with torch.inference_mode():
        logits = model_of(folder)(**inputs, use_cache=False).logits[0]
    return inputs["input_ids"][0], logits
