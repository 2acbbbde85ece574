"""MiMo-V2-Flash against transformers: narrower values, scaled; sinks in windows alone; configs in both dialects."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MiMoV2FlashConfig

from slipstream import kernels
from slipstream.engine.api import Sampling
from slipstream.engine.batch import Span
from slipstream.engine.cache.kv import KV
from slipstream.engine.errors import CheckpointMismatch, UnsupportedModel
from slipstream.engine.layers.attention import Attention, AttentionSpec
from slipstream.engine.layers.mlp import GatedMLP
from slipstream.engine.layers.moe import MoE
from slipstream.engine.layers.rope import RopeSpec
from slipstream.engine.models.registry import decoder_spec, read_model
from tests.checkpoints import N_PROMPT, Oracle, edited, noised_copy, with_config
from tests.emulator import emulated, needs_compiler, same
from tests.oracle.feeding import (
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
from tests.released import released_mimo
from tests.tiny_families import FULL, SLIDING

pytestmark = pytest.mark.usefixtures("_selected")
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mimo": ("mimo_v2_flash", {}),
    "mimo, other numbers": (
        "mimo_v2_flash",
        {
            "attention_bias": True,
            "attention_value_scale": None,
            "head_dim": 32,
            "layer_types": [SLIDING, FULL, FULL, SLIDING, SLIDING, FULL],
            "n_group": 2,
            "norm_topk_prob": False,
            "num_experts_per_tok": 3,
            "routed_scaling_factor": 1.7,
            "sliding_window": 9,
            "v_head_dim": 20,
        },
    ),
}


@pytest.mark.sampled(keep=2)
@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_whole_in_chunks_and_token_by_token(oracle: Callable[[str], Oracle], variant: str) -> None:
    folder, prompt, expected = oracle(variant)
    compare_cuts(Windowed(loaded(folder)), prompt, expected)
    found = Windowed(loaded(folder)).feed(rows(0, prompt.tolist(), 0, N_PROMPT))
    assert difference(found, expected) < 1e-5 * expected.abs().max()


@pytest.mark.sampled(keep=2)
@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("variant", VARIANTS)
def test_ragged_spans_with_drafts_of_which_some_are_kept(
    oracle: Callable[[str], Oracle], variant: str
) -> None:
    folder, prompt, expected = oracle(variant)
    compare_ragged(Windowed(loaded(folder)), prompt, expected, seed=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_rows_have_the_same_bits_in_every_cut(oracle: Callable[[str], Oracle], dtype: torch.dtype) -> None:
    folder, prompt, expected = oracle("mimo")
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


@pytest.mark.sampled(keep=3)
def test_greedy_text(oracle: Callable[[str], Oracle]) -> None:
    folder, prompt, _ = oracle("mimo")
    compare_greedy(Windowed, folder, prompt[:30], 64)


def test_kinds_of_layers(oracle: Callable[[str], Oracle]) -> None:
    """Only sliding layers have sinks, float32 in every network, and K/V heads of their own number."""
    network = loaded(oracle("mimo")[0], torch.bfloat16)
    kinds = read_model(oracle("mimo")[0]).fields.values["layer_types"]
    for block, kind in zip(network.decoder.blocks, kinds, strict=True):
        mixer = block.mixer
        assert isinstance(mixer, Attention)
        slides = kind == SLIDING
        assert mixer.need == KV(2 if slides else 1, 24, 17 if slides else None, d_value=16)
        assert (mixer.sinks is not None) == slides
        assert mixer.sinks is None or mixer.sinks.dtype == torch.float32
    ffns = [type(block.ffn) for block in network.decoder.blocks]
    assert ffns == [GatedMLP, MoE, MoE, MoE, GatedMLP, MoE]


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_text_is_that_of_plain_decoding(
    oracle: Callable[[str], Oracle], dtype: torch.dtype, tmp_path: Path
) -> None:
    """Through the engine: full and window pages run short, drafts are kept in part, prompts share prefixes."""
    folder, prompt, _ = oracle("mimo")
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


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_dialect_of_the_released_files(
    oracle: Callable[[str], Oracle], variant: str, tmp_path: Path
) -> None:
    folder, prompt, expected = oracle(variant)
    # None of these is what would be assumed.
    given = edited_ropes(folder, tmp_path / "1", {FULL: 2e5, SLIDING: 3e3}, rms_norm_eps=3e-2)
    copy = released_mimo(given, tmp_path / "2")
    assert decoder_spec(read_model(copy), N_CTX) == decoder_spec(read_model(given), N_CTX)
    found = Windowed(loaded(released_mimo(folder, tmp_path / "3"))).feed(
        rows(0, prompt.tolist(), 0, N_PROMPT)
    )
    plain = Windowed(loaded(folder)).feed(rows(0, prompt.tolist(), 0, N_PROMPT))
    assert torch.equal(found, plain)
    assert difference(found, expected) < 1e-5 * expected.abs().max()


def edited_ropes(folder: Path, target: Path, thetas: dict[str, float], **changes: Any) -> Path:
    """A copy with other rotations."""
    ropes = json.loads((folder / "config.json").read_text())["rope_parameters"]
    other = {kind: {**ropes[kind], "rope_theta": theta} for kind, theta in thetas.items()}
    return with_config(folder, target, rope_parameters=other, **changes)


def test_the_window_of_both_dialects(oracle: Callable[[str], Oracle], tmp_path: Path) -> None:
    """What transformers makes of the released keys is what is read from them."""
    folder, _, _ = oracle("mimo")

    def windows(copy: Path) -> set[int | None]:
        blocks = decoder_spec(read_model(copy), N_CTX).blocks
        return {block.mixer.need.window for block in blocks}

    assert MiMoV2FlashConfig(sliding_window=128, sliding_window_size=128).sliding_window == 129
    assert windows(folder) == {None, 17}
    assert windows(released_mimo(folder, tmp_path / "1", sliding_window=128, sliding_window_size=128)) == {
        None,
        129,
    }
    assert windows(released_mimo(folder, tmp_path / "2", sliding_window=128, sliding_window_size=None)) == {
        None,
        128,
    }


def test_sliding_layers_of_another_shape(oracle: Callable[[str], Oracle], tmp_path: Path) -> None:
    """Keys that transformers does not read: all the numbers of sliding layers, and sinks in either kind."""
    folder, _, _ = oracle("mimo")
    heads = {
        "swa_num_attention_heads": 6,
        "swa_num_key_value_heads": 3,
        "swa_head_dim": 36,
        "swa_v_head_dim": 8,
    }
    sinks = {"add_swa_attention_sink_bias": False, "add_full_attention_sink_bias": True}
    blocks = decoder_spec(read_model(released_mimo(folder, tmp_path / "1", **heads, **sinks)), N_CTX).blocks
    full, sliding = (block.mixer for block in blocks[:2])
    assert (full.n_heads, full.need, full.sinks) == (4, KV(1, 24, d_value=16), "attention_sink_bias")
    assert (sliding.n_heads, sliding.need, sliding.sinks) == (6, KV(3, 36, 17, d_value=8), None)
    assert (full.rope.n_dims, full.rope.theta) == (8, 5e6)
    assert (sliding.rope.n_dims, sliding.rope.theta) == (12, 1e4)


def test_a_scale_of_values_that_is_left_out_is_the_one_transformers_assumes(
    oracle: Callable[[str], Oracle], tmp_path: Path
) -> None:
    folder, prompt, expected = oracle("mimo")
    copy = with_config(folder, tmp_path / "copy", attention_value_scale=None)
    assert MiMoV2FlashConfig.from_pretrained(copy).attention_value_scale == 0.707
    found = Windowed(loaded(copy)).feed(rows(0, prompt.tolist(), 0, N_PROMPT))
    assert difference(found, expected) < 1e-5 * expected.abs().max()


def test_gates_and_values_that_are_keys_are_as_wide_as_keys() -> None:
    shape: dict[str, Any] = {"d_model": 64, "n_heads": 4, "n_kv_heads": 2, "d_head": 24, "d_value": 16}
    rope = RopeSpec(kind="default", theta=1e4, n_dims=8)
    for more in ({"gate": "element"}, {"keys_as_values": True}):
        with pytest.raises(ValueError, match="as wide as keys"):
            AttentionSpec(**shape, rope=rope, **more)


@pytest.mark.sampled(keep=3)
@needs_compiler
def test_logits_with_cuda_attention(oracle: Callable[[str], Oracle]) -> None:
    """In the emulator: two widths, windows and sinks in one network, whole and in chunks."""
    folder, prompt, expected = oracle("mimo")
    runner, ids = Windowed(loaded(folder, torch.bfloat16)), prompt.tolist()[:60]
    with kernels.use("cuda", "attention"), emulated():
        whole = runner.feed(rows(0, ids, 0, 60))
        assert same(runner.feed_chunks(1, ids, [31, 1, 5, 23]), whole)
    assert (whole.float() - expected[:60]).abs().mean() < 0.1 * expected.std()


def test_the_layers_of_a_draft_head_are_left_alone(oracle: Callable[[str], Oracle], tmp_path: Path) -> None:
    folder, prompt, expected = oracle("mimo")
    more = {"model.mtp.layers.0.eh_proj.weight": torch.ones(64, 128)}
    network = loaded(edited(folder, tmp_path / "copy", lambda all: all.update(more)))
    assert network.n_params == loaded(folder).n_params
    found = Windowed(network).feed(rows(0, prompt.tolist(), 0, N_PROMPT))
    assert difference(found, expected) < 1e-5 * expected.abs().max()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hybrid_layer_pattern": [0, 1, 2, 0, 1, 1]},
            r"hybrid_layer_pattern = .*must be 0 \(full_attention\)",
        ),
        ({"hybrid_layer_pattern": None}, "hybrid_layer_pattern = null: must be 0"),
        ({"hybrid_layer_pattern": [0, True, 1, 0, 1, 1]}, "hybrid_layer_pattern = "),
        ({"moe_layer_freq": [0, 1, 1]}, r"moe_layer_freq = \[0, 1, 1\]: must be 0 \(dense\) or 1 \(sparse\)"),
        ({"moe_layer_freq": 1}, "moe_layer_freq = 1"),
        ({"layer_types": ["chunked_attention"] * 6}, "layer_types = "),
        ({"v_head_dim": 32}, "v_head_dim = 32: 32 must be at most the width of keys, 24"),
        ({"swa_v_head_dim": 25}, "swa_v_head_dim = 25: 25 must be at most"),
        ({"swa_num_key_value_heads": 3}, "swa_num_key_value_heads = 3: 3 must divide 4 query heads"),
        ({"attention_value_scale": 0}, "attention_value_scale = 0: must be above 0"),
        ({"add_swa_attention_sink_bias": "no"}, "add_swa_attention_sink_bias = "),
        ({"sliding_window": None, "sliding_window_size": None}, "sliding_window is missing"),
        ({"scoring_func": "softmax"}, 'scoring_func = "softmax": must be sigmoid'),
        ({"hidden_act": "gelu"}, 'hidden_act = "gelu"'),
        ({"partial_rotary_factor": 0.4}, "9 rotated dimensions, must be even"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9"),
        ({"layernorm_epsilon": -1}, "layernorm_epsilon = -1: must be above 0"),
    ],
)
def test_configs_that_make_no_sense_are_refused(
    oracle: Callable[[str], Oracle], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        decoder_spec(read_model(released_mimo(oracle("mimo")[0], tmp_path / "copy", **changes)), N_CTX)


def test_files_that_do_not_fit_are_refused(oracle: Callable[[str], Oracle], tmp_path: Path) -> None:
    folder, _, _ = oracle("mimo")
    for name in (
        "self_attn.attention_sink_bias",
        "mlp.gate.e_score_correction_bias",
        "self_attn.v_proj.weight",
    ):
        copy = edited(folder, tmp_path / name, lambda all, name=name: all.pop(f"model.layers.1.{name}"))
        with pytest.raises(CheckpointMismatch, match=rf"missing: model\.layers\.1\.{name}"):
            loaded(copy)
    surplus = {"model.layers.0.self_attn.attention_sink_bias": torch.ones(4)}
    with pytest.raises(CheckpointMismatch, match=r"unused: model\.layers\.0\.self_attn\.attention_sink_bias"):
        loaded(edited(folder, tmp_path / "more", lambda all: all.update(surplus)))
