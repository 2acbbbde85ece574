"""Quantised checkpoints against dense ones of the same values, and refusals by name.

Where products widen them, logits are the same bit for bit; products that keep them narrow round less.
"""

from __future__ import annotations

import itertools
import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.engine.errors import CheckpointMismatch, LoadError, UnsupportedModel
from slipstream.engine.models.blueprint import draw
from slipstream.engine.models.heads.mtp import load_mtp
from slipstream.engine.models.registry import load_network, read_model
from slipstream.engine.service.start.sizes import Checkpoint
from slipstream.kernels.dispatch import use
from slipstream.kernels.matmul import narrow as narrow_products
from slipstream.kernels.matmul.op import linear
from tests import quantised
from tests.checkpoints import tiny_checkpoint
from tests.head_checkpoints import add_tensors, mtp_deepseek
from tests.oracle.feeding import N_CTX, Runner, rows

ABOUT = ("engine/checkpoint/*.py",)
pytestmark = pytest.mark.usefixtures("_selected")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TEXT = [(7 * i + i * i) % 384 for i in range(20)]

CODINGS: dict[str, Callable[[], quantised.Coding]] = {
    "fp8": lambda: quantised.fp8((32, 64)),
    "fp8-across": lambda: quantised.fp8((48, 24)),  # the borders of blocks are not those of projections
    "fp8-whole": quantised.fp8_whole,
    "awq": lambda: quantised.awq(32),
    "awq-whole": lambda: quantised.awq(-1),
    "gptq": lambda: quantised.gptq(32, symmetric=True),
    "gptq-zeros": lambda: quantised.gptq(16, symmetric=False),
    "gptq-order": lambda: quantised.gptq(32, symmetric=False, shuffled=True),
    "gptq-v2": lambda: quantised.gptq(-1, symmetric=False, version="gptq_v2"),
    "fp8-whole-of-transformers": quantised.fp8_whole_of_transformers,
    "compressed": lambda: quantised.compressed_int4(32, symmetric=True),
    "compressed-whole": lambda: quantised.compressed_int4(-1, symmetric=True),
    "compressed-zeros": lambda: quantised.compressed_int4(16, symmetric=False),
    "compressed-order": lambda: quantised.compressed_int4(32, symmetric=True, shuffled=True),
    "compressed-fp8-whole": lambda: quantised.compressed_fp8("tensor"),
    "compressed-fp8": lambda: quantised.compressed_fp8("channel"),
    "compressed-fp8-block": lambda: quantised.compressed_fp8("block"),
    "int8": lambda: quantised.compressed_int8("channel"),
    "int8-whole": lambda: quantised.compressed_int8("tensor"),
    "int8-packed": lambda: quantised.compressed_int8("group", 32, packed=True),
    "int8-packed-rows": lambda: quantised.compressed_int8("channel", packed=True),
}


@pytest.fixture
def widens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products take the values as they are read, each rounded to the dtype."""
    monkeypatch.setattr(narrow_products, "refusal", lambda: "they are to be seen as they are read")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny checkpoint of a family, made once."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            made[family] = tiny_checkpoint(
                family, folder, changes={"num_hidden_layers": 2} if family == "qwen3" else {}
            )
        return made[family]

    return get


def logits(folder: Path, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of all rows of the text, [20, 384]."""
    runner = Runner(load_network(folder, dtype, CPU, N_CTX))
    return runner.feed(rows(0, TEXT, 0, len(TEXT)))


@pytest.mark.sampled(keep=5)
@pytest.mark.usefixtures("widens")
@pytest.mark.parametrize("name", CODINGS)
def test_logits_are_those_of_the_values(plain: Any, tmp_path: Path, name: str) -> None:
    narrow, dense = quantised.write_quantised(plain("qwen3"), tmp_path, CODINGS[name]())
    assert torch.equal(logits(narrow), logits(dense))
    assert torch.equal(logits(narrow, torch.bfloat16), logits(dense, torch.bfloat16))
    assert not torch.equal(logits(narrow), logits(plain("qwen3")))  # rounding was lossy, so it was read


@pytest.mark.sampled(keep=3)
@pytest.mark.parametrize(
    "name",
    ["fp8", "fp8-whole", "awq", "gptq-order", "compressed-fp8", "compressed-whole", "int8", "int8-packed"],
)
def test_products_that_keep_them_narrow_are_near(plain: Any, tmp_path: Path, name: str) -> None:
    narrow, dense = quantised.write_quantised(plain("qwen3"), tmp_path, CODINGS[name]())
    meant = logits(dense)
    assert float((logits(narrow) - meant).abs().max()) < 1e-5 * float(meant.std())
    assert not torch.equal(logits(narrow), meant)  # they were kept narrow
    off, of_dense = (float((logits(one, torch.bfloat16) - meant).abs().mean()) for one in (narrow, dense))
    assert off < 1.1 * of_dense


@pytest.mark.sampled(keep=5)
@pytest.mark.usefixtures("widens")
@pytest.mark.parametrize(
    ("family", "coding"),
    [
        *itertools.product(["qwen3_moe", "qwen3_5", "deepseek_v3", "gemma4"], ["fp8-across", "gptq-zeros"]),
        ("mimo_v2_flash", "fp8-across"),
        ("kimi_linear", "fp8-across"),  # four betas are no whole word of GPTQ's
    ],
)
def test_families_with_experts_and_with_split_projections(
    plain: Any, tmp_path: Path, family: str, coding: str
) -> None:
    narrow, dense = quantised.write_quantised(plain(family), tmp_path, CODINGS[coding]())
    assert torch.equal(logits(narrow), logits(dense))


@pytest.mark.usefixtures("widens")
def test_text_models_within_wrappers(plain: Any, tmp_path: Path) -> None:
    narrow, dense = quantised.write_quantised(plain("qwen3"), tmp_path, CODINGS["fp8"]())
    tensors = load_file(narrow / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): one for name, one in tensors.items()}
    save_file(renamed, narrow / "model.safetensors")
    assert torch.equal(logits(narrow), logits(dense))


@pytest.mark.sampled(keep=5)
@pytest.mark.usefixtures("widens")
@pytest.mark.parametrize(
    ("family", "coding", "changes"),
    [
        ("qwen2_5_vl", "awq", {"modules_to_not_convert": ["visual"]}),
        ("qwen3_vl", "gptq-zeros", {"dynamic": {"-:.*visual.*": {}}}),
        ("qwen3_vl", "fp8", {"modules_to_not_convert": ["lm_head", "model.visual.blocks.0.attn.qkv"]}),
        ("qwen3_vl", "compressed", {"ignore": ["lm_head", "re:.*visual.*"]}),
        ("mistral3 of ministral3", "fp8-whole-of-transformers", {}),
        ("mistral3", "compressed-fp8", {"ignore": ["re:.*lm_head", "re:.*vision_tower.*"]}),
    ],
)
def test_beside_a_tower_that_is_left_alone(
    plain: Any, tmp_path: Path, family: str, coding: str, changes: dict[str, Any]
) -> None:
    made = CODINGS[coding]()
    narrow, dense = quantised.write_quantised(
        plain(family), tmp_path, replace(made, config={**made.config, **changes})
    )
    assert torch.equal(logits(narrow), logits(dense))
    assert not torch.equal(logits(narrow), logits(plain(family)))
    told = draw(read_model(narrow), torch.bfloat16)
    assert told.weight_bytes < draw(read_model(dense), torch.bfloat16).weight_bytes
    read = load_network(narrow, torch.bfloat16, CPU, N_CTX)
    assert told.n_params == read.n_params


@pytest.mark.sampled(keep=5)
@pytest.mark.parametrize("name", ["fp8", "fp8-across", "awq", "gptq-order", "compressed-zeros", "int8"])
def test_sizes(plain: Any, tmp_path: Path, name: str) -> None:
    narrow, dense = quantised.write_quantised(plain("qwen3"), tmp_path, CODINGS[name]())
    config = read_model(narrow)
    loaded, twin = (load_network(path, torch.bfloat16, CPU, N_CTX) for path in (narrow, dense))
    assert loaded.n_params == twin.n_params
    fits = name not in ("fp8-across", "compressed-zeros")  # groups of 24 and 16 are widened on CPUs
    assert loaded.weight_bytes < twin.weight_bytes if fits else loaded.weight_bytes == twin.weight_bytes
    assert Checkpoint(narrow, config, CPU, torch.bfloat16).outline.weight_bytes == loaded.weight_bytes
    drawn, packed = (draw(config, torch.bfloat16, device) for device in (CPU, CUDA))
    assert (drawn.n_params, drawn.weight_bytes) == (loaded.n_params, loaded.weight_bytes)
    assert packed.n_params == loaded.n_params
    # Per layer: 128 + 64 + 64 and 2 x 128 outputs of 64 inputs, 64 outputs of 128 inputs twice.
    n_values = 2 * (512 * 64 + 2 * 64 * 128)
    n_scales = {
        "fp8": lambda n_out, n_in: n_out // 32 * (n_in // 64) * 4,
        "fp8-across": lambda n_out, n_in: (
            n_out * -(-n_in // 24) * 4 if n_in == 64 else 2 * -(-n_in // 24) * 4
        ),
        "awq": lambda n_out, n_in: n_out * (n_in // 32) * 5,
        "gptq-order": lambda n_out, n_in: n_out * (n_in // 32) * 5,
        "compressed-zeros": lambda n_out, n_in: n_out * (n_in // 16) * 5,
        "int8": lambda n_out, n_in: n_out * 4,
    }[name]
    each = 1 if name.startswith(("fp8", "int8")) else 0.5
    expected = each * n_values + 2 * (n_scales(256, 64) + n_scales(256, 64) + 2 * n_scales(64, 128))
    assert packed.weight_bytes - (twin.weight_bytes - 2 * n_values) == expected


@pytest.mark.sampled(keep=5)
@pytest.mark.parametrize("name", ["fp8", "awq", "fp8-across"])
def test_sizes_of_experts(plain: Any, tmp_path: Path, name: str) -> None:
    """They stay narrow on CPUs alone, where their groups fit; a plan says so without their weights."""
    narrow, dense = quantised.write_quantised(plain("qwen3_moe"), tmp_path, CODINGS[name]())
    loaded, twin = (load_network(path, torch.bfloat16, CPU, N_CTX) for path in (narrow, dense))
    drawn, on_cuda, wide = (
        draw(read_model(path), torch.bfloat16, device).weight_bytes
        for path, device in ((narrow, CPU), (narrow, CUDA), (dense, CUDA))
    )
    assert drawn == loaded.weight_bytes
    assert (drawn < twin.weight_bytes) == (name != "fp8-across")
    assert on_cuda < wide  # of attention alone


@pytest.mark.usefixtures("widens")
@pytest.mark.parametrize("name", ["fp8", "gptq"])
def test_mtp_layers_in_the_same_folder(plain: Any, tmp_path: Path, name: str) -> None:
    source = shutil.copytree(plain("qwen3"), tmp_path / "source")
    add_tensors(source, mtp_deepseek("model.layers.2.", 1, head_norms=True, d_head=32))
    narrow, dense = quantised.write_quantised(source, tmp_path, CODINGS[name]())
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(1))  # [n_rows, 2 * d_model]
    said = []
    for folder in (narrow, dense):
        head = load_mtp(folder, load_network(folder, torch.float32, CPU, N_CTX), N_CTX)
        said.append((linear(x, head.modules[0].joint), head.modules[0].block.ffn(x[:, :64])))
    for one, other in zip(said[0], said[1], strict=True):
        assert torch.equal(one, other)


def test_what_is_not_rounded_is_said(plain: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    narrow, _ = quantised.write_quantised(plain("qwen3"), tmp_path, CODINGS["fp8"]())
    with caplog.at_level(logging.INFO, "slipstream.engine.models.registry"):
        load_network(narrow, torch.float32, CPU, N_CTX)
    assert [record.getMessage() for record in caplog.records] == [
        f"quantised weights model={narrow} method=fp8",
        f"quantised weights model={narrow}: activations (dynamic fp8) are not rounded, only weights are read as stored",
    ]


Q = "model.layers.1.self_attn.q_proj"


def change(folder: Path, **changes: Any) -> Path:
    """Pieces of one matrix changed: a function of the tensor, None to leave it out."""
    tensors = load_file(folder / "model.safetensors")
    for piece, make in changes.items():
        stored = tensors.pop(f"{Q}.{piece}", None)
        if make is not None:
            tensors[f"{Q}.{piece}"] = make(stored)
    save_file({name: one.contiguous() for name, one in tensors.items()}, folder / "model.safetensors")
    return folder


def with_nan(tensor: Tensor) -> Tensor:
    tensor.view(torch.uint8).view(-1)[-1] = 0x7F  # of float8; of float16 its upper byte: 0x7F.. is no number
    return tensor


DAMAGED: dict[str, tuple[str, dict[str, Any], type[LoadError], str]] = {
    "no scales": ("awq", {"scales": None}, LoadError, f"{Q}.weight: has no scales"),
    "no zeros": ("gptq", {"qzeros": None}, LoadError, f"{Q}.weight: has no qzeros"),
    "no order": ("gptq-order", {"g_idx": None}, LoadError, f"{Q}.weight: has no g_idx"),
    "uneven": (
        "gptq-order",
        {"g_idx": torch.zeros_like},
        LoadError,
        "g_idx must name each of 2 groups 32 times",
    ),
    "shape": ("compressed", {"weight_shape": lambda one: one.flip(0)}, LoadError, r"says \[64, 128\]"),
    "groups": (
        "compressed",
        {"weight_scale": lambda one: one[:, :1]},
        LoadError,
        r"\[128, 1\], the config asks for",
    ),
    "scales": (
        "fp8-whole",
        {"weight_scale": lambda one: torch.ones(2)},
        LoadError,
        "one scale or one per output",
    ),
    "blocks": (
        "fp8",
        {"weight_scale_inv": lambda one: one[:1]},
        LoadError,
        r"\[1, 1\], the config asks for \[4, 1\]",
    ),
    "not finite": ("fp8", {"weight": with_nan}, LoadError, "not finite"),
    "scale not finite": (
        "awq",
        {"scales": with_nan},
        LoadError,
        f"{Q}.scales holds values that are not finite",
    ),
    "words": (
        "awq",
        {"qweight": lambda one: one.float()},
        UnsupportedModel,
        "qweight has dtype F32; only I32",
    ),
    "another": ("gptq", {"weight_packed": lambda _: torch.ones(1)}, LoadError, f"{Q}.weight_packed"),
    "bias": ("gptq", {"bias": torch.ones_like}, CheckpointMismatch, f"{Q}.bias"),
    "other": ("fp8", {"weight_scale_inv": None, "qweight": torch.ones_like}, LoadError, Q),
}


@pytest.mark.sampled(keep=5)
@pytest.mark.parametrize("case", DAMAGED)
def test_files_that_are_not_what_they_say(plain: Any, tmp_path: Path, case: str) -> None:
    name, changes, error, told = DAMAGED[case]
    narrow, _ = quantised.write_quantised(plain("qwen3"), tmp_path, CODINGS[name]())
    if case == "other":
        changes = {**changes, "qweight": lambda _: torch.ones(8, 128, dtype=torch.int32)}
    with pytest.raises(error, match=told):
        load_network(change(narrow, **changes), torch.float32, CPU, N_CTX)


def test_values_beyond_float16(plain: Any, tmp_path: Path) -> None:
    narrow, _ = quantised.write_quantised(plain("qwen3"), tmp_path, CODINGS["fp8"]())
    change(narrow, weight_scale_inv=lambda one: one * 1e6)
    load_network(narrow, torch.float32, CPU, N_CTX)
    with use("reference"), pytest.raises(LoadError, match=f"{Q}.weight does not fit float16"):
        load_network(narrow, torch.float16, CPU, N_CTX)


def test_without_a_config_they_are_refused(plain: Any, tmp_path: Path) -> None:
    narrow, dense = quantised.write_quantised(plain("qwen3"), tmp_path, CODINGS["gptq"]())
    shutil.copy(dense / "config.json", narrow / "config.json")
    with pytest.raises(UnsupportedModel, match=r"is quantised .* no quantization_config says how"):
        load_network(narrow, torch.float32, CPU, N_CTX)


def test_groups_that_do_not_come_out_even(plain: Any, tmp_path: Path) -> None:
    narrow, _ = quantised.write_quantised(plain("qwen3"), tmp_path, CODINGS["awq"]())
    config = json.loads((narrow / "config.json").read_text())
    config["quantization_config"]["group_size"] = 48
    (narrow / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="64 inputs are no multiple of group_size = 48"):
        load_network(narrow, torch.float32, CPU, N_CTX)
