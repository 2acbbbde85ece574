"""Requests with images for the bench of losslessness, and what sees their images.

A few small pictures are shown again and again, two of each size, so that prompts share prefixes that hold images, and
differ in nothing but what an image of the same size shows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slipstream.engine.api import Chat, Image, Sampling
from slipstream.engine.images import Vision
from slipstream.engine.service.run.showing import Shown, shown
from slipstream.engine.settings import Settings
from slipstream.engine.text.chat import load_chat_template
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.server.vision.opening import open_vision
from tests.checkpoints import SENTENCES
from tests.oracle.lab import Case, Folders
from tests.oracle.lossless import OVERRIDES

SIZES = ((16, 16), (24, 16), (16, 40))  # pixels
IMAGE = {"type": "image"}


def picture(width: int, height: int, seed: int) -> Image:
    """Random pixels."""
    random = np.random.default_rng(seed)
    return Image(width, height, random.integers(0, 256, (height, width, 3), np.uint8).tobytes())


PICTURES = tuple(picture(width, height, seed) for width, height in SIZES for seed in (1, 2))


class Eyes:
    """What sees images for a lab's networks."""

    def __init__(self, folders: Folders, dtype: torch.dtype) -> None:
        cpu, settings = torch.device("cpu"), Settings()
        self.target = self._open(folders.target, dtype, cpu, settings)
        self.draft = None if folders.draft is None else self._open(folders.draft, dtype, cpu, settings)
        tokenizer = Tokenizer(folders.target)
        template = load_chat_template(folders.target, tokenizer)
        assert template is not None
        self._template = template

    def _open(self, folder: Path, dtype: torch.dtype, device: torch.device, settings: Settings) -> Vision:
        vision = open_vision(folder, dtype, device, settings)
        assert vision is not None
        return vision

    def shown(self, chat: Chat) -> Shown:
        return shown(self._template.encode(chat, None, self.target), chat.images, self.target)

    def case(self, chat: Chat, sampling: Sampling) -> Case:
        """The request that the service would make of the chat."""
        prompt = self.shown(chat)
        images, drafts = (asyncio.run(prompt.placed(one)) for one in (self.target, self.draft))
        return Case(tuple(prompt.token_ids), sampling, images=images, draft_images=drafts)

    def close(self) -> None:
        for one in (self.target, self.draft):
            if one is not None:
                one.close()


def image_cases(eyes: Eyes, sampling: Sampling, n_cases: int, seed: int) -> list[Case]:
    """Chats of a few turns with a picture or several; every second is another's twin, with pictures of the same sizes.

    Some twins differ in the last picture alone, and some in nothing but the seed.
    """
    random = np.random.default_rng(seed)
    cases = []
    for i in range(n_cases):
        if i % 2 == 0:
            shape = [int(one) for one in random.integers(0, len(SIZES), 1 + i % 3)]
            texts = [SENTENCES[int(one)] for one in random.integers(0, len(SENTENCES), 3)]
            which = [0] * len(shape)
        else:
            which = [*which[:-1], int(random.integers(0, 2))]
        images = tuple(PICTURES[2 * one + other] for one, other in zip(shape, which, strict=True))
        own = replace(sampling, seed=1000 * seed + i, ignore_eos=i % 3 > 0)
        case = eyes.case(Chat(conversation(len(images), texts, first=i % 4 < 2), images=images), own)
        told = OVERRIDES[(seed + i) % len(OVERRIDES)]
        n_edits = (None, 0, 4)[i % 3]
        cases.append(replace(case, speculate=told, max_tokens=40 + 8 * (i % 3), n_edits=n_edits))
    return cases


def conversation(n_images: int, texts: Sequence[str], *, first: bool) -> list[dict[str, Any]]:
    """Two turns of a user, the images before the texts or behind them, and one of the model between."""
    said = [{"type": "text", "text": text[:60]} for text in texts]
    shown = [IMAGE] * n_images
    opening = [*shown[:1], said[0]] if first else [said[0], *shown[:1]]
    return [
        {"role": "user", "content": opening},
        {"role": "assistant", "content": texts[1][:40]},
        {"role": "user", "content": [*shown[1:], said[2]]},
    ]
