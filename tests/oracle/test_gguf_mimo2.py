"""GGUF files of MiMo-V2-Flash: read as the folder they were made of, or refused by their own names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from slipstream.engine.checkpoint.gguf.files import GgufTensors
from slipstream.engine.errors import CheckpointMismatch, LoadError, UnsupportedModel
from slipstream.engine.layers.attention import AttentionSpec
from slipstream.engine.models.heads.mtp import load_mtp
from slipstream.engine.models.registry import decoder_spec, read_model
from slipstream.engine.service.start.draft_network import draft_source
from slipstream.engine.service.start.sizes import Checkpoint
from slipstream.kernels.matmul.quantized import widened
from tests.gguf_tiny import refusal, tiny
from tests.oracle.gguf_rounds import Made, joined, loaded, made, model_alone, nextn_alone
from tests.oracle.head_rounds import CPU, N_CTX, VOCAB
from tests.oracle.test_gguf import logits, same_parts

pytestmark = pytest.mark.usefixtures("_selected")


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return made("mimo", tmp_path_factory.mktemp("mimo"))


def test_every_tensor_comes_back(mimo: Made, tmp_path: Path) -> None:
    path, stored = mimo.contents.write(tmp_path / "model.gguf"), load_file(mimo.folder / "model.safetensors")
    read = GgufTensors(path)
    assert set(read.names) == stored.keys()
    for name, one in stored.items():
        assert torch.equal(widened(read.read(name)), one), name
    assert same_parts(path, mimo.folder)
    assert torch.equal(logits(path), logits(mimo.folder))


def test_a_model_without_them(mimo: Made, tmp_path: Path) -> None:
    """Also where the metadata says that there are some, in another file."""
    alone = model_alone(mimo.contents)
    promised = replace(mimo.contents, tensors=alone.tensors)
    for one in (alone, promised):
        path = one.write(tmp_path / "model.gguf")
        assert same_parts(path, mimo.folder)
        assert torch.equal(logits(path), logits(mimo.folder))
        assert draft_source(None, Checkpoint(path, read_model(path), CPU, torch.float32)) is None


def specs(path: Path) -> list[AttentionSpec]:
    """The attention of every layer."""
    found = [one.mixer for one in decoder_spec(read_model(path), N_CTX, VOCAB).blocks]
    assert all(isinstance(one, AttentionSpec) for one in found)
    return found  # type: ignore[return-value]


def test_the_window_is_the_folders(mimo: Made, tmp_path: Path) -> None:
    """A file has the released config's number, to which transformers adds a row's own position."""
    path = mimo.contents.write(tmp_path / "model.gguf")
    assert mimo.contents.metadata["mimo2.attention.sliding_window"] == 16
    released = mimo.contents.with_keys({".attention.sliding_window": 128}).write(tmp_path / "released.gguf")
    assert {one.window for one in specs(mimo.folder)} == {one.window for one in specs(path)} == {None, 17}
    assert {one.window for one in specs(released)} == {None, 129}


def test_what_a_file_need_not_say(mimo: Made, tmp_path: Path) -> None:
    keys = (".expert_gating_func", ".expert_group_count", ".expert_group_used_count")
    path = mimo.contents.with_keys(dict.fromkeys(keys)).write(tmp_path / "model.gguf")
    assert same_parts(path, mimo.folder)
    for value in (None, 0.0, 1.0):
        path = mimo.contents.with_keys({".attention.value_scale": value}).write(tmp_path / "model.gguf")
        assert {one.value_scale for one in specs(path)} == {None}
    path = mimo.contents.with_keys({".rope.freq_base_swa": None}).write(tmp_path / "model.gguf")
    assert {one.rope.theta for one in specs(path) if one.window and one.rope} == {1e4}


def test_which_layers_have_sinks(mimo: Made, tmp_path: Path) -> None:
    """All of a kind, or none."""
    moved = dict[str, Tensor | None]()
    for i in range(9):
        moved[f"blk.{i}.attn_sinks.weight"] = torch.ones(4) if i in (0, 3) else None
    path = mimo.contents.with_tensors(moved).write(tmp_path / "model.gguf")
    assert [one.sinks for one in specs(path)] == [*("attention_sink_bias", None, None)] * 2
    assert torch.isfinite(logits(path)).all()


PATTERN, KV = ".attention.sliding_window_pattern", ".attention.head_count_kv"
REFUSED: list[tuple[str, Any, type[LoadError], str]] = [
    (PATTERN, None, LoadError, "mimo2.attention.sliding_window_pattern is missing"),
    (PATTERN, [0, 1, 1, 0, 1, 1], UnsupportedModel, "must be a list of 9 values"),
    (PATTERN, [0, 1, 1, 0, 1, 1, 1, 1, 0], UnsupportedModel, "layers of prediction must have a window"),
    (PATTERN, [1, 0, 1, 0, 1, 1, 1, 1, 1], UnsupportedModel, "layers of one kind must have the same number"),
    (KV, [1, 2, 2, 1, 2, 2], UnsupportedModel, "must be a list of 9 whole numbers"),
    (KV, [1, 2, 2, 1, 2, 2, 2, 2, 4], UnsupportedModel, "layers of one kind must have the same number"),
    (KV, [2, 1, 1, 2, 1, 1, 1, 1, 1], LoadError, "attn_k.weight has shape"),
    (KV, [1, 3, 3, 1, 3, 3, 3, 3, 3], UnsupportedModel, "swa_num_key_value_heads = 3: 3 must divide 4"),
    (
        ".attention.head_count",
        [4] * 8 + [2],
        UnsupportedModel,
        "layers of different shapes are not supported",
    ),
    (".attention.sliding_window", None, LoadError, "mimo2.attention.sliding_window is missing"),
    (".attention.sliding_window", 0, UnsupportedModel, "mimo2.attention.sliding_window = 0: must be above 0"),
    (
        ".attention.value_length",
        32,
        UnsupportedModel,
        "32 must be at most the width of keys, 24",
    ),
    (".attention.value_length", 8, LoadError, "attn_v.weight has shape"),
    (".attention.key_length_swa", 16, UnsupportedModel, "key_length_swa = 16: not supported"),
    (".attention.value_length_swa", 8, UnsupportedModel, "value_length_swa = 8: not supported"),
    (".attention.value_scale", -0.5, UnsupportedModel, "value_scale = -0.5: must be at least 0"),
    (".attention.value_scale", "half", UnsupportedModel, "value_scale = 'half': must be a finite number"),
    (".rope.dimension_count", 7, UnsupportedModel, "7 rotated dimensions, must be even"),
    (".rope.dimension_count", 26, UnsupportedModel, "partial_rotary_factor = "),
    (".rope.dimension_count_swa", 4, UnsupportedModel, "rope.dimension_count_swa = 4: not supported"),
    (".rope.scaling.type", "yarn", UnsupportedModel, "mimo2.rope.scaling.type = 'yarn': not supported"),
    (".rope.scaling.factor", 4.0, UnsupportedModel, "mimo2.rope.scaling.factor = 4.0: not supported"),
    (".expert_gating_func", 1, UnsupportedModel, "= 1: only 2, a sigmoid, is supported"),
    (".expert_weights_norm", False, UnsupportedModel, "mimo2.expert_weights_norm = False: not supported"),
    (".expert_weights_scale", 2.5, UnsupportedModel, "mimo2.expert_weights_scale = 2.5: not supported"),
    (".expert_group_count", 4, UnsupportedModel, "mimo2.expert_group_count = 4: not supported"),
    (".expert_used_count", None, LoadError, "mimo2.expert_used_count is missing"),
    (".swiglu_clamp_exp", [7.0] * 9, UnsupportedModel, "mimo2.swiglu_clamp_exp = [7.0, "),
    (".nextn_predict_layers", 10, UnsupportedModel, "num_hidden_layers = -1: must be a whole number"),
    (".nextn_predict_layers", 2, CheckpointMismatch, "unused: blk.6.layer_output_norm.weight, blk.6.nextn"),
    ("rope_freqs.weight", torch.ones(4), CheckpointMismatch, "unused: rope_freqs.weight"),
    ("blk.1.attn_sinks.weight", None, CheckpointMismatch, "missing: blk.1.attn_sinks.weight"),
    ("blk.0.attn_sinks.weight", torch.ones(4), CheckpointMismatch, "missing: blk.3.attn_sinks.weight"),
    ("blk.1.exp_probs_b.bias", None, CheckpointMismatch, "missing: blk.1.exp_probs_b.bias"),
    ("blk.1.ffn_gate_inp.weight", None, CheckpointMismatch, "missing: blk.1.ffn_down.weight"),
    (
        "blk.2.attn_k.weight",
        None,
        CheckpointMismatch,
        "missing: blk.2.attn_k.weight or blk.2.attn_qkv.weight",
    ),
]


@pytest.mark.parametrize(("name", "value", "error", "message"), REFUSED, ids=lambda one: str(one)[:40])
def test_files_that_lie_are_refused(
    mimo: Made, tmp_path: Path, name: str, value: Any, error: type[LoadError], message: str
) -> None:
    change = mimo.contents.with_keys if name.startswith(".") else mimo.contents.with_tensors
    assert message in refusal(change({name: value}).write(tmp_path / "model.gguf"), error)


@pytest.mark.parametrize("n_rows", [64, 63, 97, 1])
def test_joint_projections_that_are_no_heads(mimo: Made, tmp_path: Path, n_rows: int) -> None:
    changes = {"blk.1.attn_qkv.weight": torch.ones(n_rows, 64)}
    path = joined(mimo.contents).with_tensors(changes).write(tmp_path / "model.gguf")
    message = refusal(path, LoadError)
    assert f"tensor blk.1.attn_qkv.weight has shape [{n_rows}, 64], the config asks for" in message
    with pytest.raises(
        LoadError, match=rf"has {n_rows} rows, of which 96 are queries: the rest are no heads"
    ):
        GgufTensors(path).read("model.layers.1.self_attn.k_proj.weight")


@pytest.mark.parametrize("name", ["nextn.hnorm", "layer_output_norm", "ffn_norm", "attn_sinks"])
def test_layers_of_prediction_that_lack_something(mimo: Made, tmp_path: Path, name: str) -> None:
    path = nextn_alone(mimo.contents).with_tensors({f"blk.7.{name}.weight": None}).write(tmp_path / "m.gguf")
    with pytest.raises(CheckpointMismatch, match=r"m\.gguf: missing: model\.mtp\.layers\.1\."):
        load_mtp(path, loaded(mimo.folder), N_CTX)


def test_a_head_of_its_own_is_not_passed_over(mimo: Made, tmp_path: Path) -> None:
    """llama.cpp would use it; its layers share the model's in every released file."""
    own = {"blk.6.nextn.shared_head_head.weight": torch.ones(384, 64)}
    path = mimo.contents.with_tensors(own).write(tmp_path / "model.gguf")
    assert "unused: blk.6.nextn.shared_head_head.weight" in refusal(path, CheckpointMismatch)


@pytest.mark.parametrize(
    "key", [".attention.value_scale", ".attention.key_length_swa", ".swiglu_clamp_shexp"]
)
def test_other_architectures_refuse_the_same_keys(tmp_path: Path, key: str) -> None:
    path = tiny("llama", {key: 2.5}).write(tmp_path / "model.gguf")
    assert f"llama{key} = 2.5: not supported" in refusal(path, UnsupportedModel)
