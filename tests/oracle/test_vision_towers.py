"""Towers and layouts against transformers' models and processors, on tiny checkpoints of every family."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.engine.api import Image
from slipstream.engine.errors import (
    CheckpointMismatch,
    InvalidRequest,
    LoadError,
    SettingError,
    UnsupportedModel,
)
from slipstream.engine.settings import Settings
from slipstream.server.vision.opening import open_vision, vision_bytes
from slipstream.server.vision.watching import Watching
from tests.tiny_vision import tiny_vision
from tests.vision_families import TINY
from tests.vision_reference import family_of, pixel_inputs, reference_inputs

CPU = torch.device("cpu")
VARIANTS = (*TINY, "gemma4 bidirectional")
SIZES = ((32, 32), (33, 20), (20, 51), (64, 64), (1, 1), (7, 90), (90, 7), (200, 131))
Folder = Callable[[str], Path]
Open = Callable[..., Watching]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """A variant's checkpoint, made once."""
    made: dict[str, Path] = {}

    def get(variant: str) -> Path:
        if variant not in made:
            made[variant] = tiny_vision(variant, tmp_path_factory.mktemp("vision"))
        return made[variant]

    return get


@pytest.fixture
def opened() -> Iterator[Open]:
    """Opens checkpoints and closes them again."""
    all: list[Watching] = []

    def get(path: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> Watching:
        vision = open_vision(path, dtype, CPU, Settings(model="m", **settings))
        assert isinstance(vision, Watching)
        all.append(vision)
        return vision

    yield get
    for vision in all:
        vision.close()


def picture(width: int, height: int, seed: int = 0) -> PIL.Image.Image:
    pixels = np.random.default_rng([seed, width, height]).integers(0, 256, (height, width, 3), np.uint8)
    return PIL.Image.fromarray(pixels)


def as_image(one: PIL.Image.Image) -> Image:
    return Image(one.width, one.height, one.tobytes())


def theirs(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model with the attention that the towers use."""
    kind = TINY[family_of(folder)].model
    return kind.from_pretrained(folder, attn_implementation="sdpa", dtype=dtype).eval()


def their_features(model: Any, folder: Path, pictures: list[PIL.Image.Image]) -> tuple[list[Tensor], Any]:
    """Rows of each picture, looked at together, and what comes with them."""
    made = pixel_inputs(folder, pictures)
    names = ("pixel_values", "image_grid_thw", "image_position_ids", "image_sizes")
    torch.set_num_threads(1)
    with torch.inference_mode():
        seen = model.get_image_features(**{name: made[name] for name in names if name in made}, return_dict=True)
    return list(seen.pooler_output), getattr(seen, "deepstack_features", None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_features_are_transformers_bit_for_bit(
    folder: Folder, opened: Open, variant: str, dtype: torch.dtype
) -> None:
    path = folder(variant)
    vision, model = opened(path, dtype), theirs(path, dtype)
    for size in SIZES:
        one = picture(*size)
        rows, deep = their_features(model, path, [one])
        seen = vision.features(as_image(one)).result(60)
        assert seen.rows.dtype == dtype
        assert torch.equal(seen.rows, rows[0].to(dtype)), size
        assert (seen.deep is None) == (not deep)
        if deep:
            assert seen.deep is not None
            assert torch.equal(seen.deep, torch.stack(list(deep)))
            assert len(seen.deep) == 2


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_image_is_the_same_whatever_comes_with_it(folder: Folder, opened: Open, variant: str) -> None:
    path = folder(variant)
    images = [as_image(picture(*size, seed)) for seed in range(3) for size in SIZES]
    alone = []
    for image in images:
        vision = opened(path, image_cache=0)
        alone.append(vision.features(image).result(60))
        vision.close()
    vision = opened(path)
    together = [future.result(60) for future in [vision.features(image) for image in reversed(images)]]
    for one, other in zip(alone, reversed(together), strict=True):
        assert torch.equal(one.rows, other.rows)
        assert one.deep is None or (other.deep is not None and torch.equal(one.deep, other.deep))


@pytest.mark.parametrize("variant", VARIANTS)
def test_together_transformers_sees_nearly_the_same(folder: Folder, opened: Open, variant: str) -> None:
    """Why images are looked at one by one: what a batch gives is close and not equal."""
    path = folder(variant)
    vision, pictures = opened(path), [picture(*size) for size in SIZES[:4]]
    for one, rows in zip(pictures, their_features(theirs(path), path, pictures)[0], strict=True):
        torch.testing.assert_close(vision.features(as_image(one)).result(60).rows, rows, rtol=1e-4, atol=1e-4)


def conversation() -> tuple[list[dict[str, Any]], list[PIL.Image.Image]]:
    """Four images: first, last, between texts, side by side; in several turns."""
    image = {"type": "image"}

    def text(said: str) -> dict[str, str]:
        return {"type": "text", "text": said}

    messages = [
        {"role": "user", "content": [image, text("The quick brown fox"), image, image]},
        {"role": "assistant", "content": "jumps"},
        {"role": "user", "content": [text("over the lazy dog"), image]},
    ]
    return messages, [picture(*size) for size in ((33, 20), (20, 51), (64, 64), (9, 40))]


def placed(path: Path, vision: Watching) -> tuple[list[int], Tensor, list[int]]:
    """Tokens, positions [3, n] and the indices of image rows of the conversation, as the engine is to place them."""
    messages, pictures = conversation()
    tokenizer = hf.AutoTokenizer.from_pretrained(path)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    text = re.sub(re.escape(vision.marker), lambda _: vision.written, text)
    assert vision.written.count(tokenizer.decode([vision.placeholder])) == 1
    layouts = iter([vision.layout(one.width, one.height) for one in pictures])
    ids: list[int] = []
    rows: list[int] = []
    positions: list[Tensor] = []
    at = 0
    for id in tokenizer(text, add_special_tokens=False)["input_ids"]:
        if id != vision.placeholder:
            ids.append(id)
            positions.append(torch.full((3, 1), at))
            at += 1
            continue
        layout = next(layouts)
        rows += [len(ids) + int(i) for i in layout.is_row.nonzero()[0]]
        ids += layout.token_ids
        plain = np.arange(layout.n_tokens)[None].repeat(3, 0)
        positions.append(at + torch.from_numpy(plain if layout.axes is None else layout.axes))
        at += layout.n_positions
    assert next(layouts, None) is None
    return ids, torch.cat(positions, 1), rows


@pytest.mark.parametrize("variant", VARIANTS)
def test_layouts_are_what_transformers_processor_writes(folder: Folder, opened: Open, variant: str) -> None:
    path = folder(variant)
    inputs = reference_inputs(path, *conversation())
    ids, positions, rows = placed(path, opened(path))
    assert ids == inputs["input_ids"][0].tolist()
    assert rows == (inputs["input_ids"][0] == hf.AutoConfig.from_pretrained(path).image_token_id).nonzero().flatten().tolist()
    if "image_grid_thw" in inputs:
        told, _ = theirs(path).model.get_rope_index(
            inputs["input_ids"], inputs["mm_token_type_ids"], inputs["image_grid_thw"]
        )
        assert torch.equal(positions, told[:, 0])
    else:
        assert torch.equal(positions, torch.arange(len(ids)).expand(3, -1))
