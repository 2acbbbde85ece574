"""Files of counted n-grams whose folder is used by others, too."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from slipstream.engine.errors import LoadError
from slipstream.engine.speculate.ngram import count_file
from slipstream.engine.speculate.ngram.ngram_cache import NgramCache

VOCAB = 1000
ONE = (
    np.array([[1, 2, -1, -1]], np.int32),
    np.array([[0, 3, 5]], np.int32),
)  # 3 has followed 1, 2 five times


def test_a_server_that_starts_leaves_what_another_is_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "counts"
    started: list[NgramCache] = []

    def written(handle: int) -> None:
        started.append(NgramCache(1, None, path, VOCAB))

    monkeypatch.setattr(os, "fsync", written)
    count_file.write(path, ONE)
    assert len(started) == 1
    assert count_file.read(path, VOCAB)[1].tolist() == ONE[1].tolist()
    assert list(tmp_path.iterdir()) == [path]


def test_two_servers_write_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where both have one process id, as in containers that share a folder."""
    path = tmp_path / "counts"

    def written(handle: int) -> None:
        monkeypatch.setattr(os, "fsync", lambda handle: None)
        count_file.write(path, ONE)

    monkeypatch.setattr(os, "fsync", written)
    count_file.write(path, ONE)
    assert count_file.read(path, VOCAB)[1].tolist() == ONE[1].tolist()
    assert list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o600


def test_folders_in_the_way_of_a_start(tmp_path: Path) -> None:
    path = tmp_path / "counts"
    path.write_bytes(b"noise")
    (tmp_path / "counts.1.part").mkdir()  # no save's
    (tmp_path / "counts.damaged").mkdir()
    with pytest.raises(
        LoadError, match=r"counts: .*ends within a record.*cannot be put aside: Is a directory"
    ):
        NgramCache(1, None, path, VOCAB)
    assert path.read_bytes() == b"noise"
