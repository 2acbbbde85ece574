"""Reading safetensors: every tensor once, and a readable refusal of everything else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from slipstream.engine.checkpoint.safetensors_folder import INDEX, SINGLE
from slipstream.engine.checkpoint.weights import Weights
from slipstream.engine.errors import CheckpointMismatch, LoadError, UnsupportedModel

CPU = torch.device("cpu")
TENSORS = {"a.weight": torch.arange(6.0).reshape(2, 3), "b.weight": torch.ones(4), "c.bias": torch.zeros(0)}


def written(folder: Path, tensors: dict[str, Tensor] | None = None) -> Path:
    """A folder with one file of tensors."""
    save_file(TENSORS if tensors is None else tensors, folder / SINGLE)
    return folder


def sharded(folder: Path, weight_map: object) -> Path:
    """A folder with two shards and an index."""
    save_file({"a.weight": TENSORS["a.weight"]}, folder / "one.safetensors")
    save_file({"b.weight": TENSORS["b.weight"], "extra": torch.ones(1)}, folder / "two.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


GOOD_MAP = {"a.weight": "one.safetensors", "b.weight": "two.safetensors"}


def test_single_file(tmp_path: Path) -> None:
    weights = Weights(written(tmp_path), torch.float64, CPU)
    a = weights.take("a.weight", [2, 3])
    assert a.dtype == torch.float64
    assert torch.equal(a, TENSORS["a.weight"].double())
    weights.take("b.weight", [4])
    weights.take("c.bias", [0])
    weights.finish()
    assert weights.n_params == 10


def test_tensors_outlive_their_file(tmp_path: Path) -> None:
    weights = Weights(written(tmp_path), torch.float32, CPU)
    a = weights.take("a.weight", [2, 3])
    with (tmp_path / SINGLE).open("r+b") as file:
        file.seek(-48, 2)
        file.write(b"\xff" * 48)
    assert torch.equal(a, TENSORS["a.weight"])


def test_shards_and_what_the_index_does_not_list(tmp_path: Path) -> None:
    weights = Weights(sharded(tmp_path, GOOD_MAP), torch.float32, CPU)
    assert torch.equal(weights.take("a.weight", [2, 3]), TENSORS["a.weight"])
    weights.take("b.weight", [4])
    weights.finish()  # "extra" is in a shard and not in the index


def test_missing_and_unused_are_named_together(tmp_path: Path) -> None:
    weights = Weights(written(tmp_path), torch.float32, CPU)
    weights.take("a.weight", [2, 3])
    assert weights.take("x.weight", [7]).shape == (7,)
    with pytest.raises(CheckpointMismatch) as caught:
        weights.finish()
    assert caught.value.missing == ("x.weight",)
    assert caught.value.unused == ("b.weight", "c.bias")
    assert "x.weight" in str(caught.value)
    assert "b.weight" in str(caught.value)


def take_many(weights: Weights) -> None:
    """Ask for far more tensors than there are."""
    for i in range(100_000):
        weights.take(f"layer.{i}", [1])


def test_a_hopeless_folder_is_given_up_early(tmp_path: Path) -> None:
    weights = Weights(written(tmp_path), torch.float32, CPU)
    with pytest.raises(CheckpointMismatch):
        take_many(weights)


def test_wrong_shape_names_both(tmp_path: Path) -> None:
    weights = Weights(written(tmp_path), torch.float32, CPU)
    with pytest.raises(LoadError, match=r"a\.weight has shape \[2, 3\].*asks for \[3, 2\]"):
        weights.take("a.weight", [3, 2])


def test_computed_tensors_are_ignored(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    Weights(written(tmp_path, {name: torch.ones(2)}), torch.float32, CPU).finish()


def test_repeated_tensor_counts_only_if_equal(tmp_path: Path) -> None:
    weights = Weights(written(tmp_path, {"head": torch.ones(3)}), torch.float32, CPU)
    weights.drop_copy("other", torch.ones(3))
    weights.drop_copy("head", torch.zeros(3))
    with pytest.raises(CheckpointMismatch, match="unused: head"):
        weights.finish()
    weights = Weights(tmp_path, torch.float32, CPU)
    weights.drop_copy("head", torch.ones(3))
    weights.finish()


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_quantised_weights_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    weights = Weights(written(tmp_path, {"q": torch.zeros(4).to(dtype)}), torch.float32, CPU)
    with pytest.raises(UnsupportedModel, match="tensor q has dtype"):
        weights.take("q", [4])


def test_what_float16_cannot_hold_is_refused(tmp_path: Path) -> None:
    weights = Weights(written(tmp_path, {"big": torch.full((2,), 1e6)}), torch.float16, CPU)
    with pytest.raises(LoadError, match="big does not fit float16"):
        weights.take("big", [2])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_that_are_no_numbers_are_refused(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    weights = Weights(written(tmp_path, {"broken": torch.tensor([1.0, value, 2.0])}), dtype, CPU)
    with pytest.raises(LoadError, match="tensor broken holds values that are not finite"):
        weights.take("broken", [3])


def test_wrappers_for_several_media_are_read_as_their_text_model(tmp_path: Path) -> None:
    """Under one canonical name each; towers for images and sound are left alone, anything else is not."""
    tensors = {
        "model.language_model.norm.weight": torch.ones(1),
        "language_model.model.layers.0.x": torch.ones(2),
        "language_model.lm_head.weight": torch.ones(3),
        "model.visual.blocks.0.weight": torch.ones(4),
        "vision_tower.a": torch.ones(5),
        "multi_modal_projector.b": torch.ones(6),
    }
    weights = Weights(written(tmp_path, tensors), torch.float32, CPU)
    assert "model.norm.weight" in weights
    assert weights.shape("model.layers.0.x") == (2,)
    for i, name in enumerate(("model.norm.weight", "model.layers.0.x", "lm_head.weight")):
        weights.take(name, [i + 1])
    weights.finish()
    weights = Weights(written(tmp_path, {**tensors, "visualised": torch.ones(1)}), torch.float32, CPU)
    with pytest.raises(CheckpointMismatch, match=r"unused: .*visualised"):
        weights.finish()


def test_a_text_model_under_two_prefixes_is_refused(tmp_path: Path) -> None:
    twice = {"model.norm.weight": torch.ones(1), "language_model.model.norm.weight": torch.ones(1)}
    with pytest.raises(LoadError, match="twice"):
        Weights(written(tmp_path, twice), torch.float32, CPU)


@pytest.mark.parametrize(
    "file",
    [
        "../one.safetensors",
        "/etc/passwd",
        "sub/one.safetensors",
        "..",
        "",
        ".",
        "a\\b.safetensors",
        "pytorch_model.bin",
        3,
        None,
    ],
)
def test_index_may_not_leave_the_folder(tmp_path: Path, file: object) -> None:
    with pytest.raises(LoadError, match=r"tensor a\.weight is said to be in .*folder itself"):
        Weights(sharded(tmp_path, {"a.weight": file}), torch.float32, CPU)


@pytest.mark.parametrize("weight_map", [None, {}, [], "x"])
def test_index_without_a_map_is_refused(tmp_path: Path, weight_map: object) -> None:
    with pytest.raises(LoadError, match="weight_map"):
        Weights(sharded(tmp_path, weight_map), torch.float32, CPU)


def test_index_naming_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"three\.safetensors: no such file"):
        Weights(sharded(tmp_path, {"a.weight": "three.safetensors"}), torch.float32, CPU)
    with pytest.raises(LoadError, match=r"two\.safetensors: has no tensor a\.weight"):
        Weights(sharded(tmp_path, {"a.weight": "two.safetensors"}), torch.float32, CPU)


@pytest.mark.parametrize("n_bytes", [0, 4, 8, 40, -1, -30, -39])
def test_truncated_file_names_file_and_tensor(tmp_path: Path, n_bytes: int) -> None:
    path = written(tmp_path) / SINGLE
    data = path.read_bytes()
    path.write_bytes(data[:n_bytes])
    with pytest.raises(LoadError, match=SINGLE) as caught:
        Weights(tmp_path, torch.float32, CPU)
    assert "\n" not in str(caught.value)
    if n_bytes < 0:
        first_cut = "b.weight" if n_bytes > -17 else "a.weight"
        assert f"truncated: tensor {first_cut}" in str(caught.value)


@pytest.mark.parametrize("header", [b"{", b"[]", b'{"a": 3}', b'{"a": {"dtype": "F32"}}', b"\xff" * 9])
def test_bad_header_is_refused(tmp_path: Path, header: bytes) -> None:
    (tmp_path / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(LoadError, match=SINGLE):
        Weights(tmp_path, torch.float32, CPU)


@pytest.mark.parametrize(
    "offsets", [[[0, 16], [8, 24]], [[0, 16], [32, 48]], [[0, 16], [16, 2**63]], [[0, 8], [8, 24]]]
)
def test_tensors_that_overlap_or_leave_the_file_are_refused(tmp_path: Path, offsets: list[list[int]]) -> None:
    tensors = zip("ab", offsets, strict=True)
    header = json.dumps(
        {name: {"dtype": "F32", "shape": [4], "data_offsets": one} for name, one in tensors}
    ).encode()
    (tmp_path / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(32))
    with pytest.raises(LoadError, match=SINGLE):
        Weights(tmp_path, torch.float32, CPU)


def test_a_header_of_boundless_length_is_refused(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes((2**63 - 1).to_bytes(8, "little") + b"{}")
    with pytest.raises(LoadError, match=SINGLE):
        Weights(tmp_path, torch.float32, CPU)


def test_pickled_weights_are_refused_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(LoadError, match=r"pytorch_model\.bin.*save_pretrained.*draft head.*save_file"):
        Weights(tmp_path, torch.float32, CPU)


def test_folders_without_weights(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="neither"):
        Weights(tmp_path, torch.float32, CPU)
    with pytest.raises(LoadError, match="no such folder"):
        Weights(tmp_path / "x", torch.float32, CPU)
