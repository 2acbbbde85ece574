"""Networks against transformers on random checkpoints: however a text is cut into spans, the logits are the same."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from slipstream.engine.batch import Span
from slipstream.engine.errors import CheckpointMismatch, LoadError, UnsupportedModel
from tests.checkpoints import N_PROMPT, Oracle, edited, noised_copy, theirs, tiny_checkpoint
from tests.oracle.feeding import (
    CPU,
    N_CTX,
    Runner,
    compare_cuts,
    compare_greedy,
    difference,
    loaded,
    rows,
)

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", {}),
    "qwen3-yarn": ("qwen3", {"rope_parameters": {**YARN, "truncate": False, "beta_fast": 16.0}}),
    "qwen3-biases": ("qwen3", {"attention_bias": True, "tie_word_embeddings": False}),
}


pytestmark = pytest.mark.usefixtures("_selected")


@pytest.mark.sampled(keep=6)
@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_whole_in_chunks_and_token_by_token(oracle: Callable[[str], Oracle], variant: str) -> None:
    folder, prompt, expected = oracle(variant)
    compare_cuts(Runner(loaded(folder)), prompt, expected)


@pytest.mark.sampled
@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3"])
def test_ragged_batches(oracle: Callable[[str], Oracle], variant: str) -> None:
    """Slots at different places of the same text, one pass for all, logits for some rows only."""
    folder, prompt, expected = oracle(variant)
    ids, runner, rng = prompt.tolist(), Runner(loaded(folder)), random.Random(2)
    n_past, n_checked = [0] * 5, 0
    while min(n_past) < N_PROMPT:
        spans, wanted = [], []
        for slot in rng.sample(range(5), 5):
            size = min(rng.choice([1, 1, 2, 5, 17, 40]), N_PROMPT - n_past[slot])
            if size == 0 or rng.random() < 0.2:
                continue
            n_logits = rng.randint(0, size)
            start = n_past[slot]
            spans.append(Span(slot, ids[start : start + size], start, 0, n_logits))
            n_past[slot] += size
            wanted += range(n_past[slot] - n_logits, n_past[slot])
        if spans:
            logits = runner.feed(*spans)
            assert logits.shape == (len(wanted), 384)
            if wanted:
                assert difference(logits, expected[wanted]) < 1e-4
            n_checked += len(wanted)
    assert n_checked > N_PROMPT


@pytest.mark.usefixtures("ops")
def test_rejected_tokens_leave_no_trace(oracle: Callable[[str], Oracle]) -> None:
    folder, prompt, expected = oracle("qwen3")
    ids, runner = prompt.tolist(), Runner(loaded(folder))
    runner.feed(rows(0, ids, 0, 40))
    runner.feed(Span(0, [ids[40], *range(30)], 40, 30, 31))  # 30 wrong guesses over two pages
    assert difference(runner.feed(rows(0, ids, 41, 59)), expected[41:]) < 1e-4


@pytest.mark.sampled(keep=3)
@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3"])
def test_greedy_text(oracle: Callable[[str], Oracle], variant: str) -> None:
    folder, prompt, _ = oracle(variant)
    compare_greedy(Runner, folder, prompt[:30])


@pytest.mark.sampled
def test_float64_and_bfloat16(oracle: Callable[[str], Oracle]) -> None:
    folder, prompt, expected = oracle("qwen3")
    ids = prompt.tolist()
    exact = Runner(loaded(folder, torch.float64))
    whole = exact.feed_chunks(0, ids, [N_PROMPT])
    assert difference(whole, expected) < 1e-4
    assert difference(exact.feed_chunks(1, ids, [1] * N_PROMPT), whole) < 1e-6
    coarse = Runner(loaded(folder, torch.bfloat16)).feed_chunks(0, ids, [N_PROMPT])
    error = (coarse - expected).abs()
    assert error.mean() < 0.05 * expected.std()
    assert error.max() < 0.5 * expected.std()


def test_stored_dtypes(tmp_path: Path) -> None:
    """Weights stored in bfloat16 compute in float32 what transformers computes from the same numbers."""
    folder = tiny_checkpoint("llama", tmp_path, dtype=torch.bfloat16)
    network = loaded(folder)
    assert network.config.dtype == torch.bfloat16
    ids = list(range(40))
    with torch.inference_mode():
        expected = theirs(folder)(torch.tensor([ids])).logits[0]
    assert difference(Runner(network).feed(rows(0, ids, 0, 40)), expected) < 1e-4


def test_padding_rows_of_the_head_are_cut(oracle: Callable[[str], Oracle], tmp_path: Path) -> None:
    for family in ("llama", "qwen2"):
        folder = tiny_checkpoint(family, tmp_path / family, vocab=448)
        ids = list(range(40))
        with torch.inference_mode():
            expected = theirs(folder)(torch.tensor([ids])).logits[0]
        network = loaded(folder)
        assert network.vocab_size == 384
        assert difference(Runner(network).feed(rows(0, ids, 0, 40)), expected[:, :384]) < 1e-4
        assert loaded(folder, n_vocab=None).vocab_size == 448
    with pytest.raises(LoadError, match="449 tokens, the embedding 448 rows"):
        loaded(folder, n_vocab=449)


def test_what_a_network_says_about_itself(oracle: Callable[[str], Oracle]) -> None:
    folder, _, _ = oracle("qwen3")
    network, model = loaded(folder), theirs(folder)
    assert network.n_params == sum(one.numel() for one in model.parameters())
    tied = model.get_input_embeddings().weight.numel()  # its rows are kept, and the head that is packed of it
    assert network.weight_bytes == 4 * (network.n_params + tied)
    assert len(network.needs) == 4
    assert (network.needs[0].n_kv_heads, network.needs[0].d_head) == (2, 32)
    assert (network.n_ctx, network.dtype, network.device) == (N_CTX, torch.float32, CPU)


def test_sharded_checkpoint(oracle: Callable[[str], Oracle], tmp_path: Path) -> None:
    folder, prompt, expected = oracle("llama")
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    logits = Runner(loaded(tmp_path)).feed(rows(0, prompt.tolist(), 0, N_PROMPT))
    assert difference(logits, expected) < 1e-4


def test_tensors_that_do_not_fit_are_refused(oracle: Callable[[str], Oracle], tmp_path: Path) -> None:
    folder, _, _ = oracle("qwen2")
    missing = edited(folder, tmp_path / "1", lambda all: all.pop("model.layers.2.self_attn.k_proj.bias"))
    with pytest.raises(CheckpointMismatch, match=r"missing: model\.layers\.2\.self_attn\.k_proj\.bias"):
        loaded(missing)
    unused = edited(folder, tmp_path / "2", lambda all: all.update({"model.layers.9.x": torch.ones(1)}))
    with pytest.raises(CheckpointMismatch, match=r"unused: model\.layers\.9\.x"):
        loaded(unused)
    name = "model.layers.0.mlp.up_proj.weight"
    shape = edited(folder, tmp_path / "3", lambda all: all.update({name: torch.ones(64, 128)}))
    with pytest.raises(LoadError, match=r"up_proj\.weight has shape \[64, 128\].*asks for \[128, 64\]"):
        loaded(shape)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("glm4_moe", {"head_dim": 17}, "head_dim = 17, v_head_dim = 17: must be even"),
        ("qwen3_5", {"head_dim": 33}, "head_dim = 33, v_head_dim = 33: must be even"),
        ("mimo_v2_flash", {"v_head_dim": 15}, "head_dim = 24, v_head_dim = 15: must be even"),
    ],
)
def test_heads_of_odd_widths_are_refused(
    tmp_path: Path, family: str, changes: dict[str, int], message: str
) -> None:
    """Of these families an even number of a head's values is rotated all the same."""
    with pytest.raises(UnsupportedModel, match=message):
        loaded(tiny_checkpoint(family, tmp_path, changes=changes))


def test_redundant_head_of_a_tied_checkpoint(oracle: Callable[[str], Oracle], tmp_path: Path) -> None:
    folder, prompt, expected = oracle("qwen2")

    def repeat(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    def contradict(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    logits = Runner(loaded(edited(folder, tmp_path / "1", repeat))).feed(
        rows(0, prompt.tolist(), 0, N_PROMPT)
    )
    assert difference(logits, expected) < 1e-4
    with pytest.raises(CheckpointMismatch, match=r"unused: lm_head\.weight"):
        loaded(edited(folder, tmp_path / "2", contradict))


def test_tying_is_read_off_the_tensors_if_the_config_is_silent(
    oracle: Callable[[str], Oracle], tmp_path: Path
) -> None:
    for variant in ("qwen2", "llama"):
        folder, prompt, expected = oracle(variant)
        copy = edited(folder, tmp_path / variant, lambda all: None)
        config = json.loads((copy / "config.json").read_text())
        del config["tie_word_embeddings"]
        (copy / "config.json").write_text(json.dumps(config))
        logits = Runner(loaded(copy)).feed(rows(0, prompt.tolist(), 0, N_PROMPT))
        assert difference(logits, expected) < 1e-4


def test_unknown_architecture_is_refused(oracle: Callable[[str], Oracle], tmp_path: Path) -> None:
    folder, _, _ = oracle("llama")
    copy = edited(folder, tmp_path / "copy", lambda all: None)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "architectures": ["FooForCausalLM"]}))
    with pytest.raises(UnsupportedModel, match="FooForCausalLM"):
        loaded(copy)


def test_a_noised_copy_agrees_in_part(oracle: Callable[[str], Oracle], tmp_path: Path) -> None:
    folder, prompt, expected = oracle("llama")
    copy = noised_copy(folder, tmp_path, 0.05)
    logits = Runner(loaded(copy)).feed(rows(0, prompt.tolist(), 0, N_PROMPT))
    agreement = (logits.argmax(-1) == expected.argmax(-1)).float().mean()
    assert 0.3 < agreement < 0.99
