"""GGUF files of Kimi-Linear, older ones too: read as the folder they were made of, or refused by their own names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from slipstream.engine.checkpoint.gguf.files import GgufTensors
from slipstream.engine.errors import LoadError, UnsupportedModel
from slipstream.kernels.matmul.quantized import widened
from tests.checkpoints import edited, tiny_checkpoint, with_config
from tests.gguf_files import Contents, gguf_of
from tests.gguf_tiny import refusal, tiny
from tests.oracle.test_gguf import check_blocks, logits, reversible, same_parts

pytestmark = pytest.mark.usefixtures("_selected")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint whose rates of decay a file can give back to the bit."""
    scratch = tmp_path_factory.mktemp("kimi")
    return edited(tiny_checkpoint("kimi_linear", scratch / "as_drawn"), scratch / "made", reversible)


@pytest.fixture(scope="module")
def contents(folder: Path) -> Contents:
    return gguf_of(folder)


def plain_name(name: str) -> str:
    """A tensor's name in transformers' own files -> that in the released ones."""
    for written, common in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        name = name.replace(f".{written}.", f".{common}.")
    return name.replace("block_sparse_moe", "mlp")


def test_every_tensor_comes_back(folder: Path, contents: Contents, tmp_path: Path) -> None:
    path = contents.write(tmp_path / "model.gguf")
    stored = {plain_name(name): one for name, one in load_file(folder / "model.safetensors").items()}
    read = GgufTensors(path)
    assert set(read.names) == stored.keys()
    for name, one in stored.items():
        assert torch.equal(widened(read.read(name)).view(one.shape), one), name
    assert same_parts(path, folder)
    assert torch.equal(logits(path), logits(folder))


def test_blocks(contents: Contents, tmp_path: Path) -> None:
    check_blocks(contents.as_type("Q8_0"), tmp_path)


def test_older_files(folder: Path, contents: Contents, tmp_path: Path) -> None:
    """Keys and values of heads joined, kernels and rates of decay of fewer dimensions."""
    joined = load_file(folder / "model.safetensors")["model.layers.2.self_attn.kv_b_proj.weight"]
    changes: dict[str, Tensor | None] = dict.fromkeys(f"blk.2.attn_{one}_b.weight" for one in ("k", "v"))
    changes["blk.2.attn_kv_b.weight"] = joined
    for name, one in contents.tensors.items():
        if "ssm_conv1d_" in name or name.endswith("ssm_a"):
            changes[name] = widened(one).squeeze()
    assert len(changes) == 3 + 3 * 4
    path = contents.with_tensors(changes).write(tmp_path / "model.gguf")
    assert torch.equal(logits(path), logits(folder))


def test_groups_and_the_scale_of_experts(folder: Path, contents: Contents, tmp_path: Path) -> None:
    groups = {".expert_group_count": 4, ".expert_group_used_count": 2}
    path = contents.with_keys(groups | {".expert_weights_scale": 1.5}).write(tmp_path / "model.gguf")
    changes = {"num_expert_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}
    assert same_parts(path, with_config(folder, tmp_path / "grouped", **changes))
    plain = with_config(folder, tmp_path / "plain", routed_scaling_factor=1.0)
    for value in (None, 0.0):  # 0 stands for none in llama.cpp
        path = contents.with_keys({".expert_weights_scale": value}).write(path)
        assert same_parts(path, plain)


def test_no_layer_has_a_rotation(folder: Path, contents: Contents, tmp_path: Path) -> None:
    """Whatever a file says of one."""
    scaled = {".rope.scaling.type": "yarn", ".rope.scaling.factor": 4.0, ".rope.freq_base": 5e5}
    path = contents.with_keys(scaled).write(tmp_path / "model.gguf")
    assert same_parts(path, folder)


REFUSED: list[tuple[str, Any, type[LoadError], str]] = [
    (".expert_gating_func", None, LoadError, "kimi-linear.expert_gating_func is missing"),
    (".expert_gating_func", 1, UnsupportedModel, "= 1: only 2, a sigmoid, is supported"),
    (
        ".expert_weights_norm",
        False,
        UnsupportedModel,
        "kimi-linear.expert_weights_norm = False: not supported",
    ),
    (".expert_shared_count", None, LoadError, "kimi-linear.expert_shared_count is missing"),
    (".expert_group_count", 3, UnsupportedModel, "must divide 8 experts into groups"),
    (".kda.head_dim", None, LoadError, "kimi-linear.kda.head_dim is missing"),
    (".kda.head_dim", 8, LoadError, "the config asks for [32"),
    (".ssm.conv_kernel", None, LoadError, "kimi-linear.ssm.conv_kernel is missing"),
    (".ssm.conv_kernel", 3, LoadError, "has shape [64, 1, 4], the config asks for [64, 1, 3]"),
    (".attention.head_count_kv", None, LoadError, "kimi-linear.attention.head_count_kv is missing"),
    (".attention.head_count_kv", [0, 0, 1], UnsupportedModel, "must be a list of 4 whole numbers"),
    (".attention.head_count_kv", [1, 0, 1, 0], LoadError, "blk.0.attn_q.weight has shape [64, 64]"),
    (".attention.sliding_window", 16, UnsupportedModel, "sliding_window = 16: not supported"),
    ("blk.0.ssm_a", torch.full((1, 1, 3, 1), -1.0), LoadError, "has shape [1, 1, 3, 1], the config asks for"),
    ("blk.0.ssm_a", torch.ones(1, 1, 4, 1), LoadError, "ssm_a holds values that are not finite"),
    ("blk.1.ssm_conv1d_k.weight", None, LoadError, "missing: blk.1.ssm_conv1d_k.weight"),
    (
        "blk.1.ssm_conv1d_k.weight",
        torch.ones(1, 48, 1, 4),
        LoadError,
        "has shape [48, 1, 4], the config asks",
    ),
]


@pytest.mark.parametrize(("name", "value", "error", "message"), REFUSED, ids=lambda one: str(one)[:40])
def test_files_that_lie_are_refused(
    contents: Contents, tmp_path: Path, name: str, value: Any, error: type[LoadError], message: str
) -> None:
    change = contents.with_keys if name.startswith(".") else contents.with_tensors
    path = change({name: value}).write(tmp_path / "model.gguf")
    with pytest.raises(error) as caught:
        logits(path)
    assert message in str(caught.value)
    assert type(caught.value) is error or error is LoadError


def test_other_architectures_refuse_widths_of_recurrent_heads(tmp_path: Path) -> None:
    path = tiny("llama", {".kda.head_dim": 16}).write(tmp_path / "model.gguf")
    assert "llama.kda.head_dim = 16: not supported" in refusal(path, UnsupportedModel)
