"""Inflated checkpoints compute the function of the small one, judged by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream.engine.models.reading.config import read_config
from slipstream.engine.text.tokenizer import Tokenizer
from tests.bench.inflate import inflate
from tests.bench.inflate_dense import Shape
from tests.checkpoints import tiny_checkpoint

DEMO = Path("demo/target")
BIG = {"hidden": 256, "layers": 7, "ffn": 160, "heads": 16, "kv_heads": 8, "vocab": 1000}
CASES: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "nothing": ("qwen3", {}, {}),
    "hidden": ("llama", {"hidden": 1024}, {}),
    "layers": ("qwen2", {"layers": 9}, {}),
    "ffn": ("llama", {"ffn": 300}, {}),
    "heads": ("qwen2", {"heads": 16, "kv_heads": 8}, {}),
    "smaller groups": ("llama", {"heads": 4, "kv_heads": 4}, {}),
    "larger groups": ("qwen3", {"heads": 12, "kv_heads": 3}, {}),
    "head_dim by 4": ("llama", {"head_dim": 64}, {}),
    "head_dim by 2": ("qwen3", {"head_dim": 64}, {}),
    "vocab": ("qwen2", {"hidden": 256, "vocab": 5000}, {}),
    "llama": ("llama", {**BIG, "head_dim": 64}, {}),
    "llama with biases": ("llama", BIG, {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", BIG, {}),
    "qwen2": ("qwen2", BIG, {}),
    "qwen3": ("qwen3", {**BIG, "head_dim": 128}, {}),
    "qwen3 with a large eps": ("qwen3", BIG, {"rms_norm_eps": 0.05}),
    "qwen3 with biases": ("qwen3", BIG, {"attention_bias": True}),
}


def logits(folder: Path, prompt: Tensor) -> Tensor:
    """What transformers computes in float32, [n_tokens, vocab]."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.inference_mode():
        result: Tensor = model(prompt[None]).logits[0]
    return result


def check(source: Path, target: Path, sizes: dict[str, int]) -> Shape:
    """Inflate and compare the logits of a random prompt; new tokens must be hopeless."""
    new = inflate(source, target, sizes)
    vocab = read_config(source).vocab_rows
    prompt = torch.randint(3, vocab, (90,), generator=torch.Generator().manual_seed(3))
    expected, found = logits(source, prompt), logits(target, prompt)
    assert found.shape == (90, new.vocab)
    assert (found[:, :vocab] - expected).abs().max() < 1e-4
    if new.vocab > vocab:
        assert found[:, vocab:].max() < expected.min() - 1000
    return new


@pytest.mark.sampled(keep=6)
@pytest.mark.parametrize(("family", "sizes", "changes"), CASES.values(), ids=CASES)
def test_same_function(tmp_path: Path, family: str, sizes: dict[str, int], changes: dict[str, Any]) -> None:
    source = tiny_checkpoint(family, tmp_path / "small", changes=changes)
    new = check(source, tmp_path / "big", sizes)
    config = read_config(tmp_path / "big")
    assert (config.d_model, config.n_layers, config.vocab_rows) == (new.hidden, new.layers, new.vocab)


def test_numbers_are_ordinary_in_bfloat16(tmp_path: Path) -> None:
    source = tiny_checkpoint("qwen3", tmp_path / "small", dtype=torch.bfloat16)
    check(source, tmp_path / "big", BIG)
    weights = load_file(tmp_path / "big" / "model.safetensors")
    for name, weight in weights.items():
        assert weight.dtype == torch.bfloat16, name
        size = weight.float().abs()
        assert size.isfinite().all(), name
        assert size[size > 0].numel() == 0 or size[size > 0].min() > 1e-20, name
        assert "k_proj" not in name or weight.float().std() > 0.01, name


def test_new_parts_are_not_zero(tmp_path: Path) -> None:
    """Zero matrices would be skipped or compressed by some engines, and measure nothing."""
    source = tiny_checkpoint("llama", tmp_path / "small")
    inflate(source, tmp_path / "big", BIG)
    weights = load_file(tmp_path / "big" / "model.safetensors")
    for place in range(BIG["layers"]):
        for part in (
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "mlp.gate_proj",
            "mlp.up_proj",
        ):
            last_row = weights[f"model.layers.{place}.{part}.weight"][-1]
            assert last_row.abs().min() > 0


def test_tokenizer_grows_without_changing_texts(tmp_path: Path) -> None:
    source = tiny_checkpoint("llama", tmp_path / "small")
    inflate(source, tmp_path / "big", BIG)
    small, big = Tokenizer(source), Tokenizer(tmp_path / "big")
    assert (small.vocab_size, big.vocab_size) == (384, 1000)
    for text in ("def add(left, right):", "unused 500", "<unused 500>", "漢字 😀<|im_end|>"):
        assert big.encode(text) == small.encode(text)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "big")) == 1000


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"hidden": 128}, "power of 4"),
        ({"layers": 2}, "below"),
        ({"heads": 6, "kv_heads": 4}, "multiple"),
        ({"heads": 8, "kv_heads": 2, "head_dim": 24}, "head_dim"),
        ({"head_dim": 32}, "head_dim"),
        ({"vocab": 1000}, "constant channel"),
        ({"heads": 12, "kv_heads": 2, "ffn": 1}, "below"),
    ],
)
def test_sizes_that_cannot_work_are_refused(tmp_path: Path, sizes: dict[str, int], reason: str) -> None:
    source = tiny_checkpoint("llama", tmp_path / "small")
    with pytest.raises(ValueError, match=reason):
        inflate(source, tmp_path / "big", sizes)


@pytest.mark.sampled
@pytest.mark.skipif(not (DEMO / "model.safetensors").exists(), reason="the demo checkpoint is not here")
def test_demo_target(tmp_path: Path) -> None:
    head_dim = json.loads((DEMO / "config.json").read_text())["head_dim"]
    sizes = {"hidden": 1024, "layers": 8, "ffn": 1024, "heads": 16, "kv_heads": 8, "vocab": 8192}
    check(DEMO, tmp_path, {**sizes, "head_dim": head_dim})
