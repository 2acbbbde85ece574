"""Folders of draft heads: what their configs mean, what is shared, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from slipstream.engine.batch import Span
from slipstream.engine.errors import CheckpointMismatch, DraftMismatch, LoadError, UnsupportedModel
from slipstream.engine.models.heads import block_backbone, eagle3
from slipstream.engine.models.heads.dflash import load_dflash
from slipstream.engine.models.heads.dspark import load_dspark
from slipstream.engine.models.heads.eagle3 import load_eagle3
from slipstream.engine.models.heads.head_choices import HeadChoices
from slipstream.engine.models.heads.mtp import load_mtp
from slipstream.engine.models.network import Network
from slipstream.engine.models.reading.fields import Fields
from slipstream.engine.models.registry import load_network
from slipstream.engine.speculate.registry import kind_of
from tests import head_checkpoints as made
from tests.checkpoints import tiny_checkpoint
from tests.oracle.head_rounds import CPU, N_CTX, VOCAB, Pages, streams_of, text

pytestmark = pytest.mark.usefixtures("_selected")
SAFEAI = made.EAGLE3["SafeAILab"]
SPECFORGE = made.EAGLE3["SpecForge"]


@pytest.fixture(scope="module")
def target(folder_of: Callable[[str], Path], _selected: None) -> Network:
    return load_network(folder_of("llama"), torch.float32, CPU, N_CTX, VOCAB)


@pytest.fixture(scope="module")
def qwen3(folder_of: Callable[[str], Path], _selected: None) -> Network:
    return load_network(folder_of("qwen3"), torch.float32, CPU, N_CTX, VOCAB)


def with_layers(network: Network, n_layers: int) -> Network:
    """The same network, said to have another number of layers."""
    return replace(network, config=replace(network.config, n_layers=n_layers))


# --- the numbers of hidden states ----------------------------------------------------------------------------

SPECULATORS = {"speculators_model_type": "eagle3"}


@pytest.mark.parametrize(
    ("config", "layout", "taps"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "SafeAILab", (2, 18, 33)),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "SpecForge", (2, 18, 33)),
        ({"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": None}, "SpecForge", (2, 18, 33)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 32]}}, "SpecForge", (2, 18, 33)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, "SpecForge", (2, 18, 33)),
        ({"architectures": ["Eagle3LlamaForCausalLM"]}, "AngelSlim", (2, 18, 33)),
        ({"aux_hidden_states_layer_ids": [1, 17, 33]}, "AngelSlim", (2, 18, 34)),
        (SPECULATORS, "speculators", (2, 18, 33)),
        ({**SPECULATORS, "eagle_aux_hidden_state_layer_ids": [2, 18, 33]}, "speculators", (2, 18, 33)),
    ],
)
def test_what_eagle3_reads(
    target: Network, config: dict[str, Any], layout: str, taps: tuple[int, ...]
) -> None:
    fields = Fields(config, "config.json")
    assert eagle3.layout_of(fields) == layout
    assert eagle3.resolve_taps(fields, with_layers(target, 36)) == taps


@pytest.mark.parametrize(
    ("config", "n_layers", "taps"),
    [
        ({"dflash_config": {"target_layer_ids": [1, 9, 17]}}, 5, (2, 10, 18)),
        ({"target_layer_ids": [1, 9]}, 5, (2, 10)),
        ({"aux_hidden_state_layer_ids": [2, 10]}, 5, (2, 10)),
        ({}, 1, (19,)),
        ({}, 5, (2, 10, 18, 26, 34)),
        ({}, 2, (2, 34)),
    ],
)
def test_what_block_drafts_read(
    target: Network, config: dict[str, Any], n_layers: int, taps: tuple[int, ...]
) -> None:
    fields = Fields(config, "config.json")
    assert block_backbone.resolve_taps(fields, n_layers, with_layers(target, 36)) == taps


def test_the_caller_may_name_other_hidden_states(target: Network, tmp_path: Path) -> None:
    folder = made.write(tmp_path / "eagle", made.eagle3_tensors(SAFEAI), SAFEAI["config"])
    assert load_eagle3(folder, target, N_CTX, HeadChoices([0, 6, 7])).taps == (0, 6, 7)
    flash = made.write(tmp_path / "flash", made.dflash(1, n_layers=1, n_taps=3), made.DFLASH_CONFIG)
    assert load_dflash(flash, target, N_CTX, HeadChoices([7, 6, 5])).taps == (7, 6, 5)
    for load, one in ((load_eagle3, folder), (load_dflash, flash)):
        with pytest.raises(DraftMismatch, match=r"hidden state 8 is asked for, the target has 0 to 7"):
            load(one, target, N_CTX, HeadChoices([1, 2, 8]))
        with pytest.raises(DraftMismatch, match=r"fc\.weight reads 192 numbers, 2 hidden states .* have 128"):
            load(one, target, N_CTX, HeadChoices([1, 2]))


def test_a_target_too_small_for_the_usual_hidden_states_is_refused(target: Network, tmp_path: Path) -> None:
    folder = made.write(tmp_path, made.eagle3_tensors(SAFEAI), SAFEAI["config"])
    with pytest.raises(DraftMismatch, match="hidden state -1 is asked for"):
        load_eagle3(folder, with_layers(target, 2), N_CTX)


@pytest.mark.parametrize(
    ("config", "from_anchor"),
    [
        (made.DSPARK_CONFIG, True),
        ({**made.DSPARK_CONFIG, "sample_from_anchor": False}, False),
        ({**made.DSPARK_CONFIG, "speculators_model_type": "dspark"}, False),
        ({"speculators_model_type": "dspark", "sample_from_anchor": True}, True),
        (made.DFLASH_CONFIG, False),
        ({"architectures": ["DSparkDraftModel"], "dflash_config": {"block_size": 4}}, False),
    ],
)
def test_whether_the_anchor_predicts(config: dict[str, Any], from_anchor: bool) -> None:
    assert block_backbone.read_from_anchor(Fields(config, "config.json")) is from_anchor


# --- what is shared with the target, and vocabularies --------------------------------------------------------


def test_what_a_head_lacks_or_repeats_is_the_targets(target: Network, tmp_path: Path) -> None:
    tensors = made.eagle3_tensors(SPECFORGE)
    tensors["embed_tokens.weight"] = target.decoder.embedding.weight.clone()
    del tensors["lm_head.weight"], tensors["d2t"], tensors["t2d"]
    head = load_eagle3(made.write(tmp_path, tensors, SPECFORGE["config"]), target, N_CTX)
    assert head.embedding is target.decoder.embedding
    assert head.head is target.decoder.head
    assert head.n_params == sum(one.numel() for one in tensors.values()) - 384 * 64


def test_an_embedding_without_a_head_is_refused(target: Network, tmp_path: Path) -> None:
    tensors = made.eagle3_tensors(SPECFORGE)
    del tensors["lm_head.weight"], tensors["d2t"], tensors["t2d"]
    with pytest.raises(
        UnsupportedModel, match=r"embed_tokens\.weight differs .* there is no lm_head\.weight"
    ):
        load_eagle3(made.write(tmp_path, tensors, SPECFORGE["config"]), target, N_CTX)


def test_padding_rows_are_no_tokens(tmp_path: Path) -> None:
    """Ids that only the padded matrices have: known by number, never guessed."""
    network = load_network(
        tiny_checkpoint("llama", tmp_path / "t", vocab=448), torch.float32, CPU, N_CTX, VOCAB
    )
    tensors = made.eagle3_tensors(SAFEAI)
    ids = torch.arange(100)
    tensors["d2t"] = torch.cat((10 + ids[:90], 400 + ids[90:] - 90)) - ids
    reduced = load_eagle3(
        made.write(tmp_path / "1", tensors, SAFEAI["config"]), network, N_CTX, HeadChoices([1, 2, 3])
    )
    del tensors["d2t"], tensors["t2d"]
    tensors["lm_head.weight"] = made.Maker(1).matrix(448, 64)
    full = load_eagle3(
        made.write(tmp_path / "2", tensors, SAFEAI["config"]), network, N_CTX, HeadChoices([1, 2, 3])
    )
    for head, n_known in ((reduced, 90), (full, 384)):
        pages, token_ids = Pages(head.needs), text(1, 11)
        hidden = head.fuse(streams_of(network, token_ids[:10], head.taps))
        logits, _ = pages.run(head, hidden, Span(0, token_ids[1:], 0, 0, 10))
        assert logits.shape == (10, 384)
        assert logits.isfinite().sum(-1).tolist() == [n_known] * 10


def d2t(change: Callable[[Tensor], Any]) -> made.Tensors:
    """SafeAILab's tensors with another table of ids."""
    tensors = made.eagle3_tensors(SAFEAI)
    change(tensors["d2t"])
    return tensors


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (d2t(lambda table: table[3].add_(400)), r"d2t\[3\] maps draft id 3 to 493, outside .* of 384"),
        (d2t(lambda table: table[0].sub_(85)), r"d2t\[0\] maps draft id 0 to -1, outside"),
        (d2t(lambda table: table[4].sub_(3)), "d2t maps two draft ids to one token"),
        (made.eagle3_tensors(SAFEAI) | {"d2t": torch.zeros(99, dtype=torch.int64)}, r"d2t has shape \[99\]"),
        (made.eagle3_tensors(SAFEAI) | {"d2t": torch.zeros(100)}, r"d2t has dtype F32; only I64, I32"),
    ],
)
def test_tables_of_ids_that_cannot_be(
    target: Network, tmp_path: Path, tensors: made.Tensors, message: str
) -> None:
    with pytest.raises(LoadError, match=message):
        load_eagle3(made.write(tmp_path, tensors, SAFEAI["config"]), target, N_CTX)


def test_a_reduced_head_without_its_table_is_refused(target: Network, tmp_path: Path) -> None:
    tensors = made.eagle3_tensors(SAFEAI)
    del tensors["d2t"]
    with pytest.raises(LoadError, match=r"lm_head\.weight has 100 rows, the target 384 tokens .* no d2t"):
        load_eagle3(made.write(tmp_path, tensors, SAFEAI["config"]), target, N_CTX)


# --- tensors that do not fit, variants -----------------------------------------------------------------------

Case = tuple[Callable[..., Any], made.Tensors, Mapping[str, Any] | None]
EAGLE: Case = (load_eagle3, made.eagle3_tensors(SAFEAI), SAFEAI["config"])
FLASH: Case = (load_dflash, made.dflash(1, n_layers=2, n_taps=3), made.DFLASH_CONFIG)
SPARK: Case = (load_dspark, made.dspark(1, n_layers=2, n_taps=2, rank=8), made.DSPARK_CONFIG)
MTP: Case = (load_mtp, made.mtp_deepseek("model.layers.6.", 1, head_norms=True, d_head=32), None)
QWEN_MTP: Case = (load_mtp, made.mtp_qwen(1, d_head=32), None)
KEYS, MARKOV = "layers.0.self_attn.k_proj.weight", "markov_head.markov_w1.weight"
ONE = {"x": torch.ones(1)}


@pytest.mark.parametrize(
    ("case", "without", "extra", "error", "message"),
    [
        (
            EAGLE,
            "midlayer.hidden_norm.weight",
            {},
            CheckpointMismatch,
            r"missing: midlayer\.hidden_norm\.weight",
        ),
        (EAGLE, "norm.weight", {}, CheckpointMismatch, r"missing: norm\.weight"),
        (EAGLE, "fc.weight", {}, LoadError, r"tensor fc\.weight is missing"),
        (EAGLE, "", {"midlayer.x": torch.ones(1)}, CheckpointMismatch, r"unused: midlayer\.x"),
        (EAGLE, "", {"mask_hidden": torch.ones(1)}, UnsupportedModel, r"mask_hidden: parallel drafting"),
        (EAGLE, "", {"midlayer.mlp.experts.0.w": torch.ones(1)}, UnsupportedModel, "mixture of experts"),
        (FLASH, "hidden_norm.weight", {}, CheckpointMismatch, r"missing: hidden_norm\.weight"),
        (FLASH, "layers.1.self_attn.k_norm.weight", {}, CheckpointMismatch, r"layers\.1\.self_attn\.k_norm"),
        (FLASH, "", {"layers.4.x": torch.ones(1)}, CheckpointMismatch, r"unused: layers\.4\.x"),
        (FLASH, "", {"layers.0.self_attn.k_proj_target.weight": torch.ones(1)}, UnsupportedModel, "DFlare"),
        (FLASH, "", {"layer_fusion_weights": torch.ones(1)}, UnsupportedModel, "DFlare"),
        (FLASH, "", {"gru.weight_ih_l0": torch.ones(1)}, UnsupportedModel, "Domino"),
        (SPARK, "markov_head.markov_w2.weight", {}, LoadError, r"markov_w2\.weight is missing"),
        (SPARK, "", {"markov_head.gate_proj.weight": torch.ones(1)}, UnsupportedModel, "gated correction"),
        (SPARK, "", {"confidence_head.x": torch.ones(1)}, CheckpointMismatch, r"unused: confidence_head\.x"),
        (MTP, "model.layers.6.hnorm.weight", {}, CheckpointMismatch, r"missing: model\.layers\.6\.hnorm"),
        (MTP, "model.layers.6.eh_proj.weight", {}, LoadError, "no MTP head here"),
        (MTP, "", {"model.layers.6.x": torch.ones(1)}, CheckpointMismatch, r"unused: model\.layers\.6\.x"),
        (MTP, "", {"model.layers.6.mlp.gate.weight": torch.ones(1)}, UnsupportedModel, "mixture of experts"),
        (MTP, "", {"model.mtp.layers.0.eh_proj.weight": torch.ones(1)}, UnsupportedModel, "one kind"),
        (MTP, "", QWEN_MTP[1], UnsupportedModel, "not of one kind"),
        (MTP, "", {"model.layers.8.eh_proj.weight": torch.ones(64, 128)}, LoadError, r"has layers \[6, 8\]"),
        (QWEN_MTP, "", {"mtp.layers.1.x": torch.ones(1)}, CheckpointMismatch, r"unused: mtp\.layers\.1\.x"),
        (
            EAGLE,
            "",
            {"fc.weight": torch.tensor(1.0)},
            LoadError,
            r"fc\.weight has shape \[\], .* not a matrix",
        ),
        (FLASH, "", {KEYS: torch.ones(0, 64)}, LoadError, r"k_proj\.weight has shape \[0, 64\]"),
        (SPARK, "", {MARKOV: torch.ones(1, 384, 8)}, LoadError, r"markov_w1\.weight has shape \[1, 384, 8\]"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    qwen3: Network,
    tmp_path: Path,
    case: Case,
    without: str,
    extra: made.Tensors,
    error: type[LoadError],
    message: str,
) -> None:
    load, tensors, config = case
    load(made.write(tmp_path / "whole", tensors, config), qwen3, N_CTX)
    changed = {name: one for name, one in tensors.items() if name != without} | extra
    with pytest.raises(error, match=message):
        load(made.write(tmp_path / "changed", changed, config), qwen3, N_CTX)


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        (EAGLE, {"hidden_act": "gelu"}, "hidden_act"),
        (EAGLE, {"num_attention_heads": 3}, r"q_proj\.weight has 64 rows for 3 query heads"),
        (
            EAGLE,
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": "1,2"}},
            "must be a list of layer numbers",
        ),
        (EAGLE, {"eagle_config": {"parallel_draft_step": 4}}, "parallel_draft_step = 4: not supported"),
        (EAGLE, {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state = false"),
        (FLASH, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        (FLASH, {"num_target_layers": 7}, "num_target_layers = 7, the target has 6"),
        (FLASH, {"causal": True}, "causal"),
        (FLASH, {"block_size": 1}, "block_size = 1: must be a whole number of at least 2"),
        (
            FLASH,
            {"dflash_config": {"target_layer_ids": [0, 2, 4]}},
            "mask_token_id = null: must be a token id",
        ),
        (
            FLASH,
            {"dflash_config": {"mask_token_id": 384}},
            "mask_token_id = 384: must be a token id below 384",
        ),
        (SPARK, {"markov_head_type": "rnn"}, 'markov_head_type = "rnn": only vanilla'),
    ],
)
def test_configs_that_ask_for_something_else_are_refused(
    qwen3: Network, tmp_path: Path, case: Case, change: dict[str, Any], message: str
) -> None:
    load, tensors, config = case
    with pytest.raises(LoadError, match=message):
        load(made.write(tmp_path, tensors, {**(config or {}), **change}), qwen3, N_CTX)


def test_a_mask_vector_in_a_file_of_its_own_is_refused(target: Network, tmp_path: Path) -> None:
    folder = made.write(tmp_path, FLASH[1], FLASH[2])
    (folder / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(UnsupportedModel, match=r"mask_embedding\.pt"):
        load_dflash(folder, target, N_CTX)


def test_what_only_looks_like_a_head_is_not_left_alone(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """A target's surplus tensors are refused unless the matrix that every MTP head has is among them."""
    for i, extra in enumerate(("mtp.x", "model.layers.6.enorm.weight", "model.layers.2.eh_proj.weight")):
        tensors = load_file(folder_of("llama") / "model.safetensors") | {extra: torch.ones(1)}
        config = json.loads((folder_of("llama") / "config.json").read_text())
        with pytest.raises(CheckpointMismatch, match=f"unused: {extra}"):
            load_network(made.write(tmp_path / str(i), tensors, config), torch.float32, CPU, N_CTX, VOCAB)


# --- kinds ---------------------------------------------------------------------------------------------------


def test_which_kind_a_folder_holds(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    for layout, case in made.EAGLE3.items():
        folder = made.write(tmp_path / layout, made.eagle3_tensors(case), case["config"])
        assert kind_of(folder) == "draft-eagle3"
    heads = {"dflash": FLASH, "dspark": SPARK, "mtp": MTP}
    for name, (_, tensors, config) in heads.items():
        assert kind_of(made.write(tmp_path / name, tensors, config)) == f"draft-{name}"
    assert kind_of(made.write(tmp_path / "qwen", QWEN_MTP[1], None)) == "draft-mtp"
    assert kind_of(made.write(tmp_path / "mimo", made.mtp_mimo(1), None)) == "draft-mtp"
    zero = made.mtp_deepseek("model.layers.0.", 1)
    assert kind_of(made.write(tmp_path / "zero", zero, None)) == "draft-mtp"
    assert kind_of(folder_of("llama")) == "draft-model"
    exported = {"speculators_model_type": "dflash"}
    assert kind_of(made.write(tmp_path / "exported", ONE, exported)) == "draft-dflash"
    with pytest.raises(UnsupportedModel, match='speculators_model_type = "medusa"'):
        kind_of(made.write(tmp_path / "medusa", ONE, {"speculators_model_type": "medusa"}))
    with pytest.raises(UnsupportedModel, match="neither a model nor a draft head"):
        kind_of(made.write(tmp_path / "nothing", ONE, None))
