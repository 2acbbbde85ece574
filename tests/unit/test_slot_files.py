"""Saved slots on disk: names, damage, strangers' files, and writes that break off."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.engine.cache.cache import Cache
from slipstream.engine.cache.kv import KV
from slipstream.engine.cache.need import Need, Sizes
from slipstream.engine.cache.recurrent import Recurrent
from slipstream.engine.cache.saved import Saved, SavedWindow
from slipstream.engine.cache.store import Store
from slipstream.engine.errors import InvalidRequest, SlotFileRefused, SlotNotSaved
from slipstream.engine.service.run import slot_files
from slipstream.engine.service.run.slot_files import SlotFiles, state_fingerprint

CPU = torch.device("cpu")


def some() -> Saved:
    """Two pages of four tokens; the draft has made one of them."""
    generator = torch.Generator().manual_seed(3)

    def rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return Saved(
        tokens=[5, 0, 2**31 - 1, 7, 8, 9, 10, 11],
        complete={"target": range(2), "draft-mtp": range(1, 2), "empty": range(0)},
        rows={
            "target": [rows(2, 1, 4, 2) for _ in range(12)],
            "draft-mtp": [rows(1, 1, 4, 2).transpose(2, 3)],
            "empty": [rows(0, 1, 4, 2), rows(0, 1, 4, 2)],
        },
        windows={"target": SavedWindow([0, 1], [rows(2, 4)]), "empty": SavedWindow([], [rows(0, 4)])},
        states={("target", 4): [rows(3, dtype=torch.float32), rows(2)], ("target", 8): [rows(3), rows(2)]},
    )


def parts(saved: Saved) -> dict[str, Any]:
    """Everything in it by place, to compare."""
    lists = {
        **{f"rows {name}": tensors for name, tensors in saved.rows.items()},
        **{f"window {name}": window.rows for name, window in saved.windows.items()},
        **{f"states {place}": tensors for place, tensors in saved.states.items()},
    }
    numbers = {name: list(window.numbers) for name, window in saved.windows.items()}
    kinds = {name: [(tuple(one.shape), one.dtype) for one in tensors] for name, tensors in lists.items()}
    values = {name: [one.float().tolist() for one in tensors] for name, tensors in lists.items()}
    return {
        "tokens": list(saved.tokens),
        "complete": {name: (one.start, one.stop) for name, one in saved.complete.items()},
        "numbers": numbers,
        "kinds": kinds,
        "values": values,
    }


@pytest.fixture
def files(tmp_path: Path) -> SlotFiles:
    return SlotFiles(tmp_path, "one model", 4)


def test_what_is_written_is_read(files: SlotFiles, tmp_path: Path) -> None:
    path = files.path("größe 1.bin", "")
    n_bytes = files.write(path, some())
    assert path == tmp_path / "größe 1.bin"
    found, n_read = files.read(path)
    assert parts(found) == parts(some())
    assert n_bytes == n_read == path.stat().st_size
    assert path.stat().st_mode & 0o077 == 0, "others may not read what people wrote"
    assert list(tmp_path.iterdir()) == [path]


OTHER_FOLDERS = ["", ".", "..", "a/b", "/a", "a\\b", "../a", "a/../b", "..\\a", "C:"]
ODD = [".hidden", "a\0", "a\nb", "\u202ea", "a.", " a", "a ", "a*", "a?", '"', "<a", "a|b", "ä" * 101]


@pytest.mark.parametrize("name", [*OTHER_FOLDERS, *ODD])
def test_names_that_lead_elsewhere(files: SlotFiles, name: str) -> None:
    with pytest.raises(InvalidRequest) as wrong:
        files.path(name, "tenant")
    assert wrong.value.param == "filename"


@pytest.mark.parametrize("name", ["a", "ä" * 100, "a..b", "my slot (1).safetensors", "-rf", "漢字"])
def test_names_that_are_fine(files: SlotFiles, name: str, tmp_path: Path) -> None:
    assert files.path(name, "") == tmp_path / name
    files.write(files.path(name, ""), some())


def test_tenants_have_folders_of_their_own(files: SlotFiles, tmp_path: Path) -> None:
    places = [files.path("a", tenant) for tenant in ("", "alice", "bob", "alice:salt", "../up")]
    assert len(set(places)) == 5
    for path in places[1:]:
        assert path.parent.parent == tmp_path
    files.write(places[1], some())
    with pytest.raises(SlotFileRefused, match="no saved slot"):
        files.read(places[2])
    assert places[1].parent.stat().st_mode & 0o077 == 0


def test_what_is_missing_or_no_file(files: SlotFiles, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("never", "folder"):
        with pytest.raises(SlotFileRefused, match=f"no saved slot {name}") as refused:
            files.read(files.path(name, ""))
        assert refused.value.param == "filename"


def test_files_of_others_are_refused_by_name(files: SlotFiles, tmp_path: Path) -> None:
    path = files.path("a", "")
    files.write(path, some())
    for other, told in (
        (SlotFiles(tmp_path, "another model", 4), "another model"),
        (SlotFiles(tmp_path, "one model", 64), "pages of another size"),
    ):
        with pytest.raises(SlotFileRefused, match=told):
            other.read(path)
    save_file({"tokens": torch.zeros(4)}, path, metadata={"format": "pt"})
    with pytest.raises(SlotFileRefused, match="another format"):
        files.read(path)
    save_file({"tokens": torch.zeros(4)}, path)
    with pytest.raises(SlotFileRefused, match="another format"):
        files.read(path)


def test_every_cut_is_noticed(files: SlotFiles) -> None:
    path = files.path("a", "")
    files.write(path, some())
    whole = path.read_bytes()
    for n in (0, 1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:n])
        with pytest.raises(SlotFileRefused, match="a is damaged"):
            files.read(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(SlotFileRefused, match="a is damaged"):
        files.read(path)


def test_every_flipped_bit_is_noticed(files: SlotFiles) -> None:
    path = files.path("a", "")
    files.write(path, some())
    whole = path.read_bytes()
    (n_header,) = struct.unpack("<Q", whole[:8])
    places = random.Random(1).sample(range(8, len(whole)), 150) + list(range(n_header + 8, n_header + 48))
    for place in places:
        broken = bytearray(whole)
        broken[place] ^= 1 << place % 8
        path.write_bytes(broken)
        try:
            found, _ = files.read(path)
        except SlotFileRefused:
            continue
        assert place < n_header + 8, "only in the header may a byte not matter"
        assert parts(found) == parts(some())


def test_a_file_that_is_overwritten_in_place_once_it_is_checked(
    files: SlotFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = files.path("a", "")
    files.write(path, some())
    whole = path.read_bytes()

    def replacing(tensors: Mapping[str, Tensor]) -> str:
        found = checksum(tensors)
        with path.open("r+b") as file:
            file.write(whole[:-16] + bytes(16))
        return found

    checksum = slot_files._checksum
    monkeypatch.setattr(slot_files, "_checksum", replacing)
    assert parts(files.read(path)[0]) == parts(some())
    assert path.read_bytes() != whole


def test_a_file_that_is_cut_short_as_it_is_read(files: SlotFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were it mapped, touching what it lacks would end the process (SIGBUS)."""
    path = files.path("a", "")
    saved = some()
    files.write(
        path, replace(saved, rows={**saved.rows, "target": [torch.randn(2, 4096) for _ in range(12)]})
    )

    def cutting(name: str, metadata: Mapping[str, str]) -> None:
        check(name, metadata)
        os.truncate(path, 4096)

    check = files._check
    monkeypatch.setattr(files, "_check", cutting)
    with pytest.raises(SlotFileRefused, match="a is damaged"):
        files.read(path)


def test_tensors_that_are_not_a_slots(files: SlotFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever forges a checksum still gets no further than here."""
    path = files.path("a", "")
    files.write(path, some())
    good = load_file(path)
    for changes in (
        {"tokens": None},
        {"more": torch.zeros(1)},
        {"rows.other.0": torch.zeros(1)},
        {"complete.target": torch.zeros(3, dtype=torch.int32)},
        {"states.target.x.0": torch.zeros(1)},
        {"states.target": torch.zeros(1)},
        {"rows.target.12x": torch.zeros(1)},
        {"rows.target.3": None},
    ):
        tensors = {key: one for key, one in {**good, **changes}.items() if one is not None}
        metadata = {"format": "slipstream-slot-2", "page_size": "4", "fingerprint": "one model"}
        save_file(tensors, path, metadata={**metadata, "sha256": slot_files._checksum(tensors)})
        with pytest.raises(SlotFileRefused, match="not the tensors of a saved slot"):
            files.read(path)


def test_a_write_that_fails_leaves_the_old_file(
    files: SlotFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = files.path("a", "")
    files.write(path, some())
    before = path.read_bytes()

    def fail(tensors: object, name: str, metadata: object) -> None:
        Path(name).write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(slot_files, "save_file", fail)
    with pytest.raises(SlotNotSaved, match="no space left; --slot-save-path sets the folder"):
        files.write(path, some())
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_folders_name_is_refused(files: SlotFiles, tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    with pytest.raises(InvalidRequest, match="kept is a folder"):
        files.write(files.path("kept", ""), some())
    assert [one.name for one in tmp_path.iterdir()] == ["kept"]


def test_a_folder_that_takes_no_tenants_is_a_named_error(files: SlotFiles, tmp_path: Path) -> None:
    path = files.path("a", "somebody")
    path.parent.write_bytes(b"")
    with pytest.raises(SlotNotSaved, match="File exists; --slot-save-path"):
        files.write(path, some())
    with pytest.raises(InvalidRequest, match="must not begin with tenant-"):
        files.path(path.parent.name, "")


def test_what_interrupted_saves_leave_is_removed_and_running_ones_go_on(
    files: SlotFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = slot_files.save_file

    def with_another_start(*arguments: Any, **named: Any) -> None:
        SlotFiles(tmp_path, "one model", 4)
        save(*arguments, **named)

    monkeypatch.setattr(slot_files, "save_file", with_another_start)
    for tenant in ("", "somebody"):
        path = files.path("a", tenant)
        files.write(path, some())
        (path.parent / ".left.part").write_bytes(b"half")
    SlotFiles(tmp_path, "one model", 4)
    assert not list(tmp_path.rglob("*.part"))
    assert len(list(tmp_path.rglob("a"))) == 2


def test_what_a_file_says_of_itself_is_shown_in_part(files: SlotFiles, tmp_path: Path) -> None:
    path = files.path("a", "")
    SlotFiles(tmp_path, "x" * 10**6, 4).write(path, some())
    with pytest.raises(SlotFileRefused, match="another model") as refused:
        files.read(path)
    assert len(str(refused.value)) < 300


def checkpoint(folder: Path, bump: float = 0.0, **config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"a": 1, **config}))
    weights = {f"layers.{i}.weight": torch.full((64, 64), float(i)) for i in range(64)}
    weights["layers.40.weight"] += bump
    save_file(weights, folder / "model.safetensors")
    return folder


def cache(dtype: torch.dtype = torch.float32, names: tuple[str, ...] = ("target",), *more: Need) -> Cache:
    sizes = Sizes(n_slots=1, n_pages=2, page_size=4)
    return Cache({name: Store([KV(1, 2), *more], sizes, dtype, CPU) for name in names}, 1, 2, 4)


def test_the_fingerprint_tells_apart_what_must_not_be_mixed(tmp_path: Path) -> None:
    one = checkpoint(tmp_path / "one")
    copy = Path(shutil.copytree(one, tmp_path / "copy"))
    tuned = checkpoint(tmp_path / "tuned", bump=0.5)  # the same header and size
    other = checkpoint(tmp_path / "other", a=2)
    recurrent = Recurrent(n_key_heads=1, n_value_heads=1, d_key=4, d_value=4, conv_width=4)
    prints = [
        state_fingerprint([one], cache()),
        state_fingerprint([tuned], cache()),
        state_fingerprint([other], cache()),
        state_fingerprint([one, tuned], cache()),
        state_fingerprint([one, one], cache()),
        state_fingerprint([one], cache(torch.bfloat16)),
        state_fingerprint([one], cache(torch.float32, ("target", "draft"))),
        state_fingerprint([one], cache(torch.float32, ("target",), recurrent)),
        state_fingerprint([one], cache(), rounds=True),
    ]
    assert len(set(prints)) == len(prints)
    assert state_fingerprint([copy], cache()) == prints[0], "where it lies does not matter"
