"""Mixtures of experts against transformers: families, storage formats, what their configs can say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock

from slipstream.engine.api import Sampling
from slipstream.engine.batch import Span
from slipstream.engine.checkpoint.weights import Weights
from slipstream.engine.errors import CheckpointMismatch, LoadError, UnsupportedModel
from slipstream.engine.layers.mlp import GatedMLP
from slipstream.engine.layers.moe import MoE, MoESpec, SharedSpec
from slipstream.engine.models.heads.mtp import load_mtp
from slipstream.kernels.moe.op import Routing, route
from tests.checkpoints import (
    N_PROMPT,
    Oracle,
    deepseek_head,
    edited,
    noised_copy,
    theirs,
    tiny_checkpoint,
    with_config,
)
from tests.head_checkpoints import mtp_deepseek, write
from tests.oracle.feeding import (
    CPU,
    N_CTX,
    Runner,
    compare_cuts,
    compare_greedy,
    compare_ragged,
    difference,
    loaded,
    rows,
)
from tests.oracle.head_rounds import Pages, streams_of, text
from tests.oracle.lab import Bench, Case, Folders, Lab, draft_beside_trouble, play

pytestmark = pytest.mark.usefixtures("_selected")
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe, not normed": ("qwen3_moe", {"norm_topk_prob": False, "attention_bias": True}),
    "qwen3_moe, some dense": ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    "qwen3_moe, all experts": ("qwen3_moe", {"num_experts": 5, "num_experts_per_tok": 5}),
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe, groups": ("glm4_moe", {"n_group": 4, "topk_group": 2, "norm_topk_prob": False}),
    "glm4_moe, plain": (
        "glm4_moe",
        {"use_qk_norm": False, "attention_bias": False, "n_shared_experts": 2, "first_k_dense_replace": 2},
    ),
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3, plain": (
        "deepseek_v3",
        {"q_lora_rank": None, "attention_bias": True, "rope_interleave": False, "v_head_dim": 40},
    ),
    "glm4_moe_lite": ("glm4_moe_lite", {"n_shared_experts": 2}),
}
Tensors = dict[str, Tensor]


@pytest.mark.sampled(keep=8)
@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_whole_in_chunks_and_token_by_token(oracle: Callable[[str], Oracle], variant: str) -> None:
    folder, prompt, expected = oracle(variant)
    compare_cuts(Runner(loaded(folder)), prompt, expected)


@pytest.mark.sampled(keep=9)
@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("variant", ["qwen3_moe", "glm4_moe", "deepseek_v3"])
def test_ragged_spans_with_drafts_of_which_some_are_kept(
    oracle: Callable[[str], Oracle], variant: str
) -> None:
    folder, prompt, expected = oracle(variant)
    compare_ragged(Runner(loaded(folder)), prompt, expected, seed=3)


@pytest.mark.sampled(keep=3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("variant", ["qwen3_moe", "glm4_moe, groups", "deepseek_v2", "deepseek_v3"])
def test_rows_have_the_same_bits_in_every_cut(
    oracle: Callable[[str], Oracle], variant: str, dtype: torch.dtype
) -> None:
    folder, prompt, expected = oracle(variant)
    ids, runner = prompt.tolist(), Runner(loaded(folder, dtype))
    whole = runner.feed_chunks(0, ids, [N_PROMPT])
    assert torch.equal(runner.feed_chunks(1, ids, [33, 1, 15, 2, 49]), whole)
    assert torch.equal(runner.feed_chunks(2, ids, [1] * N_PROMPT), whole)
    runner.feed(rows(3, ids[::-1], 0, 60))
    beside = runner.feed(rows(3, ids[::-1], 60, 7), rows(4, ids, 0, 20), rows(2, ids, 95, 5))
    assert torch.equal(beside[7:27], whole[:20])
    assert torch.equal(beside[27:], whole[95:])
    assert (whole - expected).abs().mean() < 0.1 * expected.std()


@pytest.mark.sampled(keep=4)
@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("variant", ["qwen3_moe", "glm4_moe", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
def test_greedy_text(oracle: Callable[[str], Oracle], variant: str) -> None:
    folder, prompt, _ = oracle(variant)
    compare_greedy(Runner, folder, prompt[:30], 64)


def fuse(tensors: Tensors) -> None:
    """All experts of a layer in two tensors."""
    for layer in range(4):
        name, n = f"model.layers.{layer}.mlp.experts", 0
        gate_ups, downs = [], []
        while f"{name}.{n}.down_proj.weight" in tensors:
            gate, up, down = (
                tensors.pop(f"{name}.{n}.{part}_proj.weight") for part in ("gate", "up", "down")
            )
            gate_ups.append(torch.cat((gate, up)))
            downs.append(down)
            n += 1
        if n:
            tensors[f"{name}.gate_up_proj"], tensors[f"{name}.down_proj"] = (
                torch.stack(gate_ups),
                torch.stack(downs),
            )


def rename_like_mixtral(tensors: Tensors) -> None:
    for name in [name for name in tensors if ".mlp.experts." in name]:
        for ours, mixtral in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
            if ours in name:
                tensors[name.replace(ours, mixtral)] = tensors.pop(name)


@pytest.mark.sampled(keep=9)
@pytest.mark.parametrize("edit", [fuse, rename_like_mixtral])
@pytest.mark.parametrize("variant", ["qwen3_moe", "glm4_moe"])
def test_storage_formats(
    oracle: Callable[[str], Oracle], variant: str, edit: Callable[[Tensors], None], tmp_path: Path
) -> None:
    folder, prompt, expected = oracle(variant)
    copy = edited(folder, tmp_path / "copy", edit)
    assert load_file(copy / "model.safetensors").keys() != load_file(folder / "model.safetensors").keys()
    logits = Runner(loaded(copy)).feed(rows(0, prompt.tolist(), 0, N_PROMPT))
    assert difference(logits, expected) < 1e-4
    assert loaded(copy).n_params == loaded(folder).n_params


def test_n_params_counts_all_experts(oracle: Callable[[str], Oracle]) -> None:
    folder, _, _ = oracle("glm4_moe")
    stored = load_file(folder / "model.safetensors")
    assert loaded(folder).n_params == sum(one.numel() for one in stored.values())


def test_tensors_that_do_not_fit_are_refused(oracle: Callable[[str], Oracle], tmp_path: Path) -> None:
    folder, _, _ = oracle("glm4_moe")
    mlp = "model.layers.2.mlp"

    def refused(change: Callable[[Tensors], Any], error: type[Exception], message: str) -> None:
        copy = edited(folder, tmp_path / str(len(list(tmp_path.iterdir()))), change)
        with pytest.raises(error, match=message):
            loaded(copy)

    refused(
        lambda all: all.pop(f"{mlp}.experts.3.up_proj.weight"),
        CheckpointMismatch,
        r"missing: .*\.2\.mlp\.experts\.3\.up_proj",
    )
    refused(
        lambda all: all.pop(f"{mlp}.gate.weight"), CheckpointMismatch, r"missing: .*\.2\.mlp\.gate\.weight"
    )
    refused(
        lambda all: all.pop(f"{mlp}.gate.e_score_correction_bias"),
        CheckpointMismatch,
        "missing: .*e_score_correction_bias",
    )
    surplus = torch.ones(32, 64)
    refused(
        lambda all: all.update({f"{mlp}.experts.8.up_proj.weight": surplus}),
        CheckpointMismatch,
        r"unused: .*\.2\.mlp\.experts\.8\.up_proj",
    )
    refused(
        lambda all: all.update({f"{mlp}.shared_expert_gate.weight": torch.ones(1, 64)}),
        CheckpointMismatch,
        "unused: .*shared_expert_gate",
    )

    def both(tensors: Tensors) -> None:
        kept = dict(tensors)
        fuse(tensors)
        tensors[f"{mlp}.experts.0.up_proj.weight"] = kept[f"{mlp}.experts.0.up_proj.weight"]

    refused(both, CheckpointMismatch, r"unused: .*experts\.0\.up_proj")

    def transposed(tensors: Tensors) -> None:
        fuse(tensors)
        name = f"{mlp}.experts.down_proj"
        tensors[name] = tensors[name].transpose(1, 2).contiguous()

    refused(transposed, LoadError, r"experts\.down_proj has shape \[8, 32, 64\].*asks for \[8, 64, 32\]")


@pytest.mark.parametrize(
    ("variant", "changes", "message"),
    [
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok = 9: must be at most"),
        ("qwen3_moe", {"num_local_experts": None}, "num_local_experts is missing"),
        ("qwen3_moe", {"mlp_only_layers": [4]}, "mlp_only_layers = .* layers below 4"),
        ("qwen3_moe", {"mlp_only_layers": "all"}, 'mlp_only_layers = "all"'),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step = 0"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob = 1: must be true or false"),
        ("qwen3_moe", {"architectures": ["Qwen3ForCausalLM"]}, "num_local_experts = 8: not supported"),
        ("glm4_moe", {"n_group": 3}, "n_group = 3: must divide 8 experts"),
        ("glm4_moe", {"n_group": 8}, "n_group = 8: must divide 8 experts into groups of at least two"),
        ("glm4_moe", {"n_group": 2, "topk_group": 3}, "topk_group = 3: must be at most n_group = 2"),
        ("glm4_moe", {"n_group": 4, "num_experts_per_tok": 3}, "num_experts_per_tok = 3: 1 groups of 2"),
        ("glm4_moe", {"first_k_dense_replace": -1}, "first_k_dense_replace = -1"),
        ("glm4_moe", {"architectures": ["LlamaForCausalLM"]}, "n_routed_experts = 8: not supported"),
    ],
)
def test_configs_that_make_no_sense_are_refused(
    oracle: Callable[[str], Oracle], variant: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        loaded(with_config(oracle(variant)[0], tmp_path / "copy", **changes))


def test_older_config_keys(oracle: Callable[[str], Oracle], tmp_path: Path) -> None:
    """transformers 4 wrote `num_experts`; a GLM config that is silent about rotation means half of each head."""
    folder, prompt, expected = oracle("qwen3_moe")
    older = with_config(folder, tmp_path / "1", num_local_experts=None, num_experts=8)
    logits = Runner(loaded(older)).feed(rows(0, prompt.tolist(), 0, N_PROMPT))
    assert difference(logits, expected) < 1e-4
    folder, prompt, expected = oracle("glm4_moe")
    older = with_config(folder, tmp_path / "2", rope_parameters=None, rope_theta=1e6)
    assert "partial_rotary_factor" not in (older / "config.json").read_text()
    logits = Runner(loaded(older)).feed(rows(0, prompt.tolist(), 0, N_PROMPT))
    assert difference(logits, expected) < 1e-4


def test_the_correction_bias_and_the_router_of_glm_stay_float32(
    oracle: Callable[[str], Oracle], tmp_path: Path
) -> None:
    """Biases that differ by less than bfloat16 can say still decide in a bfloat16 network."""
    bias = 1 + 1e-4 * torch.tensor([3.0, 1, 7, 0, 6, 2, 5, 4])  # [8]

    def edit(tensors: Tensors) -> None:
        for name in tensors:
            if name.endswith("e_score_correction_bias"):
                tensors[name] = bias.clone()
            if name.endswith("mlp.gate.weight"):
                tensors[name] = torch.zeros_like(tensors[name])

    network = loaded(edited(oracle("glm4_moe")[0], tmp_path / "1", edit), torch.bfloat16)
    layer = network.decoder.blocks[1].ffn
    assert isinstance(layer, MoE)
    assert isinstance(network.decoder.blocks[0].ffn, GatedMLP)
    assert layer.router_dtype == torch.float32
    routed = route(torch.zeros(1, 8), layer.routing)
    assert routed.expert_ids.tolist() == [[2, 4]]
    assert torch.equal(routed.weights, torch.full((1, 2), 1.25))
    seen: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("slipstream.engine.layers.moe.route", lambda *all: seen.append(all[0]) or route(*all))
        layer(torch.ones(2, 64, dtype=torch.bfloat16))
    assert seen[0].dtype == torch.float32


def test_the_router_of_qwen_runs_in_the_dtype_of_the_network(oracle: Callable[[str], Oracle]) -> None:
    layer = loaded(oracle("qwen3_moe")[0], torch.bfloat16).decoder.blocks[0].ffn
    assert isinstance(layer, MoE)
    assert layer.router_dtype == torch.bfloat16


@pytest.mark.sampled(keep=3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("variant", ["qwen3_moe", "glm4_moe", "deepseek_v3"])
def test_the_text_is_that_of_plain_decoding(
    oracle: Callable[[str], Oracle], variant: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Through the engine, with a draft network that is right in part, cancels and preemptions."""
    folder, prompt, _ = oracle(variant)
    lab = Lab(Folders(folder, noised_copy(folder, tmp_path, 0.05)), dtype, n_ctx=N_CTX)
    n_drafted, n_accepted = draft_beside_trouble(lab, prompt.tolist())
    assert 0 < n_accepted < n_drafted


@pytest.mark.sampled(keep=9)
@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("variant", ["glm4_moe", "deepseek_v3"])
def test_the_mtp_layer(oracle: Callable[[str], Oracle], variant: str, tmp_path: Path) -> None:
    """The layer after the target's last, with experts of its own, against transformers' MtpModel."""
    folder, _, _ = oracle(variant)
    model = theirs(folder)
    head, tensors = deepseek_head(model)
    assert "model.layers.4.mlp.gate.e_score_correction_bias" in tensors
    copy = edited(folder, tmp_path / "copy", lambda all: all.update(tensors))
    target = loaded(copy)
    mtp, ids = load_mtp(copy, target, N_CTX), text(7, 61)
    assert mtp.n_params == sum(one.numel() for one in tensors.values())
    (layer,) = mtp.modules
    assert isinstance(layer.block.ffn, MoE)
    (features,) = streams_of(target, ids[:-1], mtp.taps)
    pages, at = Pages(mtp.needs), torch.arange(60)[None]
    with torch.inference_mode():
        hidden = model(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states[-1]
        true = head.forward_layer(0, hidden, at, None, input_ids=torch.tensor([ids[1:]]))  # [1, 60, d_model]
        for a, b in ((0, 37), (37, 38), (38, 60)):
            logits, recurrence = pages.run(layer, features[a:b], Span(1, ids[1:][a:b], a, 0, b - a))
            assert difference(recurrence, true[0, a:b]) < 1e-4
            assert difference(logits, model.lm_head(true)[0, a:b]) < 1e-4
    without = edited(copy, tmp_path / "without", lambda all: all.pop("model.layers.4.mlp.experts.down_proj"))
    with pytest.raises(CheckpointMismatch, match=r"missing: model\.layers\.4\.mlp\.experts\.down_proj"):
        load_mtp(without, target, N_CTX)


@pytest.mark.sampled(keep=9)
@pytest.mark.parametrize("variant", ["glm4_moe", "deepseek_v3"])
def test_text_drafted_by_the_mtp_layer(oracle: Callable[[str], Oracle], variant: str, tmp_path: Path) -> None:
    folder, prompt, _ = oracle(variant)
    _, tensors = deepseek_head(theirs(folder))
    copy = edited(folder, tmp_path / "copy", lambda all: all.update(tensors))
    lab = Lab(Folders(copy, folder, {"draft-mtp": copy}), torch.float32, n_ctx=N_CTX)
    cases = [
        Case(tuple(prompt[: 20 + 30 * i].tolist()), Sampling(seed=i, temperature=0.7 * i), max_tokens=24)
        for i in range(2)
    ]
    expected = play(lab, Bench(), cases).tokens
    played = play(lab, Bench(("draft-mtp",), n_slots=2, adaptive=False), cases)
    assert played.tokens == expected
    assert all(one.speculation.n_drafted > 0 for one in played.done.values())


def test_a_head_with_experts_needs_a_target_with_experts(
    oracle: Callable[[str], Oracle], tmp_path: Path
) -> None:
    dense = loaded(tiny_checkpoint("qwen3", tmp_path / "dense"))
    tensors = mtp_deepseek("model.layers.0.", 4, head_norms=True, d_head=32)
    folder = write(tmp_path / "head", tensors | {"model.layers.0.mlp.gate.weight": torch.ones(8, 64)}, None)
    with pytest.raises(UnsupportedModel, match=r"layers\.0\.mlp\.gate\.weight: a mixture of experts"):
        load_mtp(folder, dense, N_CTX)


@pytest.mark.usefixtures("ops")
def test_a_shared_expert_with_a_gate(tmp_path: Path) -> None:
    """The block of Qwen3-Next and Qwen3.5-MoE, against transformers' own."""
    config = Qwen3NextConfig(
        hidden_size=48,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=20,
        shared_expert_intermediate_size=36,
        norm_topk_prob=True,
    )
    torch.manual_seed(0)
    block = Qwen3NextSparseMoeBlock(config).eval()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    tensors: Tensors = {f"mlp.{name}": one.detach().clone() for name, one in block.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    weights = Weights(tmp_path, torch.float32, CPU)
    spec = MoESpec(
        d_model=48,
        d_ffn=20,
        n_experts=6,
        routing=Routing(top_k=3, scores="softmax", normed=True),
        shared=SharedSpec(name="shared_expert", d_ffn=36, gated=True),
    )
    layer = spec.load(weights, "mlp")
    weights.finish()
    x = torch.randn(17, 48)
    with torch.inference_mode():
        expected = block(x[None])[0]
        assert expected.std() > 0.3
        assert difference(layer(x), expected) < 1e-5
