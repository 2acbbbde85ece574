"""Which files a name means: folders and GGUF files that are here, and those of the hub."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects

from slipstream.engine.errors import LoadError
from slipstream.engine.models.registry import read_model
from slipstream.engine.naming import is_gguf
from slipstream.engine.service.start.checkpoint_path import (
    chosen_file,
    local_checkpoint,
    model_name,
    run_dtype,
)
from tests.process import ROOT

LISTED = (
    *("README.md", "config.json", "mmproj-model-f16.gguf", "model-Q4_K_M.gguf", "model-UD-Q4_K_M.gguf"),
    *("model-Q8_0.gguf", "big/model-BF16-00001-of-00002.gguf", "big/model-BF16-00002-of-00002.gguf"),
)


@pytest.mark.parametrize(
    ("wanted", "file"),
    [
        (None, "model-Q4_K_M.gguf"),
        ("Q4_K_M", "model-Q4_K_M.gguf"),
        ("q8_0", "model-Q8_0.gguf"),
        ("UD-Q4_K_M", "model-UD-Q4_K_M.gguf"),
        ("BF16", "big/model-BF16-00001-of-00002.gguf"),
        ("model-Q8_0.gguf", "model-Q8_0.gguf"),
    ],
)
def test_which_file_of_a_repository(wanted: str | None, file: str) -> None:
    assert chosen_file("org/repo", wanted, LISTED) == file
    assert chosen_file("org/repo", wanted, LISTED[::-1]) == file


def test_a_repository_without_the_usual_quantisations() -> None:
    assert chosen_file("org/repo", None, ["b-Q6_K.gguf", "a-Q5_K.gguf"]) == "a-Q5_K.gguf"
    assert chosen_file("org/repo", None, ["b-Q8_0.gguf", "a-Q5_K.gguf"]) == "b-Q8_0.gguf"
    with pytest.raises(
        LoadError, match=r"org/repo: has no GGUF file 'Q9' for a model; it has a\.gguf, b\.gguf$"
    ):
        chosen_file("org/repo", "Q9", ["b.gguf", "a.gguf", "mmproj.gguf"])
    with pytest.raises(LoadError, match=r"org/repo: has no GGUF file for a model; it has none$"):
        chosen_file("org/repo", None, ["mmproj.gguf", "x.safetensors"])


@pytest.mark.parametrize(
    ("wanted", "file"),
    [
        (None, "m-Q8_0-00001-of-00002.gguf"),
        ("Q8_0", "m-Q8_0-00001-of-00002.gguf"),
        ("F16", "m-F16-00001-of-00002.gguf"),
        ("Q6_K", "m-Q6_K-00001-of-00002.gguf"),
        ("mtp-m-Q8_0.gguf", "mtp-m-Q8_0.gguf"),
        ("Q5_K_M", "mtp-m-Q5_K_M.gguf"),
    ],
)
def test_a_split_model_is_meant_rather_than_what_lies_beside_it(wanted: str | None, file: str) -> None:
    """Names of whole files are shorter."""
    split = ("Q8_0", "F16", "Q6_K")
    listed = [f"m-{kind}-0000{i}-of-00002.gguf" for kind in split for i in (1, 2)]
    listed += ["m.imatrix.gguf", "m.mmproj-f16.gguf", "m-BF16.gguf", "m-UD-Q6_K.gguf"]
    listed += ["mtp-m-Q8_0.gguf", "mtp-m-Q5_K_M.gguf", "m-eagle3-Q8_0.gguf"]
    assert chosen_file("org/repo", wanted, listed) == file


def test_a_model_may_have_the_name_of_the_statistics_that_it_was_quantised_by() -> None:
    listed = ["imatrix_of_m.gguf", "m-imatrix-Q4_K_M.gguf", "m-imatrix.gguf"]
    for wanted in (None, "Q4_K_M"):
        assert chosen_file("org/repo", wanted, listed) == "m-imatrix-Q4_K_M.gguf"
    with pytest.raises(LoadError, match=r"it has m-imatrix-Q4_K_M\.gguf$"):
        chosen_file("org/repo", "imatrix.gguf", listed)


def test_another_type_whose_name_ends_alike_is_not_meant() -> None:
    with pytest.raises(LoadError, match=r"has no GGUF file 'F16' for a model; it has m-BF16\.gguf$"):
        chosen_file("org/repo", "F16", ["m-BF16.gguf", "m.mmproj-f16.gguf"])
    assert chosen_file("org/repo", None, ["imatrix.gguf", "m-Q6_K.gguf"]) == "m-Q6_K.gguf"
    assert chosen_file("org/heads", "q8_0", ["m-eagle3-Q8_0.gguf"]) == "m-eagle3-Q8_0.gguf"


class Hub:
    """What the functions of huggingface_hub are asked for, and what they say."""

    def __init__(self, listed: tuple[str, ...]) -> None:
        self.listed, self.asked, self.taken = listed, list[Any](), list[str]()

    def model_info(self, repository: str, *, timeout: float) -> SimpleNamespace:
        assert timeout > 0
        if repository == "org/away":
            raise OSError("offline")
        if repository == "org/far":
            raise HTTPError("[Errno 111] Connection refused")
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=file) for file in self.listed])

    def snapshot_download(
        self,
        repository: str,
        *,
        allow_patterns: list[str],
        ignore_patterns: Sequence[str] = (),
        local_files_only: bool = False,
    ) -> str:
        if local_files_only:
            raise LocalEntryNotFoundError("nothing is here")
        patterns = {"allow_patterns": allow_patterns, "ignore_patterns": [*ignore_patterns]}
        self.taken = [*filter_repo_objects(self.listed, **patterns)]
        self.asked.append((repository, allow_patterns))
        return "/hub/snapshot"

    def hf_hub_download(self, repository: str, file: str, *, local_files_only: bool) -> str:
        assert not local_files_only
        self.asked.append((repository, file))
        return f"/hub/{file}"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    one = Hub(LISTED)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: one)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", one.snapshot_download)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", one.hf_hub_download)
    return one


@pytest.mark.parametrize(
    ("name", "path", "files"),
    [
        ("org/repo", "model-Q4_K_M.gguf", ["model-Q4_K_M.gguf"]),
        ("org/repo:Q8_0", "model-Q8_0.gguf", ["model-Q8_0.gguf"]),
        ("org/repo/model-Q8_0.gguf", "model-Q8_0.gguf", ["model-Q8_0.gguf"]),
        (
            "org/repo:BF16",
            "big/model-BF16-00001-of-00002.gguf",
            ["big/model-BF16-00001-of-00002.gguf", "big/model-BF16-00002-of-00002.gguf"],
        ),
    ],
)
def test_files_of_the_hub(hub: Hub, name: str, path: str, files: list[str]) -> None:
    assert local_checkpoint(name) == Path("/hub") / path
    assert hub.asked == [("org/repo", file) for file in files]


def test_repositories_with_safetensors(hub: Hub) -> None:
    """They are taken whole unless a GGUF file is asked for; so are those with neither, to be refused as folders."""
    hub.listed = (*LISTED, "model.safetensors")
    assert local_checkpoint("org/repo", ["*.json"]) == Path("/hub/snapshot")
    assert local_checkpoint("org/repo:Q8_0") == Path("/hub/model-Q8_0.gguf")
    hub.listed = ("README.md",)
    assert local_checkpoint("org/repo", ["*.json"]) == Path("/hub/snapshot")
    assert hub.asked == [
        ("org/repo", ["*.json"]),
        ("org/repo", "model-Q8_0.gguf"),
        ("org/repo", ["*.json"]),
    ]


READ = (
    *("config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
    *("model.safetensors.index.json", "chat_template.jinja", "tiktoken.model"),
    "additional_chat_templates/tool_use.jinja",
)


def test_copies_of_the_weights_are_left_at_the_hub(hub: Hub) -> None:
    below = ("original/model-00001-of-00001.safetensors", "original/config.json", "metal/model.bin")
    hub.listed = (*READ, *below, "consolidated.safetensors", "consolidated-00001-of-00002.safetensors")
    local_checkpoint("org/repo")
    assert hub.taken == [*READ]
    hub.listed = ("config.json", *below, "consolidated.safetensors")
    local_checkpoint("org/repo")
    assert hub.taken == ["config.json", "consolidated.safetensors"]
    hub.listed = ("model-Q8_0.gguf", *below)
    assert local_checkpoint("org/repo") == Path("/hub/model-Q8_0.gguf")


def test_a_repository_of_pickled_weights_alone_is_refused_before_it_is_fetched(hub: Hub) -> None:
    hub.listed = ("config.json", "pytorch_model.bin")
    with pytest.raises(LoadError, match=r"^org/repo: pytorch_model\.bin: only safetensors are read"):
        local_checkpoint("org/repo")
    assert not hub.asked
    for beside in ("model.safetensors", "model-Q4_K_M.gguf"):
        hub.listed = ("config.json", "training_args.bin", beside)
        local_checkpoint("org/repo")
    assert len(hub.asked) == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.gguf", "model.gguf: no such file"),
        ("/nowhere/model.gguf", "/nowhere/model.gguf: no such file"),
        ("./org/model.gguf", "./org/model.gguf: no such file"),
        ("~/model.gguf", "~/model.gguf: no such file"),
        ("a/b/c/model.gguf", "a/b/c/model.gguf: no such file"),
        ("a/b/c", "a/b/c: no such folder"),
        ("folder", "folder: no such folder"),
        ("org/away", "org/away: no such folder or file, and the hub did not give it: offline"),
        (
            "org/far:Q8_0",
            "org/far:Q8_0: no such folder or file, and the hub did not give it: [Errno 111] Connection refused",
        ),
        ("org/repo:Q3", "org/repo: has no GGUF file 'Q3' for a model; it has "),
    ],
)
def test_names_of_nothing(hub: Hub, name: str, message: str) -> None:
    with pytest.raises(LoadError) as caught:
        local_checkpoint(name)
    assert str(caught.value).startswith(message)
    assert not hub.asked


# --- without the network: what the hub's library itself finds in its cache ---

COMMIT = "0123456789" * 4


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of org/repo's local copy. The hub is a closed port."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    away = partial(huggingface_hub.HfApi, endpoint="http://127.0.0.1:1")
    monkeypatch.setattr(huggingface_hub, "HfApi", away)
    copy = tmp_path / "models--org--repo"
    folder = copy / "snapshots" / COMMIT
    for one in (folder, copy / "refs"):
        one.mkdir(parents=True)
    (copy / "refs" / "main").write_text(COMMIT)
    return folder


def put(folder: Path, *files: str) -> None:
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()


@pytest.mark.parametrize("is_switched_off", [False, True])
def test_without_the_network_the_local_copy_is_taken(
    cached: Path,
    is_switched_off: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", is_switched_off)
    put(cached, "config.json", "model.safetensors")
    assert local_checkpoint("org/repo") == cached
    reason = "offline mode is enabled" if is_switched_off else "Connection refused"
    assert reason in caplog.text
    assert f"the local copy is used: {cached}" in caplog.text


def test_without_the_network_a_gguf_file_of_the_local_copy_is_taken(cached: Path) -> None:
    put(cached, "m-Q6_K.gguf", "big/m-BF16-00001-of-00002.gguf", "big/m-BF16-00002-of-00002.gguf")
    assert local_checkpoint("org/repo/m-Q6_K.gguf") == cached / "m-Q6_K.gguf"
    assert local_checkpoint("org/repo:BF16") == cached / "big" / "m-BF16-00001-of-00002.gguf"
    put(cached, "m-Q8_0.gguf")
    assert local_checkpoint("org/repo") == cached / "m-Q8_0.gguf"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "org/repo:Q2_K",
            "has no GGUF file 'Q2_K' for a model; it has m-F16-00001-of-00002.gguf, m-Q8_0.gguf",
        ),
        ("org/repo:F16", "Cannot find the requested files in the disk cache"),
    ],
)
def test_a_local_copy_that_is_not_enough(cached: Path, name: str, told: str) -> None:
    put(cached, "m-Q8_0.gguf", "m-F16-00001-of-00002.gguf")
    with pytest.raises(
        LoadError, match=r"^org/repo: the hub cannot be asked \(.+\), and the local copy"
    ) as caught:
        local_checkpoint(name)
    assert told in str(caught.value)


def test_without_network_and_copy_nothing_is_found(cached: Path) -> None:
    with pytest.raises(
        LoadError, match=r"^org/other: no such folder or file, and the hub did not give it: \["
    ):
        local_checkpoint("org/other")


def test_a_folder_that_is_spelt_alike_is_suggested_for_a_hub_name(
    cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "demo" / "target").mkdir(parents=True)
    (tmp_path / "demo" / "target" / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LoadError, match=r"^demo/targt: no such folder .*; did you mean demo/target\?$"):
        local_checkpoint("demo/targt")


def test_what_is_here_is_taken(hub: Hub, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.touch()
    folder = tmp_path / "folder.gguf"
    folder.mkdir()
    for one in (path, folder, tmp_path):
        assert local_checkpoint(str(one)) == one
    assert [is_gguf(one) for one in (path, folder, tmp_path, Path("x.GGUF"))] == [True, False, False, True]
    assert not hub.asked


@pytest.mark.parametrize(
    ("path", "given", "name"),
    [
        ("/models/Qwen3-8B-Q4_K_M.gguf", "/models/Qwen3-8B-Q4_K_M.gguf", "Qwen3-8B-Q4_K_M"),
        ("/models/big-Q8_0-00001-of-00004.gguf", "org/big:Q8_0", "big-Q8_0"),
        ("/hub/models--org--name/snapshots/c0ffee", "org/name", "org/name"),
    ],
)
def test_names_that_clients_see(path: str, given: str, name: str) -> None:
    assert model_name(Path(path), given) == name


def test_folders_have_the_names_that_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a link, its own; of the folder where the server was started, the folder's; bytes that are no text, marked."""
    folder = tmp_path / "c0ffee"
    folder.mkdir()
    (tmp_path / "my-model").symlink_to(folder)
    (tmp_path / "\udcff").mkdir()
    monkeypatch.chdir(folder)
    assert model_name(Path("f\udcff.gguf"), "f\udcff.gguf") == "f\ufffd"
    for given, name in ((".", "c0ffee"), ("../my-model/", "my-model"), (str(tmp_path / "\udcff"), "\ufffd")):
        path = local_checkpoint(given)
        assert model_name(path, given) == name


@pytest.mark.parametrize(
    ("stored", "setting", "device", "runs"),
    [
        (torch.float16, "auto", "cpu", torch.bfloat16),
        (torch.float16, "float16", "cpu", torch.float16),
        (torch.float16, "auto", "cuda", torch.float16),
        (torch.float32, "auto", "cpu", torch.float32),
    ],
)
def test_what_a_checkpoint_runs_in(stored: torch.dtype, setting: str, device: str, runs: torch.dtype) -> None:
    """Not in float16 on a CPU unless it is asked for: no operator of the CPU's own takes it."""
    config = replace(read_model(ROOT / "demo" / "target"), dtype=stored)
    assert run_dtype(config, setting, torch.device(device)) is runs
