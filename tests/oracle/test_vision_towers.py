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
        seen = model.get_image_features(
            **{name: made[name] for name in names if name in made}, return_dict=True
        )
    return list(seen.pooler_output), getattr(seen, "deepstack_features", None)


@pytest.mark.sampled(keep=4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_features_are_transformers_bit_for_bit(
    folder: Folder, opened: Open, variant: str, dtype: torch.dtype
) -> None:
    path = folder(variant)
    vision, model = opened(path, dtype), theirs(path, dtype)
    for size in SIZES:
        one = picture(*size)
        # Of a single token Mistral 3 in transformers takes the row for no row, and fails.
        n_shown = 2 if variant == "mistral3" and size == (1, 1) else 1
        rows, deep = their_features(model, path, [one] * n_shown)
        seen = vision.features(as_image(one)).result(60)
        assert seen.rows.dtype == dtype
        assert torch.equal(seen.rows, rows[0].to(dtype)), size
        assert (seen.deep is None) == (not deep)
        if deep:
            assert seen.deep is not None
            assert torch.equal(seen.deep, torch.stack([images[0] for images in deep]))
            assert len(seen.deep) == 2


@pytest.mark.sampled(keep=2)
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


@pytest.mark.sampled(keep=8)
@pytest.mark.parametrize("variant", VARIANTS)
def test_together_transformers_sees_nearly_the_same(folder: Folder, opened: Open, variant: str) -> None:
    """Why images are looked at one by one: what a batch gives is close, and Pixtral's is not equal."""
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


@pytest.mark.sampled(keep=8)
@pytest.mark.parametrize("variant", VARIANTS)
def test_layouts_are_what_transformers_processor_writes(folder: Folder, opened: Open, variant: str) -> None:
    path = folder(variant)
    inputs = reference_inputs(path, *conversation())
    ids, positions, rows = placed(path, opened(path))
    assert ids == inputs["input_ids"][0].tolist()
    assert (
        rows
        == (inputs["input_ids"][0] == hf.AutoConfig.from_pretrained(path).image_token_id)
        .nonzero()
        .flatten()
        .tolist()
    )
    if "image_grid_thw" in inputs:
        told, _ = theirs(path).model.get_rope_index(
            inputs["input_ids"], inputs["mm_token_type_ids"], inputs["image_grid_thw"]
        )
        assert torch.equal(positions, told[:, 0])
    else:
        assert torch.equal(positions, torch.arange(len(ids)).expand(3, -1))


@pytest.mark.sampled(keep=8)
def test_rows_of_images_see_those_behind_them_in_gemma_alone(folder: Folder, opened: Open) -> None:
    ahead = {variant: opened(folder(variant)).layout(64, 48).ahead for variant in VARIANTS}
    assert {one: where for one, where in ahead.items() if where != "nowhere"} == {
        "gemma3": "everywhere",
        "gemma4 bidirectional": "in windows",
    }


LIMITED = {"qwen2_5_vl": 9, "qwen3_vl": 9, "qwen3_5": 9, "mistral3": 9}


@pytest.mark.sampled(keep=8)
@pytest.mark.parametrize("variant", LIMITED)
def test_images_are_scaled_to_the_tokens_that_they_may_take(
    folder: Folder, opened: Open, variant: str
) -> None:
    free, bound = opened(folder(variant)), opened(folder(variant), image_max_tokens=LIMITED[variant])
    for size in ((64, 64), (33, 20), (200, 131), (8, 8)):
        layout = bound.layout(*size)
        assert layout.n_tokens <= LIMITED[variant]
        seen = bound.features(as_image(picture(*size))).result(60)
        assert len(seen.rows) == layout.is_row.sum()
    assert free.layout(64, 64).n_tokens > bound.layout(64, 64).n_tokens >= 6
    assert free.layout(8, 8).n_tokens == bound.layout(8, 8).n_tokens


def test_limits_that_a_model_cannot_keep_are_refused(folder: Folder, opened: Open) -> None:
    with pytest.raises(SettingError, match="--image-max-tokens 15: this model's images take 16 tokens"):
        opened(folder("gemma3"), image_max_tokens=15)
    with pytest.raises(SettingError, match="one of 70, 140, 280, 560, 1120 tokens"):
        opened(folder("gemma4"), image_max_tokens=69)
    assert opened(folder("gemma4"), image_max_tokens=100).layout(64, 64).n_tokens == 64
    with pytest.raises(InvalidRequest, match=r"400 by 8 pixels takes .* however .* --image-max-tokens is 4"):
        opened(folder("qwen3_vl"), image_max_tokens=4).layout(400, 8)


def test_shapes_that_a_model_does_not_take_are_refused(folder: Folder, opened: Open) -> None:
    with pytest.raises(
        InvalidRequest, match="2010 by 10 pixels: absolute aspect ratio must be smaller than 200"
    ):
        opened(folder("qwen2_5_vl")).layout(2010, 10)
    with pytest.raises(InvalidRequest, match=r"10 by 2010 pixels: scaled to 48 pixels .* has none left"):
        opened(folder("mistral3")).layout(10, 2010)
    assert opened(folder("gemma4")).layout(1, 5000).n_tokens == 70


def renamed(path: Path, target: Path, rename: Callable[[str], str]) -> Path:
    """A copy of a checkpoint whose tensors have other names; those named "" are left out."""
    shutil.copytree(path, target)
    tensors = {rename(name): one for name, one in load_file(path / "model.safetensors").items()}
    tensors.pop("", None)
    save_file(tensors, target / "model.safetensors")
    return target


PREFIXES = {
    "model. before it": lambda name: re.sub(
        r"^(visual|vision_tower|multi_modal_projector)", r"model.\1", name
    ),
    "no model. before it": lambda name: re.sub(r"^model\.(visual|vision_tower|embed_vision)", r"\1", name),
    "vision_model within": lambda name: name.replace("vision_tower.", "vision_tower.vision_model."),
}


def weight_bytes(vision: Watching) -> int:
    return sum(one.nbytes for one in vision.family.parts.model.state_dict().values())


@pytest.mark.sampled(keep=6)
@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("variant", TINY)
def test_every_layout_of_names_loads(
    folder: Folder, opened: Open, tmp_path: Path, variant: str, prefix: str
) -> None:
    path, image = folder(variant), as_image(picture(33, 20))
    copy = renamed(path, tmp_path / "copy", PREFIXES[prefix])
    ours, other = (opened(one).features(image).result(60) for one in (path, copy))
    assert torch.equal(ours.rows, other.rows)
    assert vision_bytes(copy, torch.bfloat16) == weight_bytes(opened(copy, torch.bfloat16)) > 0


def damaged(path: Path, target: Path, edit: Callable[[dict[str, Tensor]], Any]) -> Path:
    shutil.copytree(path, target)
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


NAME = "model.visual.blocks.0.attn.proj.weight"
DAMAGES: dict[str, tuple[Callable[[dict[str, Tensor]], Any], type[Exception], str]] = {
    "missing": (lambda all: all.pop(NAME), CheckpointMismatch, r"missing: visual\.blocks\.0\.attn\.proj"),
    "surplus": (
        lambda all: all.update({"model.visual.blocks.9.x": torch.ones(2)}),
        CheckpointMismatch,
        r"unused: model\.visual\.blocks\.9\.x",
    ),
    "shape": (
        lambda all: all.update({NAME: torch.ones(32, 31)}),
        LoadError,
        r"has shape \[32, 31\], the config",
    ),
    "not finite": (lambda all: all[NAME].view(-1)[3:4].fill_(torch.nan), LoadError, "not finite"),
    "infinite": (lambda all: all[NAME].view(-1)[3:4].fill_(-torch.inf), LoadError, "not finite"),
    "narrow": (
        lambda all: all.update({NAME: all[NAME].to(torch.float8_e4m3fn)}),
        UnsupportedModel,
        r"is quantised \(F8_E4M3\).*--no-vision",
    ),
    "packed": (
        lambda all: all.update({NAME + "_packed": torch.ones(4)}),
        UnsupportedModel,
        "proj.weight_packed: is quantised",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_tensors_that_do_not_fit_are_refused_by_name(
    folder: Folder, opened: Open, tmp_path: Path, damage: str
) -> None:
    edit, error, message = DAMAGES[damage]
    with pytest.raises(error, match=message):
        opened(damaged(folder("qwen3_vl"), tmp_path / "copy", edit))


def test_checkpoints_that_see_nothing(
    folder: Folder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    def tried(path: Path, **settings: Any) -> list[str]:
        caplog.clear()
        assert open_vision(path, torch.float32, CPU, Settings(model="m", **settings)) is None
        return [one.getMessage() for one in caplog.records if one.name.startswith("slipstream")]

    qwen = folder("qwen3_5")
    text = renamed(qwen, tmp_path / "text", lambda name: "" if "visual" in name else name)
    assert tried(text) == ["images are not seen: the model's files hold no tensors of visual"]
    assert vision_bytes(text, torch.float32) == 0
    other = tmp_path / "other"
    shutil.copytree(qwen, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "model_type": "glm4v"}))
    assert tried(other) == ["images are not seen: models of type glm4v are served for text alone"]
    assert tried(tmp_path / "model.gguf") == ["images are not seen: a GGUF file holds a language model alone"]
    assert tried(qwen, vision=False) == []
    idle = "without effect, as the model sees no images: --image-limit, --media-path"
    assert tried(text, image_limit=2, media_path="/")[1:] == [idle]
    assert tried(qwen, vision=False, image_limit=2, media_path="/") == [idle]


@pytest.mark.sampled(keep=8)
def test_the_language_model_is_not_allocated(folder: Folder, opened: Open) -> None:
    for variant in VARIANTS:
        vision = opened(folder(variant))
        tensors = [*vision.family.parts.model.parameters(), *vision.family.parts.model.buffers()]
        assert not any(one.is_meta for one in tensors)
        assert weight_bytes(vision) == vision_bytes(folder(variant), torch.float32)
        assert not any("language_model" in name for name, _ in vision.family.parts.model.named_parameters())


def test_pixels_are_bounded_by_the_older_names_too(folder: Folder, opened: Open, tmp_path: Path) -> None:
    """As Qwen2.5-VL's files on the hub say it."""
    path = tmp_path / "copy"
    shutil.copytree(folder("qwen2_5_vl"), path)
    file = path / "preprocessor_config.json"
    said = json.loads(file.read_text())
    del said["size"]
    said |= {"min_pixels": 6 * 64, "max_pixels": 12 * 64, "image_processor_type": "Qwen2VLImageProcessorFast"}
    file.write_text(json.dumps(said))
    vision = opened(path)
    assert vision.layout(64, 64).n_tokens == 9
    assert vision.layout(2, 2).n_tokens == 9
    assert len(vision.features(as_image(picture(64, 64))).result(60).rows) == 9
    file.unlink()
    with pytest.raises(LoadError, match="does not say how images are prepared"):
        opened(path)
