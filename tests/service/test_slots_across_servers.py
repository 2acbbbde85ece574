"""Slots saved by one server and restored by the next one, or refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from slipstream.engine.api import Delta, Done, Request, Sampling
from slipstream.engine.errors import EngineStopped, SettingError, SlotFileRefused, Unsupported
from slipstream.engine.service.run.thread import ThreadEngine
from slipstream.engine.service.start.launch import launch
from slipstream.engine.settings import Settings
from tests.checkpoints import noised_copy, tiny_checkpoint

TARGET = Path(__file__).parents[2] / "demo" / "target"
PROMPT = "The quick brown fox jumps over the lazy dog. What is the answer? " * 8


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A hybrid, and itself with some noise as its draft model."""
    target, draft = (tmp_path_factory.mktemp(name) for name in ("target", "draft"))
    tiny_checkpoint("qwen3_5", target)
    noised_copy(target, draft, 0.02)
    return target, draft


def settings(pair: tuple[Path, Path], folder: Path, **changes: Any) -> Settings:
    fields: dict[str, Any] = {
        "model": str(pair[0]),
        "model_draft": str(pair[1]),
        "ctx_size": 512,
        "parallel": 2,
        "spec_type": "draft-model",
        "threads": 1,
        "slot_save_path": str(folder),
    }
    return Settings(**{**fields, **changes})


async def say(engine: ThreadEngine, prompt: str, tenant: str = "") -> tuple[str, Done]:
    sampling = Sampling(temperature=0.8, seed=5, ignore_eos=True)
    request = Request(id="one", prompt=prompt, sampling=sampling, max_tokens=40, tenant=tenant)
    text = ""
    async for event in await engine.submit(request):
        if isinstance(event, Delta):
            text += event.text
        elif isinstance(event, Done):
            return text, event
    raise AssertionError("no end")


def on(chosen: Settings, play: Callable[[ThreadEngine], Coroutine[Any, Any, Any]]) -> Any:
    """Play on a fresh server."""

    async def whole() -> Any:
        engine = launch(chosen)
        try:
            return await play(engine)
        finally:
            await engine.close()

    return asyncio.run(whole())


def test_a_conversation_outlives_its_server(pair: tuple[Path, Path], tmp_path: Path) -> None:
    async def first(engine: ThreadEngine) -> tuple[str, str, int]:
        text, _ = await say(engine, PROMPT)
        saved = await engine.save_slot(0, "talk", "")
        assert saved.n_bytes == (tmp_path / "talk").stat().st_size
        return text, (await say(engine, PROMPT + text))[0], saved.n_tokens

    async def second(engine: ThreadEngine) -> tuple[str, int, int]:
        assert (await say(engine, "x"))[1].usage.n_cached == 0
        restored = await engine.restore_slot(1, "talk", "")
        again, end = await say(engine, PROMPT + text)
        assert end.slot == 1, "the slot whose conversation it goes on with"
        assert await engine.erase_slot(1, "") >= end.usage.n_cached
        assert (await say(engine, PROMPT + text))[1].usage.n_cached == 0
        return again, restored.n_tokens, end.usage.n_cached

    text, expected, n_saved = on(settings(pair, tmp_path), first)
    again, n_restored, n_cached = on(settings(pair, tmp_path), second)
    assert again == expected
    assert n_saved == n_restored == n_cached >= 128


def test_strangers_are_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    async def save(engine: ThreadEngine) -> None:
        await say(engine, PROMPT)
        await engine.save_slot(0, "talk", "")

    async def restore(engine: ThreadEngine) -> None:
        with pytest.raises(SlotFileRefused, match="another model, draft or arithmetic"):
            await engine.restore_slot(0, "talk", "")
        assert engine.stats().n_pages_cached == 0

    on(settings(pair, tmp_path), save)
    for changes in (
        {"model": str(pair[1])},
        {"model_draft": str(pair[0])},
        {"model_draft": None, "spec_type": "none"},
        {"dtype": "bfloat16"},
    ):
        on(settings(pair, tmp_path, **changes), restore)


def test_without_a_folder_slots_are_not_saved(pair: tuple[Path, Path], tmp_path: Path) -> None:
    async def refused(engine: ThreadEngine) -> None:
        for call in (engine.save_slot, engine.restore_slot):
            with pytest.raises(Unsupported):
                await call(0, "a", "")

    on(settings(pair, tmp_path, slot_save_path=None), refused)


@pytest.mark.parametrize("name", ["", "missing", "file"])
def test_the_folder_must_be_there(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    path = str(tmp_path / name) if name else ""
    with pytest.raises(SettingError, match="slot-save-path"):
        launch(Settings(model=str(TARGET), slot_save_path=path))


def test_a_server_that_stops_answers_those_who_wait(pair: tuple[Path, Path], tmp_path: Path) -> None:
    async def stop(engine: ThreadEngine) -> None:
        await say(engine, PROMPT)
        engine._inbox.put(None)  # the thread ends; what comes after is never looked at
        with pytest.raises(EngineStopped):
            await engine.save_slot(0, "late", "")
        assert not (tmp_path / "late").exists()

    on(settings(pair, tmp_path), stop)
