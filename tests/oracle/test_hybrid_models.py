"""Networks with gated-delta layers against transformers: however a text is cut into spans, the logits are the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from slipstream.engine.batch import Span
from slipstream.engine.errors import CheckpointMismatch, LoadError, UnsupportedModel
from tests.checkpoints import N_PROMPT, Oracle, edited, with_config, write_tokenizer
from tests.oracle.feeding import (
    Runner,
    compare_cuts,
    compare_greedy,
    compare_ragged,
    difference,
    loaded,
    rows,
)

pytestmark = pytest.mark.usefixtures("_selected")
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5", {}),
    "qwen3_5, tied": ("qwen3_5", {"tie_word_embeddings": True, "linear_conv_kernel_dim": 3}),
    "qwen3_5, one key head": ("qwen3_5", {"linear_num_key_heads": 1, "linear_value_head_dim": 24}),
    "qwen3_5_moe": ("qwen3_5_moe", {}),
    "qwen3_next": ("qwen3_next", {}),
    "kimi_linear": ("kimi_linear", {}),
    "qwen3_next, some dense": ("qwen3_next", {"mlp_only_layers": [1], "norm_topk_prob": False}),
}


@pytest.mark.sampled(keep=5)
@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_whole_in_chunks_and_token_by_token(oracle: Callable[[str], Oracle], variant: str) -> None:
    folder, prompt, expected = oracle(variant)
    compare_cuts(Runner(loaded(folder)), prompt, expected)


@pytest.mark.sampled(keep=5)
@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("variant", VARIANTS)
def test_ragged_spans_with_drafts_of_which_some_are_kept(
    oracle: Callable[[str], Oracle], variant: str
) -> None:
    folder, prompt, expected = oracle(variant)
    compare_ragged(Runner(loaded(folder)), prompt, expected, seed=2)


@pytest.mark.sampled(keep=6)
@pytest.mark.parametrize("variant", ["qwen3_5", "qwen3_next", "kimi_linear"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_cut_gives_the_same_bits(
    oracle: Callable[[str], Oracle], variant: str, dtype: torch.dtype
) -> None:
    folder, prompt, _ = oracle(variant)
    ids, runner = prompt.tolist(), Runner(loaded(folder, dtype))
    whole = runner.feed_chunks(0, ids, [N_PROMPT])
    assert torch.equal(runner.feed_chunks(1, ids, [33, 1, 15, 2, 49]), whole)
    for start in range(0, N_PROMPT, 5):  # one certain token, four drafts that are kept, one that is not
        logits = runner.feed(Span(2, [*ids[start : start + 5], 7], start, 5, 6), n_kept=[4])
        assert torch.equal(logits[:5], whole[start : start + 5])


@pytest.mark.sampled(keep=6)
@pytest.mark.parametrize("variant", ["qwen3_5", "kimi_linear"])
def test_greedy_text(oracle: Callable[[str], Oracle], variant: str) -> None:
    folder, prompt, _ = oracle(variant)
    compare_greedy(Runner, folder, prompt[:30])


@pytest.mark.parametrize("variant", ["qwen3_5", "qwen3_5_moe", "qwen3_next", "kimi_linear"])
def test_bfloat16_is_near(oracle: Callable[[str], Oracle], variant: str) -> None:
    folder, prompt, expected = oracle(variant)
    coarse = Runner(loaded(folder, torch.bfloat16)).feed_chunks(0, prompt.tolist(), [N_PROMPT])
    error = (coarse - expected).abs()
    assert error.mean() < 0.1 * expected.std()


def test_wrapper_checkpoint(oracle: Callable[[str], Oracle], tmp_path: Path) -> None:
    """The released files: text keys under `text_config`, other names, a vision tower that is left alone."""
    folder, prompt, expected = oracle("qwen3_5")
    text = json.loads((folder / "config.json").read_text())
    vision = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 16,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64, "num_position_embeddings": 16,
    }  # fmt: skip
    config = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=False)
    model = Qwen3_5ForConditionalGeneration(config)
    names = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    found = model.load_state_dict(names, strict=False)
    assert not found.unexpected_keys
    assert all(name.startswith("model.visual.") for name in found.missing_keys)
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    assert any(name.startswith("model.visual.") for name in load_file(tmp_path / "model.safetensors"))
    network = loaded(tmp_path)
    assert network.config.architecture == "Qwen3_5ForConditionalGeneration"
    assert difference(Runner(network).feed(rows(0, prompt.tolist(), 0, N_PROMPT)), expected) < 1e-4


def test_what_does_not_fit_is_refused(oracle: Callable[[str], Oracle], tmp_path: Path) -> None:
    folder, _, _ = oracle("qwen3_5")

    def changed(name: str, **changes: Any) -> Path:
        copy = edited(folder, tmp_path / name, lambda all: None)
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps({**config, **changes}))
        return copy

    with pytest.raises(UnsupportedModel, match="layer_types"):
        loaded(changed("1", layer_types=["full_attention"] * 3 + ["sliding_attention"]))
    with pytest.raises(UnsupportedModel, match="linear_num_value_heads"):
        loaded(changed("2", linear_num_value_heads=3))
    with pytest.raises(UnsupportedModel, match="attn_output_gate"):
        loaded(changed("3", attn_output_gate=False))
    experts = with_config(oracle("qwen3_5_moe")[0], tmp_path / "6", norm_topk_prob=False)
    with pytest.raises(UnsupportedModel, match="norm_topk_prob = false: must be true"):
        loaded(experts)
    with pytest.raises(LoadError, match=r"conv1d\.weight has shape"):
        loaded(changed("4", linear_conv_kernel_dim=5))
    name = "model.layers.0.linear_attn.A_log"
    with pytest.raises(CheckpointMismatch, match=r"missing: model\.layers\.0\.linear_attn\.A_log"):
        loaded(edited(folder, tmp_path / "5", lambda all: all.pop(name)))


def test_norms_are_one_plus_but_for_the_one_within(oracle: Callable[[str], Oracle], tmp_path: Path) -> None:
    """Without its stored norms, which are what is added to 1, a network would compute something else."""
    folder, prompt, expected = oracle("qwen3_5")

    def shift(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith("layernorm.weight"):
                tensor.add_(1.0)

    logits = Runner(loaded(edited(folder, tmp_path / "1", shift))).feed(rows(0, prompt.tolist(), 0, N_PROMPT))
    assert difference(logits, expected) > 0.1
