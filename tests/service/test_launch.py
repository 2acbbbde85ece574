"""Flags that cannot take effect are refused at start, with the reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.errors import LoadError, SettingError
from engine.models.config import read_config
from engine.service.drafters import drafter_types
from engine.service.launch import launch
from engine.service.sizes import Checkpoint, context
from engine.settings import Settings

DEMO = Path(__file__).parents[2] / "demo"
TARGET, DRAFT = str(DEMO / "target"), str(DEMO / "draft")


@pytest.mark.parametrize(
    ("spec_type", "draft", "expected"),
    [
        ("auto", None, ("ngram-simple",)),
        ("auto", DRAFT, ("ngram-simple", "draft-model")),
        ("draft-simple", DRAFT, ("draft-model",)),
        ("draft-model,ngram-simple", DRAFT, ("draft-model", "ngram-simple")),
        ("ngram-simple", None, ("ngram-simple",)),
        ("none", None, ()),
    ],
)
def test_types(spec_type: str, draft: str | None, expected: tuple[str, ...]) -> None:
    assert drafter_types(Settings(model=TARGET, spec_type=spec_type, model_draft=draft)) == expected


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"spec_type": "warp"}, "spec_type"),
        ({"spec_type": "draft-model"}, "spec_type"),
        ({"spec_type": "ngram-simple", "model_draft": DRAFT}, "model_draft"),
        ({"spec_type": "none", "model_draft": DRAFT}, "model_draft"),
        ({"draft_min": 17}, "draft_min"),
        ({"device_draft": "cpu"}, "device_draft"),
        ({"draft_p_min": 0.5}, "draft_p_min"),
        ({"spec_type": "none", "ngram_size_n": 4}, "ngram_size_n"),
        ({"device": "tpu"}, "device"),
        ({"device": "cuda:99"}, "device"),
        ({"ctx_size": 10**7}, "ctx_size"),
        ({"parallel": 128, "batch_size": 64}, "parallel"),
        ({"cache_size": 1}, "cache_size"),
        ({"draft_max": 65}, "draft_max"),
    ],
)
def test_a_flag_without_effect_is_refused(changes: dict[str, object], setting: str) -> None:
    with pytest.raises(SettingError) as caught:
        launch(replace(Settings(model=TARGET), **changes))
    assert caught.value.setting == setting
    assert f"--{setting.replace('_', '-')}" in str(caught.value)


@pytest.mark.parametrize("name", ["", "/nowhere/at/all", "./nowhere", "a/b/c", "nobody/nothing"])
def test_a_model_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(LoadError):
        launch(Settings(model=name))


def test_the_context_is_what_fits_the_cache_unless_it_is_set() -> None:
    path = Path(TARGET)
    source = Checkpoint(path, read_config(path), torch.device("cpu"), torch.bfloat16)
    small = context(Settings(model=TARGET, cache_size=4), [source])
    assert (
        512 <= small < context(Settings(model=TARGET, cache_size=4000), [source]) == source.config.n_ctx_train
    )
    assert small * source.token_bytes <= 4 * 2**20
    assert context(Settings(model=TARGET, cache_size=4, ctx_size=2048), [source]) == 2048
