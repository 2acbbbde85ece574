"""GGUF files of Step-3.5-Flash: read as the folder they were made of, or refused by their own names."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from slipstream.engine.checkpoint.gguf.files import GgufTensors
from slipstream.engine.errors import CheckpointMismatch, LoadError, UnsupportedModel
from slipstream.engine.models.families.step3p5 import block
from slipstream.engine.models.heads.mtp import load_mtp
from slipstream.engine.models.registry import read_model
from slipstream.engine.service.start.draft_network import draft_source
from slipstream.engine.service.start.sizes import Checkpoint
from slipstream.kernels.matmul.quantized import widened
from tests.checkpoints import with_config
from tests.gguf_files import gguf_of
from tests.gguf_tiny import refusal, tiny
from tests.oracle.gguf_rounds import Made, joined, loaded, made, model_alone, nextn_alone, said
from tests.oracle.head_rounds import CPU, N_CTX
from tests.oracle.test_gguf import logits, same_parts

ABOUT = ("engine/checkpoint/gguf/*.py",)
pytestmark = pytest.mark.usefixtures("_selected")
N_LAYERS, N_ALL = 5, 8


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return made("step", tmp_path_factory.mktemp("step"))


def plain_tensors(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of a released checkpoint, the parts of experts under other families' names, each expert's apart."""
    ours = {
        "moe.gate.": "mlp.gate.",
        "moe.router_bias": "mlp.gate.e_score_correction_bias",
        "share_expert": "mlp.shared_experts",
    }
    found: dict[str, Tensor] = {}
    for name, one in stored.items():
        for released, common in ours.items():
            name = name.replace(f".{released}", f".{common}")
        if (match := re.fullmatch(r"(.*)\.moe\.(\w+_proj)\.weight", name)) is not None:
            found |= {f"{match[1]}.mlp.experts.{i}.{match[2]}.weight": each for i, each in enumerate(one)}
        else:
            found[name] = one
    return found


def test_every_tensor_comes_back(step: Made, tmp_path: Path) -> None:
    """Norms as what a row is multiplied by, which is all that a file has of them."""
    path = step.contents.write(tmp_path / "model.gguf")
    stored, read = plain_tensors(load_file(step.folder / "model.safetensors")), GgufTensors(path)
    assert set(read.names) == stored.keys()
    for name, one in stored.items():
        added = 1.0 if name.endswith("norm.weight") else 0.0
        assert torch.equal(added + widened(read.read(name)), added + one), name
    assert torch.equal(logits(path), logits(step.folder))


def test_the_parts_are_the_folders(step: Made, tmp_path: Path) -> None:
    """Without the stretched rotation, which a file has as divisors."""
    plain = with_config(step.folder, tmp_path / "plain", rope_scaling=None, tie_word_embeddings=False)
    contents = gguf_of(plain)
    path = contents.write(tmp_path / "plain.gguf")
    assert "rope_freqs.weight" in step.contents.tensors
    assert "rope_freqs.weight" not in contents.tensors
    assert same_parts(path, plain)
    assert torch.equal(logits(path), logits(plain))
    assert (logits(plain) - logits(step.folder)).abs().max() > 0.01
    for i in range(N_ALL):
        assert block(read_model(path), i) == block(read_model(plain), i)


def test_full_layers_alone_are_stretched(step: Made, tmp_path: Path) -> None:
    path = step.contents.write(tmp_path / "model.gguf")
    mixers = [block(read_model(path), i).mixer for i in range(N_ALL)]
    ropes = [(one.rope.kind, one.rope.n_dims, one.rope.theta) for one in mixers if one.rope]
    full, sliding = ("divided", 8, 5e5), ("default", 16, 1e4)
    assert ropes == [full, sliding, sliding, sliding, full, sliding, sliding, sliding]
    divisors = mixers[0].rope.divisors  # type: ignore[union-attr]
    stored = step.contents.tensors["rope_freqs.weight"]
    assert isinstance(stored, Tensor)
    assert torch.equal(torch.tensor(divisors), stored[:4])
    assert stored[4:].tolist() == [1.0] * 4
    assert 1.0 < divisors[-1] <= 2.0


def test_a_model_without_them(step: Made, tmp_path: Path) -> None:
    """Also where the metadata says that there are some, in another file, which then drafts for it."""
    alone = model_alone(step.contents)
    promised = replace(step.contents, tensors=alone.tensors)
    head = nextn_alone(step.contents).write(tmp_path / "mtp.gguf")
    for one in (alone, promised):
        path = one.write(tmp_path / "model.gguf")
        assert torch.equal(logits(path), logits(step.folder))
        assert draft_source(None, Checkpoint(path, read_model(path), CPU, torch.float32)) is None
    expected = said(load_mtp(step.folder, loaded(step.folder), N_CTX))
    assert torch.equal(said(load_mtp(head, loaded(path), N_CTX)), expected)


def test_a_head_for_a_model_that_says_nothing_of_it_is_refused(step: Made, tmp_path: Path) -> None:
    """What kinds of layers it has stands in the metadata of the model."""
    path = model_alone(step.contents).write(tmp_path / "model.gguf")
    head = nextn_alone(step.contents).write(tmp_path / "mtp.gguf")
    with pytest.raises(
        UnsupportedModel, match=r"model\.gguf: mtp_layer_types .* does not say what layer 5 is"
    ):
        load_mtp(head, loaded(path), N_CTX)


def values(path: Path) -> dict[str, Any]:
    """Of the config as its family reads it."""
    return dict(read_model(path).fields.values)


def test_what_a_file_need_not_say(step: Made, tmp_path: Path) -> None:
    keys = (".expert_gating_func", ".leading_dense_block_count", ".moe_every_n_layers")
    path = step.contents.with_keys(dict.fromkeys(keys)).write(tmp_path / "model.gguf")
    assert torch.equal(logits(path), logits(step.folder))
    for value in (None, 0.0):  # 0 stands for none in llama.cpp
        path = step.contents.with_keys({".expert_weights_scale": value}).write(path)
        assert values(path)["moe_router_scaling_factor"] == 1.0
    path = step.contents.with_keys({".rope.freq_base_swa": None}).write(path)
    assert values(path)["rope_parameters"]["sliding_attention"]["rope_theta"] == 1e4


def test_how_much_of_a_head_turns(step: Made, tmp_path: Path) -> None:
    """Half of what a file says in full layers, all of it in others."""
    unscaled = step.contents.with_tensors({"rope_freqs.weight": None})
    for keys, expected in (
        ({".rope.dimension_count": 12}, (6, 12)),
        ({".rope.dimension_count": 12, ".rope.dimension_count_swa": 4}, (6, 4)),
        ({".rope.dimension_count_swa": 10}, (8, 10)),
    ):
        path = unscaled.with_keys(keys).write(tmp_path / "model.gguf")
        ropes = [block(read_model(path), i).mixer.rope for i in (0, 1)]
        assert tuple(one.n_dims for one in ropes if one) == expected


def test_limits(step: Made, tmp_path: Path) -> None:
    """One for all layers, or none; what is nearly nought is none in llama.cpp."""
    keys = {".swiglu_clamp_exp": 0.5, ".swiglu_clamp_shexp": None}
    path = step.contents.with_keys(keys).write(tmp_path / "model.gguf")
    assert values(path)["swiglu_limits"] == [0.5] * N_ALL
    assert values(path)["swiglu_limits_shared"] is None
    keys = {".swiglu_clamp_exp": [1e-7, 1e-6, 0.7, 0.0, 1.0, 0.0, 0.0, 2.0], ".swiglu_clamp_shexp": 0}
    path = step.contents.with_keys(keys).write(tmp_path / "model.gguf")
    assert values(path)["swiglu_limits"] == [0.0, 0.0, 0.7, 0.0, 1.0, 0.0, 0.0, 2.0]
    assert values(path)["swiglu_limits_shared"] == [0.0] * N_ALL


PATTERN, HEADS = ".attention.sliding_window_pattern", ".attention.head_count"
REFUSED: list[tuple[str, Any, type[LoadError], str]] = [
    (PATTERN, None, LoadError, "step35.attention.sliding_window_pattern is missing"),
    (PATTERN, [False] * 5, UnsupportedModel, "must be a list of 8 values"),
    (PATTERN, [True, False] * 4, UnsupportedModel, "layers of one kind must have the same number"),
    (HEADS, [4, 6, 6, 6, 4], UnsupportedModel, "must be a list of 8 whole numbers"),
    (HEADS, [4, 6, 6, 6, 4, 6, 6, 2], UnsupportedModel, "layers of one kind must have the same number"),
    (HEADS, [6, 4, 4, 4, 6, 4, 4, 4], LoadError, "has shape"),
    (
        HEADS,
        [4, 5, 5, 5, 4, 5, 5, 5],
        UnsupportedModel,
        "num_sliding_attention_heads = 5: must be a multiple of",
    ),
    (".attention.head_count_kv", None, LoadError, "step35.attention.head_count_kv is missing"),
    (
        ".attention.head_count_kv",
        [2, 1] * 4,
        UnsupportedModel,
        "layers of different shapes are not supported",
    ),
    (".attention.value_length", 8, UnsupportedModel, "= 8: must be attention.key_length = 16"),
    (".attention.value_length_swa", 8, UnsupportedModel, "value_length_swa = 8: not supported"),
    (".attention.sliding_window", None, LoadError, "step35.attention.sliding_window is missing"),
    (
        ".attention.sliding_window",
        0,
        UnsupportedModel,
        "sliding_window = 0: must be a whole number of at least 1",
    ),
    (".attention.value_scale", 0.5, UnsupportedModel, "step35.attention.value_scale = 0.5: not supported"),
    (".rope.dimension_count", 14, UnsupportedModel, "rope_freqs.weight has 8 numbers, must have 7"),
    (".rope.dimension_count_swa", 18, UnsupportedModel, "rope_freqs.weight has 8 numbers, must have 9"),
    (".rope.scaling.type", "yarn", UnsupportedModel, "step35.rope.scaling.type = 'yarn': not supported"),
    (".rope.scaling.factor", 2.0, UnsupportedModel, "step35.rope.scaling.factor = 2.0: not supported"),
    (".expert_gating_func", 1, UnsupportedModel, "= 1: only 2, a sigmoid, is supported"),
    (".expert_weights_norm", None, UnsupportedModel, "step35.expert_weights_norm = None: only true"),
    (".expert_weights_norm", False, UnsupportedModel, "step35.expert_weights_norm = False: only true"),
    (".expert_weights_scale", -1.0, UnsupportedModel, "moe_router_scaling_factor = -1.0: must be above 0"),
    (".expert_group_count", 4, UnsupportedModel, "step35.expert_group_count = 4: not supported"),
    (".expert_shared_feed_forward_length", None, LoadError, "expert_shared_feed_forward_length is missing"),
    (".swiglu_clamp_exp", [0.5] * 5, UnsupportedModel, "must be a list of 8 finite numbers"),
    (".swiglu_clamp_exp", [0.5] * 7 + [-1.0], UnsupportedModel, "must be numbers of at least 0"),
    (".swiglu_clamp_exp", [0.5] * 7 + [torch.inf], UnsupportedModel, "must be a list of 8 finite numbers"),
    (
        ".swiglu_clamp_shexp",
        "all",
        UnsupportedModel,
        "step35.swiglu_clamp_shexp = 'all': must be a finite number",
    ),
    (".nextn_predict_layers", 9, UnsupportedModel, "num_hidden_layers = -1: must be a whole number"),
    ("rope_freqs.weight", torch.ones(4), UnsupportedModel, "rope_freqs.weight has 4 numbers, must have 8"),
    ("rope_freqs.weight", torch.zeros(8), UnsupportedModel, "must be 4 numbers above 0"),
    ("blk.1.attn_gate.weight", None, CheckpointMismatch, "missing: blk.1.attn_gate.weight"),
    (
        "blk.1.attn_gate.weight",
        torch.ones(4, 64),
        LoadError,
        "has shape [4, 64], the config asks for [6, 64]",
    ),
    ("blk.2.attn_q_norm.weight", None, CheckpointMismatch, "missing: blk.2.attn_q_norm.weight"),
    ("blk.1.exp_probs_b.bias", None, CheckpointMismatch, "missing: blk.1.exp_probs_b.bias"),
    ("blk.1.ffn_up_shexp.weight", None, CheckpointMismatch, "missing: blk.1.ffn_up_shexp.weight"),
    ("blk.1.ffn_gate_inp.weight", None, CheckpointMismatch, "missing: blk.1.ffn_down.weight"),
]


@pytest.mark.sampled(keep=2)
@pytest.mark.parametrize(("name", "value", "error", "message"), REFUSED, ids=lambda one: str(one)[:40])
def test_files_that_lie_are_refused(
    step: Made, tmp_path: Path, name: str, value: Any, error: type[LoadError], message: str
) -> None:
    change = step.contents.with_keys if name.startswith(".") else step.contents.with_tensors
    assert message in refusal(change({name: value}).write(tmp_path / "model.gguf"), error)


@pytest.mark.parametrize("n_rows", [64, 65, 159])
def test_joint_projections_that_are_no_heads(step: Made, tmp_path: Path, n_rows: int) -> None:
    changes = {"blk.1.attn_qkv.weight": torch.ones(n_rows, 64)}
    path = joined(step.contents).with_tensors(changes).write(tmp_path / "model.gguf")
    assert "tensor blk.1.attn_qkv.weight has shape [" in refusal(path, LoadError)
    if n_rows <= 64:
        with pytest.raises(LoadError, match="has 64 rows, of which 64 are keys and values"):
            GgufTensors(path).read("model.layers.1.self_attn.k_proj.weight")


@pytest.mark.parametrize("name", ["nextn.hnorm", "nextn.shared_head_norm", "ffn_norm"])
def test_layers_of_prediction_that_lack_something(step: Made, tmp_path: Path, name: str) -> None:
    path = nextn_alone(step.contents).with_tensors({f"blk.6.{name}.weight": None}).write(tmp_path / "m.gguf")
    with pytest.raises(LoadError, match=r"m\.gguf: "):
        load_mtp(path, loaded(step.folder), N_CTX)


@pytest.mark.parametrize("key", [".swiglu_clamp_exp", ".rope.dimension_count_swa"])
def test_other_architectures_refuse_the_same_keys(tmp_path: Path, key: str) -> None:
    path = tiny("llama", {key: 2}).write(tmp_path / "model.gguf")
    assert f"llama{key} = 2: not supported" in refusal(path, UnsupportedModel)
