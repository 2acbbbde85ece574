"""GGUF files of Gemma 4's variants: read as the folders they were made of, or refused by the file's own names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from slipstream.engine.checkpoint.gguf.files import GgufTensors, read_configs
from slipstream.engine.errors import CheckpointMismatch, LoadError, UnsupportedModel
from slipstream.engine.models.registry import read_model
from slipstream.kernels.matmul.quantized import widened
from tests.checkpoints import tiny_checkpoint
from tests.gguf_files import Blocks, Contents, gguf_of
from tests.gguf_tiny import refusal, tiny
from tests.oracle.test_gemma4 import VARIANTS
from tests.oracle.test_gguf import check_blocks, logits, same_parts

ABOUT = ("engine/checkpoint/gguf/*.py",)
pytestmark = pytest.mark.usefixtures("_selected")
Get = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder_for(tmp_path_factory: pytest.TempPathFactory) -> Get:
    """A variant's tiny checkpoint, made once."""
    made: dict[str, Path] = {}

    def get(variant: str) -> Path:
        if variant not in made:
            family, changes = VARIANTS[variant]
            made[variant] = tiny_checkpoint(family, tmp_path_factory.mktemp("made"), changes=changes)
        return made[variant]

    return get


@pytest.mark.sampled(keep=2)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_file_is_the_folder_it_was_made_of(folder_for: Get, tmp_path: Path, variant: str) -> None:
    folder = folder_for(variant)
    path = gguf_of(folder).write(tmp_path / "model.gguf")
    assert same_parts(path, folder)
    read, stored = GgufTensors(path), load_file(folder / "model.safetensors")
    assert {name for name in stored if name not in read.names} == {
        name for name in stored if name.endswith((".experts.gate_up_proj", ".experts.down_proj"))
    }
    for name in read.names & stored.keys():
        assert torch.equal(widened(read.read(name)), stored[name]), name
    assert torch.equal(logits(path), logits(folder))


@pytest.mark.sampled(keep=2)
@pytest.mark.parametrize("kind", ["Q8_0", "BF16"])
@pytest.mark.parametrize("variant", ["sparse", "keys as values"])
def test_narrow_types(folder_for: Get, tmp_path: Path, variant: str, kind: str) -> None:
    contents = gguf_of(folder_for(variant)).as_type(kind)
    if kind == "Q8_0":
        check_blocks(contents, tmp_path)
    else:
        path, wide = (
            one.write(tmp_path / f"{i}.gguf") for i, one in enumerate((contents, contents.widened()))
        )
        assert torch.equal(logits(path, torch.bfloat16), logits(wide, torch.bfloat16))


def test_inputs_of_layers_in_blocks(tmp_path: Path) -> None:
    """Wide enough for them: the table of all tokens and layers, and the matrices of each layer."""
    folder = tiny_checkpoint("gemma4", tmp_path / "folder", changes={"hidden_size_per_layer_input": 32})
    contents = gguf_of(folder).as_type("Q8_0")
    names = ("per_layer_token_embd", "per_layer_model_proj", "blk.5.inp_gate", "blk.5.proj")
    assert all(isinstance(contents.tensors[f"{name}.weight"], Blocks) for name in names)
    check_blocks(contents, tmp_path)


def test_gates_and_ups_in_stacks_of_their_own(folder_for: Get, tmp_path: Path) -> None:
    contents, changes = gguf_of(folder_for("sparse")), dict[str, Tensor | None]()
    for name, stack in contents.tensors.items():
        if name.endswith("ffn_gate_up_exps.weight"):
            gate, up = widened(stack).chunk(2, 1)  # [n_experts, d_ffn, d_model] each
            changes |= {name: None, name.replace("_up", ""): gate, name.replace("gate_", ""): up}
    path = contents.with_tensors(changes).write(tmp_path / "model.gguf")
    assert len(changes) == 3 * 6
    assert torch.equal(logits(path), logits(folder_for("sparse")))


def test_what_a_file_need_not_say(folder_for: Get, tmp_path: Path) -> None:
    contents = gguf_of(folder_for("uncapped"))
    keys = (".attention.shared_kv_layers", ".rope.freq_base_swa", ".rope.dimension_count_swa")
    path = contents.with_keys(dict.fromkeys(keys)).write(tmp_path / "model.gguf")
    assert same_parts(path, folder_for("uncapped"))


def test_which_layers_slide_is_heeded(folder_for: Get, tmp_path: Path) -> None:
    """Also where that fits every shape."""
    contents = gguf_of(folder_for("gemma4"))
    width = {f".attention.{one}_length_swa": 32 for one in ("key", "value")}
    keys = {".attention.sliding_window_pattern": [False, True] * 3, ".rope.dimension_count_swa": 32}
    path = contents.with_keys(keys | width).write(tmp_path / "model.gguf")
    assert read_model(path).windows == [None, 16] * 3
    contents = contents.with_keys({".attention.sliding_window_pattern": [False, True] * 3})
    message = refusal(contents.write(path), LoadError)
    assert "tensor blk.0.attn_q_norm.weight has shape [16], the config asks for [32]" in message


def test_no_frequency_stands_by_rounding(folder_for: Get, tmp_path: Path) -> None:
    """For some widths the nearest number to a share is a little below it."""
    for width, n_turning in ((32, 4), (44, 15), (46, 13), (78, 31), (64, 32)):
        keys = {
            f".{one}": width
            for one in ("attention.key_length", "attention.value_length", "rope.dimension_count")
        }
        divisors = torch.tensor([1.0] * n_turning + [1e30] * (width // 2 - n_turning))
        contents = gguf_of(folder_for("gemma4")).with_keys(keys).with_tensors({"rope_freqs.weight": divisors})
        config = read_configs(contents.write(tmp_path / "model.gguf"))[0]
        share = config["rope_parameters"]["full_attention"]["partial_rotary_factor"]
        assert int(share * width // 2) == n_turning
        assert share <= 1.0


ROPE_FREQS = "rope_freqs.weight must be 16 numbers, first ones, then 1e+30 for what does not turn"
REFUSED: list[tuple[str, Any, type[LoadError], str]] = [
    (".attention.sliding_window_pattern", None, LoadError, "sliding_window_pattern is missing"),
    (".attention.sliding_window_pattern", [True], UnsupportedModel, "must be a list of 6 values"),
    (".attention.sliding_window", None, LoadError, "gemma4.attention.sliding_window is missing"),
    (".attention.key_length_swa", None, LoadError, "gemma4.attention.key_length_swa is missing"),
    (".attention.value_length_swa", 8, UnsupportedModel, "= 8: must be attention.key_length_swa = 16"),
    (".attention.value_length", 16, UnsupportedModel, "= 16: must be attention.key_length = 32"),
    (".attention.head_count_kv", [1] * 5, UnsupportedModel, "must be a list of 6 whole numbers"),
    (".attention.head_count_kv", [1, -1] * 3, UnsupportedModel, "must be a list of 6 whole numbers"),
    (".attention.head_count_kv", [1, 1, 2, 1, 1, 1], UnsupportedModel, "layers of one kind must have the"),
    (".attention.head_count_kv", [1, 1, 1, 1, 1, 2], UnsupportedModel, "layers of one kind must have the"),
    (".attention.shared_kv_layers", 6, UnsupportedModel, "= 6: must be fewer than all 6 layers"),
    (".attention.shared_kv_layers", 5, UnsupportedModel, "feed_forward_length = [128"),
    (".attention.scale", 0.5, UnsupportedModel, "gemma4.attention.scale = 0.5: not supported"),
    (".feed_forward_length", [128] * 5 + [256], UnsupportedModel, "one number in the first 4 layers, and it"),
    (".feed_forward_length", [128] * 4 + [384] * 2, UnsupportedModel, "and it or twice it behind"),
    (".embedding_length_per_layer_input", None, LoadError, "embedding_length_per_layer_input is missing"),
    (".embedding_length_per_layer_input", 0, CheckpointMismatch, "unused: blk.0.inp_gate.weight"),
    (".rope.dimension_count", 16, UnsupportedModel, "= 16: must be the width of a head, 32"),
    (".rope.dimension_count_swa", 8, UnsupportedModel, "= 8: must be the width of a head, 16"),
    (".rope.scaling.factor", 8.0, UnsupportedModel, "gemma4.rope.scaling.factor = 8.0: not supported"),
    (".rope.scaling.type", "yarn", UnsupportedModel, "gemma4.rope.scaling.type = 'yarn': not supported"),
    (".expert_gating_func", 2, UnsupportedModel, "gemma4.expert_gating_func = 2: not supported"),
    (".expert_count", 8, LoadError, "gemma4.expert_used_count is missing"),
    ("rope_freqs.weight", None, LoadError, "tensor rope_freqs.weight is missing"),
    ("rope_freqs.weight", torch.ones(15), UnsupportedModel, ROPE_FREQS),
    ("rope_freqs.weight", torch.linspace(1, 8, 16), UnsupportedModel, ROPE_FREQS),
    ("rope_freqs.weight", torch.tensor([1e30] * 12 + [1.0] * 4), UnsupportedModel, ROPE_FREQS),
    ("rope_freqs.weight", torch.full((16,), 1e30), UnsupportedModel, ROPE_FREQS),
    ("rope_freqs.weight", torch.tensor([1.0] * 4 + [torch.nan] * 12), UnsupportedModel, ROPE_FREQS),
    ("per_layer_token_embd.weight", None, LoadError, "tensor per_layer_token_embd.weight is missing"),
    ("blk.2.layer_output_scale.weight", None, CheckpointMismatch, "missing: blk.2.layer_output_scale.weight"),
    ("blk.3.attn_v.weight", None, CheckpointMismatch, "missing: blk.3.attn_v.weight"),
]


@pytest.mark.sampled(keep=2)
@pytest.mark.parametrize(("name", "value", "error", "message"), REFUSED, ids=lambda one: str(one)[:40])
def test_files_that_lie_are_refused(
    folder_for: Get, tmp_path: Path, name: str, value: Any, error: type[LoadError], message: str
) -> None:
    contents: Contents = gguf_of(folder_for("gemma4"))
    change = contents.with_keys if name.startswith(".") else contents.with_tensors
    assert message in refusal(change({name: value}).write(tmp_path / "model.gguf"), error)


def test_stacks_of_experts_that_do_not_halve(folder_for: Get, tmp_path: Path) -> None:
    contents = gguf_of(folder_for("sparse"))
    odd = contents.with_tensors({"blk.1.ffn_gate_up_exps.weight": torch.ones(8, 65, 64)})
    message = refusal(odd.write(tmp_path / "model.gguf"), LoadError)
    assert "tensor blk.1.ffn_gate_up_exps.weight has 65 rows, must be an even number" in message
    lacking = contents.with_tensors({"blk.1.ffn_down_exps.scale": None}).write(tmp_path / "model.gguf")
    assert "missing: blk.1.ffn_down_exps.scale" in refusal(lacking, CheckpointMismatch)


@pytest.mark.parametrize(
    "key", [".attention.shared_kv_layers", ".embedding_length_per_layer_input", ".rope.dimension_count_swa"]
)
def test_other_architectures_refuse_the_same_keys(tmp_path: Path, key: str) -> None:
    path = tiny("gemma3", {key: 2}).write(tmp_path / "model.gguf")
    assert f"gemma3{key} = 2: not supported" in refusal(path, UnsupportedModel)
