"""The table of drafters against what it speaks of: classes, settings, what users read."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import fields
from typing import Any

import pytest
import torch

from slipstream.engine.errors import SettingError
from slipstream.engine.service.start.drafters import drafter_types
from slipstream.engine.settings import Settings
from slipstream.engine.speculate.registry import BY_NAME, DRAFTERS, NETWORKS, Parts, Row, setting_names

NO_CACHE: Any = None
READERS = [row for row in DRAFTERS if row.network is None]
DEFAULTS = Settings()


@pytest.mark.parametrize("row", READERS, ids=lambda row: row.name)
def test_a_row_builds_the_drafter_of_its_name(row: Row) -> None:
    parts = Parts(Settings(parallel=2), {}, NO_CACHE, 16, 100, frozenset({0}), 64, torch.device("cpu"))
    assert row.build(parts).name == row.name


def test_no_name_is_another_drafters_too() -> None:
    names = Counter(name for row in DRAFTERS for name in (row.name, *row.aliases))
    assert {*names.values()} == {1}
    assert {*names} == {*BY_NAME}


def test_rows_speak_of_settings_that_there_are() -> None:
    for row in DRAFTERS:
        for prefix in row.settings:
            assert setting_names(prefix), prefix
        for name in row.needs_one_of:
            assert getattr(DEFAULTS, name) is None


def test_the_list_that_users_read_is_that_of_the_rows_offered() -> None:
    [listed] = [one.metadata["meaning"] for one in fields(Settings) if one.name == "spec_type"]
    names = re.findall(r"[a-z0-9-]+", listed.split(": ", 1)[1].split(";")[0])
    offered = {row.name for row in DRAFTERS if row.is_offered}
    assert {*names} - {"and", "in", "every", "list"} == offered


@pytest.mark.parametrize("name", setting_names(*(prefix for row in DRAFTERS for prefix in row.settings)))
def test_a_setting_of_drafters_is_refused_without_any_of_them(name: str) -> None:
    default = getattr(DEFAULTS, name)
    value = "x" if default is None or isinstance(default, str) else default + 1
    settings = Settings(**{"spec_type": "prediction", name: value})
    with pytest.raises(SettingError) as caught:
        drafter_types(settings, None)
    assert caught.value.setting == name
    for row in (one for one in DRAFTERS if name.startswith(one.settings)):
        assert row.name in str(caught.value)


def test_a_folder_is_of_one_kind_however_many_it_resembles() -> None:
    """DSpark adds to DFlash, and a model may bring an MTP head: the first row that fits is the one."""
    flash = frozenset({"fc.weight", "hidden_norm.weight"})
    spark = flash | {"markov_head.markov_w1.weight"}
    model = frozenset({"model.layers.0.input_layernorm.weight", "mtp.fc.weight"})
    found = [
        next(name for name, kind in NETWORKS.items() if kind.fits(names)) for names in (flash, spark, model)
    ]
    assert found == ["draft-dflash", "draft-dspark", "draft-model"]
