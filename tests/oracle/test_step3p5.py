"""Step-3.5 against transformers: a gate per head, heads and rotations by kind of layer, activations cut at a limit."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from slipstream.engine.batch import Span
from slipstream.engine.cache.kv import KV
from slipstream.engine.errors import CheckpointMismatch, LoadError, UnsupportedModel
from slipstream.engine.layers.attention import Attention, AttentionSpec, opened
from slipstream.engine.layers.mlp import GatedMLP, MLPSpec
from slipstream.engine.layers.moe import MoE
from slipstream.engine.models.blueprint import draw
from slipstream.engine.models.families.routed_experts import Located
from slipstream.engine.models.families.step3p5 import block
from slipstream.engine.models.registry import read_model
from slipstream.kernels.gated.activation import SILU, Activation
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
from tests.oracle.lab import Folders, Lab, draft_beside_trouble
from tests.released import release_step
from tests.tiny_families import FULL, SLIDING

pytestmark = pytest.mark.usefixtures("_selected")
OTHER: dict[str, Any] = {
    "attention_bias": True,
    "layer_types": [SLIDING, FULL, FULL, SLIDING, SLIDING],
    "mlp_layer_types": ["sparse"] * 5,
    "num_experts_per_tok": 3,
    "num_sliding_attention_heads": 2,
    "query_pre_attn_scalar": 24,
    "rms_norm_eps": 1e-3,
    "sliding_window": 13,
    "swiglu_limits": None,
    "swiglu_limits_shared": [0.3] * 5,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "step3p7": ("step3p7", {}),
    "step3p7, other numbers": ("step3p7", OTHER),
}
Tensors = dict[str, Tensor]
Get = Callable[[str], Oracle]


@pytest.mark.sampled(keep=2)
@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_whole_in_chunks_and_token_by_token(oracle: Get, variant: str) -> None:
    folder, prompt, expected = oracle(variant)
    compare_cuts(Windowed(loaded(folder)), prompt, expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_as_near_as_float32_allows(oracle: Get, variant: str) -> None:
    folder, prompt, expected = oracle(variant)
    assert difference(logits(folder, prompt), expected) < 1e-5 * float(expected.abs().max())


@pytest.mark.sampled(keep=2)
@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("variant", VARIANTS)
def test_ragged_spans_with_drafts_of_which_some_are_kept(oracle: Get, variant: str) -> None:
    folder, prompt, expected = oracle(variant)
    compare_ragged(Windowed(loaded(folder)), prompt, expected, seed=5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_have_the_same_bits_in_every_cut(oracle: Get, variant: str, dtype: torch.dtype) -> None:
    folder, prompt, expected = oracle(variant)
    ids, runner = prompt.tolist(), Windowed(loaded(folder, dtype))
    whole = runner.feed_chunks(0, ids, [N_PROMPT])
    assert torch.equal(runner.feed_chunks(1, ids, [33, 1, 15, 2, 49]), whole)
    for start in range(0, N_PROMPT, 5):  # one certain token, four drafts that are kept, one that is not
        said = runner.feed(Span(2, [*ids[start : start + 5], 7], start, 5, 6), n_kept=[4])
        assert torch.equal(said[:5], whole[start : start + 5])
    runner.feed(rows(3, ids[::-1], 0, 60))
    beside = runner.feed(rows(3, ids[::-1], 60, 7), rows(4, ids, 0, 20))
    assert torch.equal(beside[7:], whole[:20])
    assert (whole - expected).abs().mean() < 0.1 * expected.std()


@pytest.mark.sampled(keep=3)
def test_greedy_text(oracle: Get) -> None:
    folder, prompt, _ = oracle("step3p7")
    compare_greedy(Windowed, folder, prompt[:30], 64)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_text_is_that_of_plain_decoding(oracle: Get, dtype: torch.dtype, tmp_path: Path) -> None:
    """Through the engine, with a draft network that is right in part, cancels and preemptions."""
    folder, prompt, _ = oracle("step3p7")
    lab = Lab(Folders(folder, noised_copy(folder, tmp_path, 0.05)), dtype, n_ctx=N_CTX)
    n_drafted, n_accepted = draft_beside_trouble(lab, prompt.tolist())
    assert 0 < n_accepted < n_drafted


def logits(folder: Path, prompt: Tensor) -> Tensor:
    return Windowed(loaded(folder)).feed(rows(0, prompt.tolist(), 0, N_PROMPT))


def mtp_tensors() -> Tensors:
    """Some of what the files hold of the layers behind the last."""
    return {
        f"model.layers.{i}.{name}": torch.ones(shape)
        for i in (5, 6, 7)
        for name, shape in (
            ("eh_proj.weight", (64, 128)),
            ("enorm.weight", (64,)),
            ("self_attn.g_proj.weight", (6, 64)),
            ("transformer.shared_head.output.weight", (384, 64)),
        )
    }


@pytest.fixture(scope="module")
def released(oracle: Get, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same checkpoint as Step-3.5-Flash was released: no wrapper, other keys, MTP layers in the folder."""
    folder, target = oracle("step3p7")[0], tmp_path_factory.mktemp("released") / "copy"
    copy = edited(folder, target, lambda all: all.update(mtp_tensors()))
    tensors = load_file(copy / "model.safetensors")
    assert {"model.layers.1.moe.router_bias", "model.layers.1.moe.up_proj.weight"} <= tensors.keys()
    release_step(copy)
    return copy


def test_released_keys_and_names(oracle: Get, released: Path) -> None:
    folder, prompt, expected = oracle("step3p7")
    assert torch.equal(logits(released, prompt), logits(folder, prompt))
    assert loaded(released).n_params == loaded(folder).n_params
    assert difference(logits(released, prompt), expected) < 1e-4


def test_the_released_config_is_the_one_that_transformers_reads(
    released: Path, oracle: Get, tmp_path: Path
) -> None:
    """Its own reading of these keys, within a wrapper, computes what ours does."""
    folder, prompt, _ = oracle("step3p7")
    inner = json.loads((released / "config.json").read_text())
    copy = edited(folder, tmp_path / "wrapper", lambda all: None)
    outer = json.loads((folder / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**outer, "text_config": inner}))
    with torch.inference_mode():
        meant = theirs(copy)(prompt[None]).logits[0]
    assert difference(logits(copy, prompt), meant) < 1e-4
    assert difference(meant, oracle("step3p7")[2]) < 1e-6


def fused(tensors: Tensors) -> None:
    """The names of other families, as transformers has them in memory."""
    for i in (1, 3, 4):
        name = f"model.layers.{i}"
        gate, up, down = (tensors.pop(f"{name}.moe.{part}_proj.weight") for part in ("gate", "up", "down"))
        tensors[f"{name}.mlp.experts.gate_up_proj"] = torch.cat((gate, up), 1)
        tensors[f"{name}.mlp.experts.down_proj"] = down
        tensors[f"{name}.mlp.gate.weight"] = tensors.pop(f"{name}.moe.gate.weight")
        tensors[f"{name}.mlp.gate.e_score_correction_bias"] = tensors.pop(f"{name}.moe.router_bias")
        for part in ("gate", "up", "down"):
            tensors[f"{name}.mlp.shared_experts.{part}_proj.weight"] = tensors.pop(
                f"{name}.share_expert.{part}_proj.weight"
            )


def of_a_wrapper(tensors: Tensors) -> None:
    """The prefixes of the released Step-3.7."""
    for name in [*tensors]:
        inner = name.startswith(("model.layers.", "model.embed_tokens.", "model.norm."))
        prefix = "model.language_model." if inner else "model." if name.startswith("vi") else ""
        tensors[prefix + (name.removeprefix("model.") if inner else name)] = tensors.pop(name)


@pytest.mark.parametrize("edit", [fused, of_a_wrapper])
def test_other_names(oracle: Get, edit: Callable[[Tensors], None], tmp_path: Path) -> None:
    folder, prompt, expected = oracle("step3p7")
    copy = edited(folder, tmp_path / "copy", edit)
    assert load_file(copy / "model.safetensors").keys() != load_file(folder / "model.safetensors").keys()
    assert difference(logits(copy, prompt), expected) < 1e-4


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": None, "rope_parameters": "rope_scaling"},  # under the newer name
        {"moe_layers_enum": [1, 3, 4]},
        {
            "moe_layers_enum": None,
            "mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse", *["dense"] * 3],
        },
        {"share_expert_dim": None, "rms_norm_eps": None},
        {"use_rope_layers": [True] * 8, "use_moe": True, "zero_centered": True, "use_qk_norm": True},
    ],
    ids=["rope_parameters", "list", "kinds", "left out", "more"],
)
def test_other_ways_to_say_it(oracle: Get, released: Path, changes: dict[str, Any], tmp_path: Path) -> None:
    given = json.loads((released / "config.json").read_text())
    changes = {key: given["rope_scaling"] if one == "rope_scaling" else one for key, one in changes.items()}
    copy = with_config(released, tmp_path / "copy", **changes)
    assert torch.equal(logits(copy, oracle("step3p7")[1]), logits(released, oracle("step3p7")[1]))


def test_what_a_layer_is_made_of(released: Path) -> None:
    """The last three are layers of multi-token prediction, to which the released lists go on."""
    config = read_model(released)
    specs = [block(config, i) for i in range(8)]
    attentions = [one.mixer for one in specs]
    assert all(isinstance(one, AttentionSpec) for one in attentions)
    assert [(one.n_heads, one.window, one.rope.kind, one.rope.n_dims) for one in attentions] == [  # type: ignore[union-attr]
        (4, None, "llama3", 8) if kind == FULL else (6, 16, "default", 16)
        for kind in (FULL, SLIDING, SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL)
    ]
    limited = functools.partial(Activation, "limited")
    activations = [
        (one.ffn.spec.activation, one.ffn.spec.shared and one.ffn.spec.shared.activation)
        if isinstance(one.ffn, Located)
        else one.ffn.activation
        if isinstance(one.ffn, MLPSpec)
        else "neither"
        for one in specs
    ]
    assert activations == [
        *(SILU, (limited(0.5), SILU), limited(1.2)),
        *((SILU, limited(0.7)), (limited(0.8), limited(1.0))),
        *(SILU, limited(3.0), SILU),
    ]
    with pytest.raises(UnsupportedModel, match=r"mtp_layer_types = .*does not say what layer 8 is"):
        block(config, 8)


def test_layers_behind_the_last_of_which_nothing_is_said(oracle: Get) -> None:
    config = read_model(oracle("step3p7")[0])
    assert block(config, 4).mixer.need == KV(2, 16)
    with pytest.raises(UnsupportedModel, match="mtp_layer_types = null: does not say what layer 5 is"):
        block(config, 5)


def test_what_stays_float32(oracle: Get, released: Path, tmp_path: Path) -> None:
    """Norms, the bias for the choice, and the router unless the config says otherwise."""
    stored = load_file(released / "model.safetensors")
    for folder, dtype in (
        (oracle("step3p7")[0], torch.float32),
        (with_config(released, tmp_path / "copy", need_fp32_gate=False), torch.bfloat16),
    ):
        blocks = loaded(folder, torch.bfloat16).decoder.blocks
        layer, mixer = blocks[1].ffn, blocks[1].mixer
        assert isinstance(layer, MoE)
        assert isinstance(mixer, Attention)
        assert layer.router_dtype == dtype
        assert layer.routing.bias is not None
        assert torch.equal(layer.routing.bias, stored["model.layers.1.moe.router_bias"])
        assert mixer.norms is not None
        assert mixer.norms.q.dtype == blocks[1].ffn_norm.weight.dtype == torch.float32  # type: ignore[union-attr]
    assert isinstance(blocks[0].ffn, GatedMLP)


def test_the_gate_of_a_head() -> None:
    mixed, gate = torch.randn(3, 12), torch.randn(3, 4)
    by_hand = torch.stack([mixed[:, i] * gate[:, i // 3].sigmoid() for i in range(12)], 1)
    assert difference(opened(mixed, gate, 3), by_hand) < 1e-6
    assert difference(opened(mixed, mixed, 3), mixed * mixed.sigmoid()) < 1e-6
    assert opened(mixed[:0], gate[:0], 3).shape == (0, 12)


def test_sizes(released: Path) -> None:
    """What a forecast counts is what is loaded."""
    network, drawn = loaded(released, torch.bfloat16), draw(read_model(released), torch.bfloat16, CPU)
    assert (drawn.n_params, drawn.needs) == (network.n_params, network.needs)
    assert drawn.weight_bytes == pytest.approx(network.weight_bytes, rel=0.01)


def refused_keys() -> list[tuple[dict[str, Any], str]]:
    """Changes of the released config, and what is said of them."""
    unsupported: dict[str, Any] = {
        "att_impl_type": "MLA",
        "gating": "per-element",
        "mlp_bias": True,
        "moe_router_activation": "softmax",
        "norm_expert_weight": False,
        "sink": True,
        "sparse_attention_config": {"sparse_block_size": 128},
        "use_bidirectional_attention": True,
        "use_head_wise_attn_gate": False,
        "use_moe": False,
        "use_moe_router_bias": False,
        "use_qk_norm": False,
        "zero_centered": False,
        "hidden_act": "swigluoai",
    }
    other = {"attention_type": SLIDING, "num_attention_heads": 6, "num_attention_groups": 2, "head_dim": 16}
    n_lists = "must be a list of 5 or, with num_nextn_predict_layers, 8"
    return [
        *(({key: value}, f"{key} = .*not supported") for key, value in unsupported.items()),
        ({"use_rope_layers": [True] * 7 + [False]}, "use_rope_layers = .*without rotation"),
        ({"num_key_value_heads": 1}, "num_attention_groups = 2: differs from num_key_value_heads"),
        ({"layer_types": None}, "layer_types = null: must name"),
        ({"layer_types": [FULL] * 6}, f"layer_types = .*{n_lists}"),
        ({"layer_types": ["chunked_attention"] * 8}, "layer_types = .*must name full_attention or sliding"),
        ({"moe_layers_enum": None}, "moe_layers_enum = null: must list layers below 8"),
        ({"moe_layers_enum": "3,8"}, 'moe_layers_enum = "3,8": must list layers below 8'),
        ({"moe_layers_enum": "all"}, 'moe_layers_enum = "all": must list'),
        ({"mlp_layer_types": ["dense"] * 4}, f"mlp_layer_types = .*{n_lists}"),
        ({"rope_theta": [1e6, *[1e4] * 7]}, "rope_theta = .*must be one for all layers of full_attention"),
        ({"partial_rotary_factors": [0.5]}, f"partial_rotary_factors = .*{n_lists}"),
        ({"yarn_only_types": None}, r'yarn_only_types = null: must be \["full_attention"\]'),
        ({"yarn_only_types": [SLIDING]}, r"yarn_only_types = .*the layers that rope_scaling is for"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling: rope_type = null: must name the scaling"),
        (
            {"rope_scaling": {"rope_type": "default", "rope_theta": 1e4}},
            r"rope_scaling: rope_theta = 10000.0: must stand beside rope_scaling",
        ),
        (
            {"attention_other_setting": {**other, "attention_type": FULL}},
            "attention_type = .*must be sliding",
        ),
        ({"attention_other_setting": {**other, "head_dim": 8}}, "head_dim = 8: must be that of full layers"),
        (
            {"attention_other_setting": {**other, "num_attention_groups": 1}},
            "num_attention_groups = 1: must be that of full layers",
        ),
        ({"num_sliding_attention_heads": 5}, "num_sliding_attention_heads = 5: must be a multiple of the 2"),
        ({"sliding_window": None}, "sliding_window is missing"),
        ({"moe_top_k": 9}, "num_experts_per_tok = 9: must be at most the number of experts, 8"),
        ({"swiglu_limits": [0.0] * 4}, f"swiglu_limits = .*{n_lists}"),
        ({"swiglu_limits": [-1.0] * 5}, "swiglu_limits = .*must be numbers of at least 0, or null"),
        ({"swiglu_limits_shared": [True] * 8}, "swiglu_limits_shared = .*must be numbers"),
        (
            {"per_layer_config": {"1": {"num_attention_heads": 6}}},
            "per_layer_config = .*layer 2 the heads of num_sl",
        ),
    ]


@pytest.mark.parametrize(("changes", "message"), refused_keys())
def test_configs_that_make_no_sense_are_refused(
    released: Path, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        loaded(with_config(released, tmp_path / "copy", **changes))


def test_other_families_refuse_its_keys(oracle: Get, tmp_path: Path) -> None:
    copy = with_config(oracle("step3p7")[0], tmp_path / "copy", architectures=["Qwen3MoeForCausalLM"])
    with pytest.raises(UnsupportedModel, match="query_pre_attn_scalar = 16: not supported"):
        loaded(copy)


def test_tensors_that_do_not_fit_are_refused(released: Path, tmp_path: Path) -> None:
    def refused(change: Callable[[Tensors], Any], error: type[Exception], message: str) -> None:
        copy = edited(released, tmp_path / str(len(list(tmp_path.iterdir()))), change)
        with pytest.raises(error, match=message):
            loaded(copy)

    for name in (
        "self_attn.g_proj.weight",
        "moe.router_bias",
        "moe.up_proj.weight",
        "share_expert.up_proj.weight",
    ):
        full = f"model.layers.3.{name}"
        refused(lambda all, full=full: all.pop(full), CheckpointMismatch, f"missing: {full}")
    name = "model.layers.3.self_attn.g_proj.weight"
    refused(
        lambda all: all.update({name: torch.ones(96, 64)}),
        LoadError,
        r"g_proj.weight has shape \[96, 64\], the config asks for \[6, 64\]",
    )
    refused(
        lambda all: all.update({"model.layers.2.moe.gate.weight": torch.ones(8, 64)}),
        CheckpointMismatch,
        r"unused: model\.layers\.2\.moe\.gate\.weight",
    )


def test_stacks_of_quantised_experts_are_refused(released: Path, tmp_path: Path) -> None:
    """As in Step-3.5-Flash-FP8."""

    def narrow(tensors: Tensors) -> None:
        for part in ("gate", "up", "down"):
            name = f"model.layers.1.moe.{part}_proj.weight"
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.ones(8, 1, 1)

    copy = edited(released, tmp_path / "fp8", narrow)
    config = json.loads((copy / "config.json").read_text())
    quantised = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    (copy / "config.json").write_text(json.dumps({**config, "quantization_config": quantised}))
    with pytest.raises(
        UnsupportedModel, match=r"model\.layers\.1\.moe\.gate_proj\.weight: is quantised .*of 3 dim"
    ):
        loaded(copy)
