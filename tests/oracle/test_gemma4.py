"""Gemma 4 against transformers: heads of two widths, inputs of each layer, shared keys and values."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Gemma4Config, Gemma4ForConditionalGeneration

from slipstream.engine.batch import Span
from slipstream.engine.cache.kv import KV, SharedKV
from slipstream.engine.cache.store import Store
from slipstream.engine.errors import CheckpointMismatch, UnsupportedModel
from slipstream.engine.models.blueprint import Blueprint, draw
from slipstream.engine.models.registry import decoder_spec, read_model
from tests.checkpoints import N_PROMPT, Oracle, edited, noised_copy, theirs, with_config, write_tokenizer
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
from tests.oracle.lab import Folders, Lab, draft_beside_trouble

pytestmark = pytest.mark.usefixtures("_selected")
PLAIN = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "use_double_wide_mlp": False}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4": ("gemma4", {}),
    "keys as values": (
        "gemma4",
        {**PLAIN, "attention_k_eq_v": True, "num_key_value_heads": 2, "num_global_key_value_heads": 1},
    ),
    "uncapped": ("gemma4", {**PLAIN, "final_logit_softcapping": None, "attention_bias": True}),
    "sparse": (
        "gemma4",
        {
            **PLAIN,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "heads of one shape": ("gemma4", {"global_head_dim": 16}),
    "one of each is its own": ("gemma4", {"num_kv_shared_layers": 4, "use_double_wide_mlp": False}),
}
Get = Callable[[str], Oracle]


@pytest.mark.sampled(keep=4)
@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_whole_in_chunks_and_token_by_token(oracle: Get, variant: str) -> None:
    folder, prompt, expected = oracle(variant)
    compare_cuts(Windowed(loaded(folder)), prompt, expected)


@pytest.mark.sampled(keep=4)
@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("variant", VARIANTS)
def test_ragged_spans_with_drafts_of_which_some_are_kept(oracle: Get, variant: str) -> None:
    folder, prompt, expected = oracle(variant)
    compare_ragged(Windowed(loaded(folder)), prompt, expected, seed=2)


@pytest.mark.sampled(keep=5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", ["gemma4", "keys as values", "sparse"])
def test_any_cut_gives_the_same_bits(oracle: Get, variant: str, dtype: torch.dtype) -> None:
    folder, prompt, _ = oracle(variant)
    ids, runner = prompt.tolist(), Windowed(loaded(folder, dtype))
    whole = runner.feed_chunks(0, ids, [N_PROMPT])
    assert torch.equal(runner.feed_chunks(1, ids, [33, 1, 15, 2, 49]), whole)
    for start in range(0, N_PROMPT, 5):  # one certain token, four drafts that are kept, one that is not
        logits = runner.feed(Span(2, [*ids[start : start + 5], 7], start, 5, 6), n_kept=[4])
        assert torch.equal(logits[:5], whole[start : start + 5])


@pytest.mark.sampled(keep=5)
@pytest.mark.parametrize("variant", VARIANTS)
def test_bfloat16_errs_as_transformers_does(oracle: Get, variant: str) -> None:
    folder, prompt, expected = oracle(variant)
    coarse = Windowed(loaded(folder, torch.bfloat16)).feed_chunks(0, prompt.tolist(), [N_PROMPT])
    with torch.inference_mode():
        their = theirs(folder).to(torch.bfloat16)(prompt[None]).logits[0].float()
    ours, others = ((one - expected).abs().mean() for one in (coarse, their))
    # Near ties between random experts fall either way: over seeds both err alike.
    assert ours < (2 if variant == "sparse" else 1.2) * others
    assert ours < (0.3 if variant == "sparse" else 0.1) * expected.std()


@pytest.mark.sampled(keep=5)
def test_greedy_text(oracle: Get) -> None:
    folder, prompt, _ = oracle("gemma4")
    compare_greedy(Windowed, folder, prompt[:30])


def test_shared_layers_have_no_memory_of_their_own(oracle: Get) -> None:
    network = loaded(oracle("gemma4")[0])
    assert [need.source for need in network.needs] == [None, None, None, None, 2, 3]
    store = Windowed(network).store
    assert store.layers[4] is store.layers[2]
    assert store.layers[5] is store.layers[3]
    assert len(store.held.page_tensors("full")) == len(store.held.page_tensors("window")) == 4
    assert SharedKV(3).token_bytes(torch.float32) == SharedKV(3).window_bytes(torch.float32) == 0
    assert store.token_bytes == 2 * 2 * 32 * 4  # keys and values of two layers, one head of 32


def test_what_shared_layers_do_not_read_may_lie_in_the_files(oracle: Get, tmp_path: Path) -> None:
    folder, prompt, expected = oracle("gemma4")
    name = "model.layers.5.self_attn"

    def add(tensors: dict[str, Tensor]) -> None:
        for part, shape in (("k_proj", (32, 64)), ("v_proj", (32, 64)), ("k_norm", (32,))):
            tensors[f"{name}.{part}.weight"] = torch.ones(shape)

    logits = Windowed(loaded(edited(folder, tmp_path / "1", add))).feed(rows(0, prompt.tolist(), 0, N_PROMPT))
    assert difference(logits, expected) < 1e-4
    with pytest.raises(CheckpointMismatch, match=r"unused: .*layers\.5\.self_attn\.k_proj\.bias"):
        loaded(
            edited(folder, tmp_path / "2", lambda all: all.update({f"{name}.k_proj.bias": torch.ones(32)}))
        )
    with pytest.raises(CheckpointMismatch, match=r"missing: .*layers\.3\.self_attn\.k_proj"):
        loaded(edited(folder, tmp_path / "3", lambda all: all.pop("model.layers.3.self_attn.k_proj.weight")))


def test_wrapper_checkpoint(oracle: Get, tmp_path: Path) -> None:
    """The released files: text keys under `text_config`, heads under keys of their own, towers that are left alone."""
    folder, prompt, expected = oracle("gemma4")
    text = json.loads((folder / "config.json").read_text())
    config = Gemma4Config(text_config=text, vision_config=None, audio_config=None, tie_word_embeddings=True)
    model = Gemma4ForConditionalGeneration(config)
    names = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    found = model.load_state_dict(names, strict=False)
    assert not found.unexpected_keys
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    logits = Windowed(loaded(tmp_path)).feed(rows(0, prompt.tolist(), 0, N_PROMPT))
    assert difference(logits, expected) < 1e-4
    older = {"per_layer_config": None, "global_head_dim": 32, "rope_parameters": None}
    copy = with_config(folder, tmp_path / "older", **older)
    assert difference(Windowed(loaded(copy)).feed(rows(0, prompt.tolist(), 0, N_PROMPT)), expected) < 1e-4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enable_moe_block": True}, "num_experts is missing"),
        (
            {"enable_moe_block": True, "num_experts": 2, "top_k_experts": 3},
            "top_k_experts = 3: must be at most",
        ),
        ({"use_bidirectional_attention": "all"}, 'use_bidirectional_attention = "all"'),
        ({"hidden_activation": "silu"}, "hidden_activation = .*gelu_pytorch_tanh"),
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers = 6: leaves a kind of layer without"),
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers = 5: leaves a kind of layer without"),
        ({"per_layer_config": {"1": {"head_dim": 32}}}, "all full layers heads of one shape"),
        ({"final_logit_softcapping": -1.0}, "final_logit_softcapping = -1"),
        ({"architectures": ["Gemma3ForCausalLM"]}, "final_logit_softcapping = 3.0: not supported"),
    ],
)
def test_configs_that_make_no_sense_are_refused(
    oracle: Get, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        loaded(with_config(oracle("gemma4")[0], tmp_path / "copy", **changes))


def test_heads_that_cuda_has_no_kernel_for_are_refused_there(oracle: Get, tmp_path: Path) -> None:
    folder, _, _ = oracle("gemma4")
    values = json.loads((folder / "config.json").read_text())
    wide = {name: {**one, "head_dim": 1024} for name, one in values["per_layer_config"].items()}
    config = read_model(with_config(folder, tmp_path / "copy", per_layer_config=wide))
    assert draw(config, torch.bfloat16).needs[1] == KV(1, 1024)
    weights = Blueprint(torch.bfloat16)
    weights.device = torch.device("cuda")
    spec = decoder_spec(config, 64).blocks[1].mixer
    with pytest.raises(
        UnsupportedModel, match=r"heads of 1024 values: attention on CUDA has at most 512; --device"
    ):
        spec.load(weights, "model.layers.1", {})


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_text_is_that_of_plain_decoding(oracle: Get, dtype: torch.dtype, tmp_path: Path) -> None:
    """Through the engine, with a draft network that is right in part, cancels and preemptions."""
    folder, prompt, _ = oracle("gemma4")
    lab = Lab(Folders(folder, noised_copy(folder, tmp_path, 0.02)), dtype, n_ctx=N_CTX)
    assert draft_beside_trouble(lab, prompt.tolist())[1] > 0


def test_a_shared_layer_that_had_memory_of_its_own_would_be_seen(
    oracle: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault: the last layers read another layer's rows than their source's."""
    folder, prompt, expected = oracle("gemma4")
    runner = Windowed(loaded(folder))
    assert isinstance(runner.store, Store)
    runner.store.layers[5] = runner.store.layers[1]
    logits = runner.feed(rows(0, prompt.tolist(), 0, N_PROMPT))
    assert difference(logits, expected) > 1e-2
    assert runner.network.device == CPU
