"""Prompts with images: logits against transformers, in any cut, and text that drafts do not change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch
from torch import Tensor

from slipstream.engine.api import Chat, Image
from slipstream.engine.images import PlacedImage, cut_before
from slipstream.engine.models.registry import load_network
from tests.oracle.feeding import CPU, Runner, Windowed, rows
from tests.oracle.image_cases import IMAGE, Eyes, image_cases, picture
from tests.oracle.lab import Bench, Folders, Lab, play
from tests.oracle.lossless import SAMPLINGS, benches, disturbed
from tests.oracle.lossless_images import folders_of
from tests.tiny_vision import VARIANTS, tiny_vision
from tests.vision_reference import reference_logits

N_CTX = 512
NEAR = 1e-4  # of the largest logit; a hybrid's recurrence alone rounds to 1.3e-5
CHAT = [
    {"role": "user", "content": [IMAGE, {"type": "text", "text": "what is this"}, IMAGE]},
    {"role": "assistant", "content": "a thing"},
    {"role": "user", "content": [{"type": "text", "text": "and then"}, IMAGE]},
]
PICTURES = (picture(24, 16, 3), picture(16, 40, 4), picture(20, 20, 5))
pytestmark = [pytest.mark.usefixtures("_selected"), pytest.mark.sampled(keep=4)]


@pytest.fixture(scope="module", params=VARIANTS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision(request.param, tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def eyes(folder: Path) -> Iterator[Eyes]:
    seeing = Eyes(Folders(folder), torch.float32)
    yield seeing
    seeing.close()


def as_pillow(image: Image) -> PIL.Image.Image:
    return PIL.Image.frombytes("RGB", (image.width, image.height), image.pixels)


def placed(
    eyes: Eyes, messages: Sequence[Any], images: Sequence[Image]
) -> tuple[list[int], Sequence[PlacedImage]]:
    """A chat's token ids, and its images among them."""
    case = eyes.case(Chat(messages, images=tuple(images)), SAMPLINGS["greedy"])
    return list(case.prompt), case.images


def runner(folder: Path) -> Runner:
    network = load_network(folder, torch.float32, CPU, N_CTX, 384)
    return Windowed(network) if any(need.window is not None for need in network.needs) else Runner(network)


def fed(
    feeder: Runner, slot: int, token_ids: Sequence[int], images: Sequence[PlacedImage], size: int
) -> Tensor:
    """Logits of all rows of a prompt fed in chunks of `size`, but for images that are not to be cut."""
    found, start, n = [], 0, len(token_ids)
    while start < n:
        end = cut_before(images, start, min(n, start + size))
        found.append(feeder.feed(replace(rows(slot, token_ids, start, end - start), images=images)))
        start = end
    return torch.cat(found)


def relative(ours: Tensor, theirs: Tensor) -> float:
    assert theirs.std() > 0.3, "logits must be large enough to show a difference"
    return float((ours - theirs).abs().max() / theirs.abs().max())


def test_logits_whole_in_chunks_and_token_by_token(folder: Path, eyes: Eyes) -> None:
    expected_ids, expected = reference_logits(folder, CHAT, [as_pillow(one) for one in PICTURES])
    token_ids, images = placed(eyes, CHAT, PICTURES)
    assert token_ids == expected_ids.tolist()
    feeder = runner(folder)
    whole = fed(feeder, 0, token_ids, images, len(token_ids))
    assert relative(whole, expected) < NEAR
    for slot, size in enumerate((13, 1), start=1):
        assert torch.equal(fed(feeder, slot, token_ids, images, size), whole)


def test_text_beside_images_is_what_it_is_alone(folder: Path, eyes: Eyes) -> None:
    token_ids, images = placed(eyes, CHAT, PICTURES)
    text, _ = placed(eyes, [{"role": "user", "content": "what is this and then"}], ())
    alone = fed(runner(folder), 0, text, (), len(text))
    beside = runner(folder)
    spans = [rows(0, token_ids, 0, len(token_ids)), rows(1, text, 0, len(text))]
    logits = beside.feed(replace(spans[0], images=images), spans[1])
    assert torch.equal(logits[len(token_ids) :], alone)


def test_other_pixels_give_other_logits_behind_them_alone(folder: Path, eyes: Eyes) -> None:
    token_ids, images = placed(eyes, CHAT, PICTURES)
    other_ids, other = placed(eyes, CHAT, (*PICTURES[:2], picture(20, 20, 6)))
    assert other_ids == token_ids
    feeder = runner(folder)
    one, two = (fed(feeder, slot, token_ids, own, 64) for slot, own in enumerate((images, other)))
    first = images[2].start
    assert torch.equal(one[:first], two[:first])
    assert relative(one[first + 1 :], two[first + 1 :]) > 100 * NEAR


@pytest.mark.sampled(keep=1)
@pytest.mark.parametrize(
    "chain", [("suffix",), ("draft-model",), ("forced", "prediction", "suffix", "draft-model")], ids="+".join
)
@pytest.mark.parametrize("variant", ["qwen3_vl", "qwen3_5", "gemma3", "gemma4 bidirectional", "mistral3"])
def test_drafts_do_not_change_the_text(
    variant: str, chain: tuple[str, ...], tmp_path: Path, *, is_whole: bool
) -> None:
    folders = folders_of(variant, tmp_path)
    lab, seeing = Lab(folders, torch.float32), Eyes(folders, torch.float32)
    try:
        cases = image_cases(seeing, SAMPLINGS["warm"], 6, seed=7)
    finally:
        seeing.close()
    expected = play(lab, Bench(), cases, seed=7)
    tried = [*enumerate(benches(chain))][:: 1 if is_whole else 2]
    found = [disturbed(lab, bench, cases, expected, seed) for seed, bench in tried]
    assert sum(one.n_wrong for one in found) == 0
    if "draft-model" in chain:  # random networks seldom write what suffixes are found in
        assert sum(one.n_accepted for one in found) > 0
    assert sum(one.n_cached for one in found) > 0
