"""Names that users give: what they may have meant, and which are models' paths."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.engine import naming
from slipstream.engine.errors import LoadError, SettingError
from slipstream.engine.naming import did_you_mean, model_path
from slipstream.engine.settings import Settings
from slipstream.engine.settings_check import check
from slipstream.engine.speculate.registry import BY_NAME, DRAFTERS


def test_none_is_no_drafter_among_others() -> None:
    check(Settings(spec_type="none"))
    for names in ("none,suffix", "suffix, none", "auto,none"):
        with pytest.raises(SettingError, match=f"^--spec-type {names}: none must stand alone$"):
            check(Settings(spec_type=names))


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("sufix", "; did you mean suffix?"),
        ("SUFFIX", "; did you mean suffix?"),
        ("draft-eagle", "; did you mean draft-eagle3?"),
        ("transformer", ""),
        ("", ""),
    ],
)
def test_a_name_like_a_known_one_is_suggested(word: str, hint: str) -> None:
    assert did_you_mean(word, naming.DRAFTERS) == hint


def test_the_settings_know_the_drafters_there_are() -> None:
    offered = {name for name, row in BY_NAME.items() if row.is_offered}
    assert set(naming.DRAFTERS) == offered
    assert set(naming.TEST_DRAFTERS) == set(BY_NAME) - offered
    order = [name for name in naming.DRAFTERS if name in {row.name for row in DRAFTERS}]
    assert order == [row.name for row in DRAFTERS if row.is_offered]


def test_a_drafter_that_is_none_is_refused_with_what_there_is() -> None:
    check(Settings(spec_type="suffix, draft-simple,auto"))
    check(Settings(spec_type="none"))
    with pytest.raises(
        SettingError, match=r"^--spec-type suffix,sufx: 'sufx' is not a drafter; did you mean suffix\?"
    ):
        check(Settings(spec_type="suffix,sufx"))
    with pytest.raises(SettingError, match="'' is not a drafter; there are forced, prediction") as caught:
        check(Settings(spec_type="suffix,"))
    assert "garbage" not in str(caught.value)


def test_a_choice_like_a_known_one_is_suggested() -> None:
    with pytest.raises(SettingError, match=r"float16; did you mean bfloat16\?$"):
        check(Settings(dtype="bfloat"))


@pytest.mark.parametrize("name", ["org/name", "org/name:Q4_K_M", "org/name/file.gguf"])
def test_hub_names_are_no_paths(name: str) -> None:
    assert model_path(name) is None


def test_models_that_are_there_are_paths(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    file.touch()
    assert model_path(str(tmp_path)) == tmp_path
    assert model_path(str(file)) == file


def test_what_is_missing_is_named_with_the_models_beside_it(tmp_path: Path) -> None:
    (tmp_path / "Qwen3-4B").mkdir()
    (tmp_path / "Qwen3-4B" / "config.json").touch()
    (tmp_path / "Qwen3-8B").mkdir()  # no model
    (tmp_path / "Qwen3-4B-Q4_K_M.gguf").touch()
    for given, said in (
        ("Qwen3-4b", f"no such folder; did you mean {tmp_path}/Qwen3-4B?"),
        ("Qwen3-4B-Q4_KM.gguf", f"no such file; did you mean {tmp_path}/Qwen3-4B-Q4_K_M.gguf?"),
        ("xyz/nothing", "no such folder"),
    ):
        with pytest.raises(LoadError) as caught:
            model_path(f"{tmp_path}/{given}")
        assert str(caught.value) == f"{tmp_path}/{given}: {said}"
    with pytest.raises(LoadError, match=f"no such folder; did you mean {tmp_path}/Qwen3-4B"):
        model_path(f"{tmp_path}x/Qwen3-4B")


@pytest.mark.parametrize(
    "name", ["./here", "/no/such", "~/model", "a", "a/b/c", "a/b/c/d.gguf", "model.gguf"]
)
def test_names_that_are_neither_are_refused(name: str) -> None:
    with pytest.raises(LoadError, match="no such f"):
        model_path(name)


def test_another_kind_of_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(LoadError, match="neither a folder nor a GGUF file"):
        model_path(str(tmp_path / "model.bin"))
