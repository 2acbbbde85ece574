"""Networks with sliding windows against transformers, in pages that are taken away as soon as they may be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as HFTokenizer
from tokenizers.processors import TemplateProcessing

from slipstream.engine.api import Chat
from slipstream.engine.batch import Span
from slipstream.engine.errors import CheckpointMismatch, UnsupportedModel
from slipstream.engine.text.chat import load_chat_template
from slipstream.engine.text.tokenizer import Tokenizer
from tests.checkpoints import N_PROMPT, Oracle, edited, tiny_checkpoint, with_config
from tests.oracle.feeding import (
    Windowed,
    compare_cuts,
    compare_greedy,
    compare_ragged,
    difference,
    loaded,
    rows,
)

WINDOW, PAGE = 16, 8
SOME = {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 2}
pytestmark = pytest.mark.usefixtures("_selected")
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3", {}),
    "gemma3, biases": ("gemma3", {"attention_bias": True, "query_pre_attn_scalar": 16}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "qwen2": ("qwen2", SOME),
    "qwen3": ("qwen3", {**SOME, "sliding_window": 13}),
}


@pytest.mark.sampled(keep=4)
@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_whole_in_chunks_and_token_by_token(oracle: Callable[[str], Oracle], variant: str) -> None:
    folder, prompt, expected = oracle(variant)
    compare_cuts(Windowed(loaded(folder)), prompt, expected)


@pytest.mark.sampled(keep=4)
@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("variant", VARIANTS)
def test_ragged_spans_with_drafts_of_which_some_are_kept(
    oracle: Callable[[str], Oracle], variant: str
) -> None:
    folder, prompt, expected = oracle(variant)
    compare_ragged(Windowed(loaded(folder)), prompt, expected, seed=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_cut_gives_the_same_bits(oracle: Callable[[str], Oracle], dtype: torch.dtype) -> None:
    folder, prompt, _ = oracle("gemma3")
    ids, runner = prompt.tolist(), Windowed(loaded(folder, dtype))
    whole = runner.feed_chunks(0, ids, [N_PROMPT])
    assert torch.equal(runner.feed_chunks(1, ids, [33, 1, 15, 2, 49]), whole)
    for start in range(0, N_PROMPT, 5):  # one certain token, four drafts that are kept, one that is not
        logits = runner.feed(Span(2, [*ids[start : start + 5], 7], start, 5, 6), n_kept=[4])
        assert torch.equal(logits[:5], whole[start : start + 5])


def test_a_long_text_takes_the_pages_of_a_window(oracle: Callable[[str], Oracle]) -> None:
    """A window of 16 is at most three pages of 8; drafts of 5 and the page border add two."""
    folder, prompt, expected = oracle("gemma3")
    ids, runner = prompt.tolist(), Windowed(loaded(folder), n_window_pages=5)
    for start in range(0, N_PROMPT, 2):
        logits = runner.feed(Span(0, [*ids[start : start + 2], 1, 2, 3, 4], start, 5, 6), n_kept=[1])
        assert difference(logits[:2], expected[start : start + 2]) < 1e-4
        assert runner.store.windows is not None
        assert runner.store.windows.pool.n_held <= 4


def test_a_prefix_is_resumed_where_its_window_lives(oracle: Callable[[str], Oracle]) -> None:
    folder, prompt, expected = oracle("gemma3")
    ids, runner = prompt.tolist(), Windowed(loaded(folder), n_window_pages=20)
    runner.poison = lambda: None  # type: ignore[method-assign]
    runner.feed_chunks(0, ids[:90], [40, 50])
    for slot, n_shared in ((1, 41), (2, 90)):
        start = runner.cache.begin(slot, [*ids[:n_shared], 5, 6], "")
        assert start == n_shared // PAGE * PAGE
        runner.tokens[slot] = ids[:start]
        assert difference(runner.feed(rows(slot, ids, start, 10)), expected[start : start + 10]) < 1e-4


def test_greedy_text(oracle: Callable[[str], Oracle]) -> None:
    folder, prompt, _ = oracle("gemma3")
    compare_greedy(Windowed, folder, prompt[:30])


def test_bfloat16_is_near(oracle: Callable[[str], Oracle]) -> None:
    folder, prompt, expected = oracle("gemma3")
    coarse = Windowed(loaded(folder, torch.bfloat16)).feed_chunks(0, prompt.tolist(), [N_PROMPT])
    error = (coarse - expected).abs()
    assert error.mean() < 0.1 * expected.std()


OLD_KEYS: dict[str, Any] = {
    "rope_parameters": None,
    "rope_theta": 1e6,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "rope_local_base_freq": 1e4,
    "layer_types": None,
    "_sliding_window_pattern": None,
    "sliding_window_pattern": 6,
}


def test_older_config(oracle: Callable[[str], Oracle], tmp_path: Path) -> None:
    folder, prompt, expected = oracle("gemma3")
    copy = with_config(folder, tmp_path / "old", **OLD_KEYS)
    assert difference(Windowed(loaded(copy)).feed(rows(0, prompt.tolist(), 0, N_PROMPT)), expected) < 1e-4


def test_wrapper_checkpoint(oracle: Callable[[str], Oracle], tmp_path: Path) -> None:
    """The released files: sparse keys under `text_config`, other names, a vision tower that is left alone."""
    folder, prompt, expected = oracle("gemma3")
    copy = with_config(folder, tmp_path / "wrapper", **OLD_KEYS)
    text = json.loads((copy / "config.json").read_text())
    for key in (
        "architectures",
        "rope_theta",
        "rope_local_base_freq",
        "sliding_window_pattern",
        "tie_word_embeddings",
    ):
        text.pop(key, None)  # what the released ones leave to be assumed
    outer = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": text,
        "eos_token_id": [1, 106],
    }
    (copy / "config.json").write_text(json.dumps(outer))
    tensors = load_file(folder / "model.safetensors")
    renamed = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    renamed["vision_tower.vision_model.x.weight"] = torch.ones(3)
    renamed["multi_modal_projector.x.weight"] = torch.ones(3)
    save_file(renamed, copy / "model.safetensors")
    network = loaded(copy)
    assert difference(Windowed(network).feed(rows(0, prompt.tolist(), 0, N_PROMPT)), expected) < 1e-4


def test_the_begin_token_is_written_once(tmp_path: Path) -> None:
    """Gemma's tokenizer adds it to a plain text, its template writes it itself."""
    folder = tiny_checkpoint("gemma3", tmp_path)
    tokenizer = HFTokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    template = "{{ bos_token }}" + config["chat_template"]
    path.write_text(json.dumps({**config, "bos_token": "<|endoftext|>", "chat_template": template}))
    ours = Tokenizer(folder)
    plain = ours.encode("What is the answer?")
    assert plain[0] == ours.bos_id == 0
    chat = load_chat_template(folder, ours)
    assert chat is not None
    ids = chat.encode(Chat([{"role": "user", "content": "What is the answer?"}]))
    assert ids.count(0) == plain.count(0) == 1
    assert ids[0] == 0


def test_what_does_not_fit_is_refused(oracle: Callable[[str], Oracle], tmp_path: Path) -> None:
    folder, _, _ = oracle("gemma3")
    wrong: dict[str, Any] = {
        "hidden_activation": "silu",
        "use_bidirectional_attention": True,
        "layer_types": ["chunked_attention"] * 6,
        "query_pre_attn_scalar": 0,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    }
    for key, value in wrong.items():
        with pytest.raises(UnsupportedModel, match=key):
            loaded(with_config(folder, tmp_path / key, **{key: value}))
    name = "model.layers.0.pre_feedforward_layernorm.weight"
    with pytest.raises(CheckpointMismatch, match="missing: " + name.replace(".", r"\.")):
        loaded(edited(folder, tmp_path / "norm", lambda all: all.pop(name)))
    llama = tiny_checkpoint("llama", tmp_path / "llama")
    with pytest.raises(UnsupportedModel, match="sliding windows are not supported"):
        loaded(with_config(llama, tmp_path / "other", sliding_window=16))
