"""Images through a whole engine: from a chat with pictures to text, with a draft model that sees them too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from slipstream.engine.api import Chat, Delta, Done, Image, Request, Sampling, Speculate
from slipstream.engine.errors import ContextTooLong, InvalidRequest, Unsupported
from slipstream.engine.service.run.thread import ThreadEngine
from slipstream.engine.service.start.launch import launch
from slipstream.engine.settings import Settings
from slipstream.server.vision.opening import open_vision
from tests.checkpoints import SENTENCES, noised_copy
from tests.oracle.image_cases import IMAGE, PICTURES, picture
from tests.tiny_vision import tiny_vision

ONE, TWIN = PICTURES[:2]  # of one size
TEXT = {"type": "text", "text": " ".join(SENTENCES)[:300]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model that sees images, and a draft model with its own tower."""
    scratch = tmp_path_factory.mktemp("seeing")
    target = tiny_vision("qwen3_vl", scratch / "target")
    return target, noised_copy(target, scratch / "draft", 0.02)


def settings_of(folders: tuple[Path, Path], **more: Any) -> Settings:
    target, draft = map(str, folders)
    return Settings(model=target, model_draft=draft, parallel=2, ctx_size=512, threads=1, **more)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(
    folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ThreadEngine]:
    saves = tmp_path_factory.mktemp("saves")
    started = launch(settings_of(folders, slot_save_path=str(saves)), open_vision)
    yield started
    await started.close()


def asked(*images: Image, number: int, **more: Any) -> Request:
    """A request that shows images before its text."""
    chat = Chat([{"role": "user", "content": [*[IMAGE] * len(images), TEXT]}], images=images)
    return Request(id=f"r{number}", prompt=chat, sampling=Sampling(temperature=0.0), max_tokens=12, **more)


async def answered(engine: ThreadEngine, request: Request) -> tuple[list[int], Done]:
    stream, token_ids = await engine.submit(request), []
    async for event in stream:
        if isinstance(event, Delta):
            token_ids += event.token_ids
        if isinstance(event, Done):
            return token_ids, event
    raise AssertionError("no end")


@pytest.mark.asyncio(loop_scope="module")
async def test_what_images_show_reaches_the_text_and_the_prefix_cache(engine: ThreadEngine) -> None:
    assert engine.info.modalities == ("text", "image")
    plain = Speculate(n_max=0)
    first, cold = await answered(engine, asked(ONE, number=1, speculate=plain))
    again, warm = await answered(engine, asked(ONE, number=2))
    twin, other = await answered(engine, asked(TWIN, number=3, speculate=plain))
    assert first == again != twin
    assert cold.usage.n_image == 4  # 16 by 16 pixels, of which a token takes 8 by 8
    assert cold.usage.n_cached == other.usage.n_cached == 0
    assert warm.usage.n_cached >= 64
    assert warm.speculation.n_drafted > 0


@pytest.mark.asyncio(loop_scope="module")
async def test_the_draft_model_sees_them_with_its_own_tower(engine: ThreadEngine) -> None:
    seen = []
    real = engine._engine.add

    def add(slot: Any) -> None:
        seen.append(slot)
        real(slot)

    engine._engine.add = add  # type: ignore[method-assign]
    try:
        await answered(engine, asked(ONE, TWIN, number=4))
    finally:
        engine._engine.add = real  # type: ignore[method-assign]
    (slot,) = seen
    assert [one.start for one in slot.draft_images] == [one.start for one in slot.images]
    own, drafts = (one[0].features.rows for one in (slot.images, slot.draft_images))
    assert own.shape == drafts.shape
    assert 0 < (own - drafts).abs().max() < own.abs().max()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_saved_slot_is_of_the_images_that_it_was_made_of(engine: ThreadEngine) -> None:
    shown = picture(16, 16, 9)
    expected, done = await answered(engine, asked(shown, number=5))
    await engine.save_slot(done.slot, "seen", "")
    await engine.erase_slot(done.slot, "")
    _, cold = await answered(engine, asked(shown, number=6, speculate=Speculate(n_max=0)))
    assert cold.usage.n_cached == 0
    await engine.erase_slot(cold.slot, "")
    await engine.restore_slot(0, "seen", "")
    again = await engine.save_slot(0, "seen again", "")  # as what it is, which is more than its tokens
    assert again.n_tokens >= 64
    _, other = await answered(engine, asked(picture(16, 16, 10), number=7))
    text, warm = await answered(engine, asked(shown, number=8))
    assert text == expected
    assert other.usage.n_cached == 0
    assert warm.usage.n_cached >= 64


@pytest.mark.asyncio(loop_scope="module")
async def test_prompts_with_images_are_counted_whole(engine: ThreadEngine) -> None:
    request = asked(ONE, number=9)
    n = len(await engine.prompt_ids(request.prompt))
    text = await engine.prompt_ids(Chat([{"role": "user", "content": [TEXT]}]))
    assert n == len(text) + 4 + 2  # its tokens, and a mark before and behind them
    with pytest.raises(ContextTooLong):
        await engine.submit(asked(*[picture(40, 64, i) for i in range(14)], number=10))


@pytest.mark.asyncio(loop_scope="module")
async def test_images_that_the_text_does_not_show_are_refused(engine: ThreadEngine) -> None:
    chat = Chat([{"role": "user", "content": [TEXT]}], images=(ONE,))
    with pytest.raises(InvalidRequest, match="0 of 1 images"):
        await engine.submit(replace(asked(number=11), prompt=chat))
    # What a message says is text, whatever the template writes for images.
    spelled = [{"role": "user", "content": [{"type": "text", "text": "<|image_pad|>"}]}]
    with pytest.raises(InvalidRequest, match="0 of 1 images"):
        await engine.submit(replace(asked(number=12), prompt=Chat(spelled, images=(ONE,))))
    token_ids, _ = await answered(engine, asked(number=13))
    assert token_ids


def test_without_its_tower_a_model_sees_no_images(folders: tuple[Path, Path]) -> None:
    async def refused() -> None:
        engine = launch(settings_of(folders, vision=False), open_vision)
        try:
            assert engine.info.modalities == ("text",)
            with pytest.raises(Unsupported, match="sees images"):
                await engine.submit(asked(ONE, number=1))
            assert (await answered(engine, asked(number=2)))[0]
        finally:
            await engine.close()

    asyncio.run(refused())
