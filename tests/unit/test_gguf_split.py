"""Models that were split into several GGUF files: which files those are, and what is no whole model."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipstream.engine.checkpoint.gguf.files import read_keys, split_files
from slipstream.engine.errors import LoadError
from tests.gguf_tiny import refusal, tiny


@pytest.fixture
def split(tmp_path: Path) -> Path:
    """The first of three files."""
    return tiny().write(tmp_path / "big.gguf", most_tensors=4)


def part(first: Path, number: int) -> Path:
    return first.with_name(f"big-{number:05}-of-00003.gguf")


def test_names_of_parts(split: Path) -> None:
    assert split_files(split) == [part(split, i) for i in (1, 2, 3)]
    assert split_files(Path("a/b.gguf")) == [Path("a/b.gguf")]
    capitals = [Path(f"B-0000{i}-of-00002.GGUF") for i in (1, 2)]
    assert split_files(capitals[0]) == capitals
    for name in ("x-00001-of-00000.gguf", "x-1-of-3.gguf", "x-00001-of-00003.gguf.part"):
        assert split_files(Path(name)) == [Path(name)]
    assert len(read_keys(split).tensors) == 11


def test_parts_that_are_not_there_or_not_theirs(split: Path) -> None:
    hidden = part(split, 2).rename(split.with_name("hidden"))
    assert refusal(split, LoadError) == "big-00002-of-00003.gguf: no such file"
    shutil.copy(part(split, 3), part(split, 2))
    assert refusal(split, LoadError) == "big-00002-of-00003.gguf: split.no = 2, must be 1"
    tiny().write(part(split, 2))
    assert refusal(split, LoadError) == "big-00002-of-00003.gguf: split.no = None, must be 1"
    hidden.rename(part(split, 2))
    later = part(split, 3)
    message = "a later part of a split model; name the first, big-00001-of-00003.gguf"
    assert refusal(later, LoadError) == f"big-00003-of-00003.gguf: {message}"


def test_a_part_under_another_name(split: Path) -> None:
    alone = shutil.copy(split, split.with_name("alone.gguf"))
    message = "split.count = 3, and the name says it is one of 1 files"
    assert refusal(alone, LoadError) == f"alone.gguf: {message}"


def test_parts_that_do_not_make_up_the_model(split: Path) -> None:
    whole = replace(tiny(), metadata={"split.no": 1})
    replace(whole, tensors={"blk.5.x": torch.ones(1)}).write(part(split, 2))
    message = refusal(split, LoadError)
    assert message == "big-00001-of-00003.gguf: the parts have 8 tensors, split.tensors.count = 11"
    replace(whole, tensors={"token_embd.weight": torch.ones(1)}).write(part(split, 2))
    assert (
        refusal(split, LoadError)
        == "big-00002-of-00003.gguf: tensor token_embd.weight is in an earlier part too"
    )
