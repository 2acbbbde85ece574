"""gpt-oss against transformers: sinks, windows, clamped experts with biases, and experts stored as MXFP4."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from slipstream.engine.api import Sampling
from slipstream.engine.batch import Span
from slipstream.engine.checkpoint.weights import Weights
from slipstream.engine.errors import CheckpointMismatch, LoadError, UnsupportedModel
from slipstream.engine.layers.attention import Attention
from slipstream.engine.models.blueprint import draw
from slipstream.engine.models.registry import load_network, read_model
from slipstream.kernels.matmul import narrow as narrow_products
from slipstream.kernels.matmul.blocks import BlockWeight
from tests.checkpoints import N_PROMPT, Oracle, edited, noised_copy, theirs, with_config
from tests.oracle.feeding import (
    CPU,
    N_CTX,
    Windowed,
    compare_cuts,
    compare_greedy,
    compare_ragged,
    difference,
    loaded,
    rows,
)
from tests.oracle.lab import Bench, Case, Folders, Lab, Trouble, play

pytestmark = pytest.mark.usefixtures("_selected")
FULL, SLIDING = "full_attention", "sliding_attention"
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_oss": ("gpt_oss", {}),
    "gpt_oss, other numbers": (
        "gpt_oss",
        {
            "attention_bias": False,
            "layer_types": [FULL, SLIDING, SLIDING, FULL],
            "num_experts_per_tok": 3,
            "sliding_window": 13,
            "swiglu_alpha": 1.3,
            "swiglu_limit": 0.7,
        },
    ),
}
Tensors = dict[str, Tensor]


@pytest.mark.sampled(keep=2)
@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_whole_in_chunks_and_token_by_token(oracle: Callable[[str], Oracle], variant: str) -> None:
    folder, prompt, expected = oracle(variant)
    compare_cuts(Windowed(loaded(folder)), prompt, expected)


@pytest.mark.usefixtures("ops")
def test_ragged_spans_with_drafts_of_which_some_are_kept(oracle: Callable[[str], Oracle]) -> None:
    folder, prompt, expected = oracle("gpt_oss")
    compare_ragged(Windowed(loaded(folder)), prompt, expected, seed=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_rows_have_the_same_bits_in_every_cut(oracle: Callable[[str], Oracle], dtype: torch.dtype) -> None:
    folder, prompt, expected = oracle("gpt_oss")
    ids, runner = prompt.tolist(), Windowed(loaded(folder, dtype))
    whole = runner.feed_chunks(0, ids, [N_PROMPT])
    assert torch.equal(runner.feed_chunks(1, ids, [33, 1, 15, 2, 49]), whole)
    for start in range(0, N_PROMPT, 5):  # one certain token, four drafts that are kept, one that is not
        logits = runner.feed(Span(2, [*ids[start : start + 5], 7], start, 5, 6), n_kept=[4])
        assert torch.equal(logits[:5], whole[start : start + 5])
    runner.feed(rows(3, ids[::-1], 0, 60))
    beside = runner.feed(rows(3, ids[::-1], 60, 7), rows(4, ids, 0, 20))
    assert torch.equal(beside[7:], whole[:20])
    assert (whole - expected).abs().mean() < 0.1 * expected.std()


def test_norms_and_sinks_stay_float32(oracle: Callable[[str], Oracle]) -> None:
    """Norms are multiplied before the rounding; a sink is one of the scores."""
    folder, _, _ = oracle("gpt_oss")
    decoder, stored = loaded(folder, torch.bfloat16).decoder, load_file(folder / "model.safetensors")
    assert decoder.norm.weight.dtype == decoder.blocks[0].ffn_norm.weight.dtype == torch.float32
    for i, block in enumerate(decoder.blocks):
        assert isinstance(block.mixer, Attention)
        assert block.mixer.sinks is not None
        assert torch.equal(block.mixer.sinks, stored[f"model.layers.{i}.self_attn.sinks"])


def test_greedy_text(oracle: Callable[[str], Oracle]) -> None:
    folder, prompt, _ = oracle("gpt_oss")
    compare_greedy(Windowed, folder, prompt[:30], 64)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_text_is_that_of_plain_decoding(
    oracle: Callable[[str], Oracle], dtype: torch.dtype, tmp_path: Path
) -> None:
    """Through the engine: full and window pages run short, drafts are kept in part, prompts share prefixes."""
    folder, prompt, _ = oracle("gpt_oss")
    lab = Lab(Folders(folder, noised_copy(folder, tmp_path, 0.05)), dtype, n_ctx=N_CTX)
    ids = prompt.tolist()
    cases = [
        Case(tuple(ids[: 20 + 9 * i]), Sampling(seed=i, temperature=0.7 * (i % 2)), max_tokens=32)
        for i in range(4)
    ]
    expected = play(lab, Bench(), cases).tokens
    bench = Bench(("draft-model", "suffix"), n_slots=3, n_pages=18, n_window_pages=24, adaptive=False)
    played = play(lab, bench, cases, known=expected, trouble=Trouble(0.5))
    assert played.tokens == expected
    n_drafted = sum(one.speculation.n_drafted for one in played.done.values())
    n_accepted = sum(one.speculation.n_accepted for one in played.done.values())
    assert 0 < n_accepted < n_drafted


def test_config_of_the_released_files(oracle: Callable[[str], Oracle], tmp_path: Path) -> None:
    """Keys of transformers 4, and what is left to be assumed."""
    folder, prompt, expected = oracle("gpt_oss")
    config = json.loads((folder / "config.json").read_text())
    scaling = {key: value for key, value in config["rope_parameters"].items() if key != "rope_theta"}
    older: dict[str, Any] = {
        "rope_parameters": None,
        "rope_scaling": scaling,
        "rope_theta": 150000,
        "dtype": None,
        "torch_dtype": "float32",
        "layer_types": None,
        "attention_bias": None,
        "swiglu_alpha": None,
        "experts_per_token": 2,
        "initial_context_length": 64,
    }
    copy = with_config(folder, tmp_path / "older", **older)
    assert difference(Windowed(loaded(copy)).feed(rows(0, prompt.tolist(), 0, N_PROMPT)), expected) < 1e-4


def test_what_does_not_fit_is_refused(oracle: Callable[[str], Oracle], tmp_path: Path) -> None:
    folder, _, _ = oracle("gpt_oss")
    wrong: dict[str, Any] = {
        "num_experts_per_tok": 9,
        "swiglu_limit": 0,
        "swiglu_alpha": -1.0,
        "layer_types": ["chunked_attention"] * 4,
        "hidden_act": "gelu",
        "rope_parameters": None,
    }
    for key, value in wrong.items():
        with pytest.raises(UnsupportedModel, match=f"{key} = "):
            loaded(with_config(folder, tmp_path / key, **{key: value}))
    layer = "model.layers.1"
    for name in (
        "self_attn.sinks",
        "mlp.router.bias",
        "mlp.experts.down_proj_bias",
        "mlp.experts.gate_up_proj",
    ):
        copy = edited(folder, tmp_path / name, lambda all, name=name: all.pop(f"{layer}.{name}"))
        with pytest.raises(CheckpointMismatch, match=rf"missing: {layer}\.{name}"):
            loaded(copy)
    name = f"{layer}.mlp.experts.gate_up_proj"
    copy = edited(
        folder, tmp_path / "turned", lambda all: all.update({name: all[name].transpose(1, 2).contiguous()})
    )
    with pytest.raises(LoadError, match=r"gate_up_proj has shape \[8, 128, 64\].*asks for \[8, 64, 128\]"):
        loaded(copy)


FP4 = [sign * value for sign in (1, -1) for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]


def as_mxfp4(matrices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[E, in, out] float32 -> (blocks [E, out, in / 32, 16], scales [E, out, in / 32], the values [E, in, out])."""
    blocks = matrices.transpose(1, 2).unflatten(-1, (-1, 32))  # [E, out, in / 32, 32]
    exponents = (blocks.abs().amax(-1) / 6).log2().ceil().clamp(-127, 127)  # [E, out, in / 32]
    factors = torch.tensor([math.ldexp(1.0, int(one)) for one in exponents.flatten()]).view_as(exponents)
    table = torch.tensor(FP4)
    codes = (blocks / factors[..., None])[..., None].sub(table).abs().argmin(-1)  # [E, out, in / 32, 32]
    values = (table[codes] * factors[..., None]).flatten(-2).transpose(1, 2)
    pairs = codes[..., 0::2] + 16 * codes[..., 1::2]
    return pairs.to(torch.uint8), (exponents + 127).to(torch.uint8), values.contiguous()


def write_mxfp4(source: Path, folder: Path) -> tuple[Path, Path]:
    """(copy with narrow experts, its dense twin)."""
    narrow, dense = folder / "narrow", folder / "dense"
    tensors = load_file(source / "model.safetensors")
    codes, values = dict(tensors), dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales, values[name] = as_mxfp4(codes.pop(name))
        codes.update({f"{name}_blocks": blocks, f"{name}_scales": scales})
    keep = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config = {"quant_method": "mxfp4", "modules_to_not_convert": keep}
    for path, held, more in ((narrow, codes, {"quantization_config": config}), (dense, values, {})):
        shutil.copytree(source, path)
        save_file(held, path / "model.safetensors")
        read = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**read, **more}))
    return narrow, dense


@pytest.fixture(scope="module")
def twins(oracle: Callable[[str], Oracle], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_mxfp4(oracle("gpt_oss")[0], tmp_path_factory.mktemp("mxfp4"))


def logits(folder: Path, prompt: Tensor, dtype: torch.dtype) -> Tensor:
    return Windowed(loaded(folder, dtype)).feed(rows(0, prompt.tolist(), 0, N_PROMPT))


@pytest.mark.sampled(keep=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_mxfp4_has_the_logits_of_its_values(
    oracle: Callable[[str], Oracle],
    twins: tuple[Path, Path],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, prompt, plain = oracle("gpt_oss")
    narrow, dense = (logits(folder, prompt, dtype) for folder in twins)
    apart = (narrow - dense).abs().amax(1)  # [n_rows]
    if dtype == torch.float32:
        assert float(apart.max()) < 1e-5
    else:  # of values no rounding is left, of sums some is; a router that it turns to another expert moves its row far
        assert float(apart.quantile(0.97)) < 0.05
    monkeypatch.setattr(narrow_products, "refusal", lambda: "they are to be seen as they are read")
    assert torch.equal(logits(twins[0], prompt, dtype), dense)
    assert difference(narrow, plain) > 0.01  # rounding was lossy, so the codes were read
    if dtype == torch.float32:
        with torch.inference_mode():
            assert difference(narrow, theirs(twins[1])(prompt[None]).logits[0]) < 1e-4


def test_every_code_and_exponent_of_mxfp4(twins: tuple[Path, Path], tmp_path: Path) -> None:
    """Against transformers' reading."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(8, 4, 1, 1)  # all pairs of codes
    scales = torch.arange(8 * 4 * 16).remainder(253).to(torch.uint8).view(8, 4, 16)  # 6 * 2^125 at most
    save_file({"experts.x_blocks": blocks, "experts.x_scales": scales}, tmp_path / "model.safetensors")
    weights = Weights(tmp_path, torch.float32, CPU, read_model(twins[0]).quantization)
    found = weights.take_linear(["experts.x"], 512, [32])
    weights.finish()
    assert isinstance(found, BlockWeight)
    meant = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # [8, 512, 4]
    assert torch.equal(found.dense().view(8, 4, 512).transpose(1, 2), meant)


def test_sizes_of_mxfp4(twins: tuple[Path, Path]) -> None:
    narrow, dense = (load_network(folder, torch.bfloat16, CPU, N_CTX) for folder in twins)
    assert narrow.n_params == dense.n_params
    assert narrow.weight_bytes < dense.weight_bytes / 2
    for device, read in ((CPU, narrow), (torch.device("cuda"), dense)):  # widened but on CPUs
        drawn = draw(read_model(twins[0]), torch.bfloat16, device)
        assert (drawn.n_params, drawn.needs) == (narrow.n_params, narrow.needs)
        assert drawn.weight_bytes == pytest.approx(read.weight_bytes, rel=0.01)  # sinks are float32
    drawn, twin = (draw(read_model(folder), torch.bfloat16, torch.device("cuda")) for folder in twins)
    assert drawn.weight_bytes == twin.weight_bytes


def test_broken_mxfp4_is_refused(twins: tuple[Path, Path], tmp_path: Path) -> None:
    name = "model.layers.2.mlp.experts.down_proj"

    def refused(error: type[Exception], message: str, change: Callable[[Tensors], Any], **keys: Any) -> None:
        copy = edited(twins[0], tmp_path / str(len(list(tmp_path.iterdir()))), change)
        config = {**json.loads((copy / "config.json").read_text()), **keys}
        (copy / "config.json").write_text(json.dumps(config))
        with pytest.raises(error, match=message):
            loaded(copy)

    blocks, scales = f"{name}_blocks", f"{name}_scales"
    refused(LoadError, "down_proj.weight: has no scales", lambda all: all.pop(scales))
    refused(
        CheckpointMismatch, "missing: .*down_proj.*unused: .*down_proj_scales", lambda all: all.pop(blocks)
    )
    refused(
        LoadError,
        r"config asks for 512 outputs of 64 inputs",
        lambda all: all.update({blocks: all[blocks][:4]}),
    )
    refused(
        LoadError,
        r"with scales \[8, 64, 1\]",
        lambda all: all.update({scales: all[scales][..., :1].contiguous()}),
    )
    refused(
        UnsupportedModel,
        "down_proj_scales has dtype F32; only U8",
        lambda all: all.update({scales: all[scales].float()}),
    )
    refused(LoadError, "not finite", lambda all: all[scales].fill_(255))
    refused(LoadError, "no quantization_config says how", lambda all: None, quantization_config=None)
    refused(LoadError, "does not fit float32", lambda all: all[scales][3].fill_(127 + 126))  # 6 * 2^126
    other = {"quant_method": "awq", "bits": 4, "group_size": 32}
    refused(UnsupportedModel, "not how awq stores", lambda all: None, quantization_config=other)
