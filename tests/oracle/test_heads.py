"""Recurrent draft heads against their published formulas, in every layout, over rounds with rejections."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from slipstream.engine.batch import Span
from slipstream.engine.errors import DraftMismatch
from slipstream.engine.models.heads.eagle3 import load_eagle3
from slipstream.engine.models.heads.head_choices import HeadChoices
from slipstream.engine.models.heads.mtp import Mtp, load_mtp
from slipstream.engine.models.network import Network
from slipstream.engine.models.registry import load_network
from tests import head_checkpoints as made
from tests.oracle import head_formulas as formulas
from tests.oracle.head_formulas import Formula, MtpNames
from tests.oracle.head_rounds import (
    CPU,
    N_CTX,
    TOLERANCE,
    VOCAB,
    Pages,
    Reference,
    Rounds,
    lanes_of,
    play,
    streams_of,
    text,
    worst,
)

pytestmark = pytest.mark.usefixtures("_selected")
Folders = Callable[[str], Path]


@pytest.mark.sampled(keep=3)
@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("layout", made.EAGLE3)
def test_eagle3(folder_of: Folders, tmp_path: Path, layout: str) -> None:
    check_eagle3(folder_of("llama"), tmp_path, layout)


@pytest.mark.sampled(keep=2)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "mistral3"])
def test_eagle3_beside_text_models_within_wrappers(folder_of: Folders, tmp_path: Path, family: str) -> None:
    check_eagle3(folder_of(family), tmp_path, "AngelSlim")


def test_heads_share_the_tables_of_a_target_with_sections(folder_of: Folders, tmp_path: Path) -> None:
    """Their configs need not have the sections."""
    target = load_network(folder_of("qwen3_vl"), torch.float32, CPU, N_CTX, VOCAB)
    assert target.config.rope.sections
    case = made.EAGLE3["AngelSlim"]
    rope = {"rope_theta": target.config.rope.theta, "rope_scaling": None}
    folder = made.write(tmp_path, made.eagle3_tensors(case), {**case["config"], **rope})
    own = load_eagle3(folder, target, N_CTX).first.attention.rope
    (tables,) = target.decoder.ropes.values()
    assert own is tables


def check_eagle3(folder: Path, tmp_path: Path, layout: str) -> None:
    """Of one layout beside a target, against the published formula."""
    case = made.EAGLE3[layout]
    tensors = made.eagle3_tensors(case)
    target = load_network(folder, torch.float32, CPU, N_CTX, VOCAB)
    head = load_eagle3(made.write(tmp_path, tensors, case["config"]), target, N_CTX)
    assert (head.layout, head.taps, head.d_model) == (layout, case["taps"], 64)
    assert head.n_params == sum(one.numel() for name, one in tensors.items() if name not in ("d2t", "t2d"))
    options = case.get("options", set()) | ({"fc_norm"} if "fc_norm" in case else set())
    formula = Formula(tensors, 10000.0, 1e-5, case.get("d_head", 16), options=options)

    def reference(embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        known, out = formulas.eagle3(formula, case.get("prefix", "midlayer"), embedded, hidden)
        logits = torch.full((len(known), VOCAB), float("-inf"))
        for i in range(known.shape[1]):
            logits[:, i + (int(tensors["d2t"][i]) if "d2t" in tensors else 0)] = known[:, i]
        return logits, out

    embedding = tensors.get("embed_tokens.weight", target.decoder.embedding.weight)
    lanes = lanes_of(head, target)
    for lane in lanes:
        true = streams_of(target, lane.ids[:-1], case["taps"])
        assert worst(lane.fused, formulas.eagle3_fuse(formula, true)) < TOLERANCE
    assert play(Rounds(head, embedding, reference), lanes) < TOLERANCE


DEEPSEEK = MtpNames(
    "model.layers.6.enorm",
    "model.layers.6.hnorm",
    "model.layers.6.eh_proj",
    "model.layers.6",
    "model.layers.6.shared_head.norm",
)
DEEPSEEK_ZERO = MtpNames(*(name.replace("layers.6", "layers.0") for name in vars(DEEPSEEK).values() if name))
MIMO = MtpNames(
    "model.mtp_layers.0.token_layernorm",
    "model.mtp_layers.0.hidden_layernorm",
    "model.mtp_layers.0.input_proj",
    "model.mtp_layers.0",
    "model.mtp_layers.0.final_layernorm",
    hidden_first=True,
)
QWEN = MtpNames("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.layers.0", "mtp.norm")


def with_head(folder: Path, target: Path, tensors: made.Tensors, architecture: str | None = None) -> Path:
    """A copy of a target's folder with an MTP head in the same file, under another architecture's name if given."""
    shutil.copytree(target, folder)
    if architecture:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    return made.add_tensors(folder, tensors)


def mtp_reference(formula: Formula, names: MtpNames, matrix: Tensor) -> Reference:
    """matrix: the target's head, [vocab, d_model]."""

    def reference(embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        out = formulas.mtp(formula, names, embedded, hidden)
        return out @ matrix.T, out

    return reference


def check_mtp(head: Mtp, target: Network, formula: Formula, names: MtpNames) -> float:
    """Play rounds against the formula; both targets here have one matrix for embedding and head."""
    assert head.taps == (7,)
    assert len(head.modules) == 1
    embedding = target.decoder.embedding.weight
    return play(Rounds(head, embedding, mtp_reference(formula, names, embedding)), lanes_of(head, target))


@pytest.mark.sampled(keep=6)
@pytest.mark.usefixtures("ops")
def test_mtp_in_the_names_of_deepseek(folder_of: Folders, tmp_path: Path) -> None:
    """In the target's folder, with copies of its embedding and head, which are shared and not loaded."""
    original = folder_of("qwen3")
    tensors = made.mtp_deepseek("model.layers.6.", 4, head_norms=True, d_head=32)
    n_params = sum(one.numel() for one in tensors.values())
    shared = load_file(original / "model.safetensors")["model.embed_tokens.weight"]
    copies = {
        f"model.layers.6.{name}.weight": shared.clone() for name in ("embed_tokens", "shared_head.head")
    }
    folder = with_head(tmp_path / "both", original, tensors | copies)
    target = load_network(folder, torch.float32, CPU, N_CTX, VOCAB)
    assert target.n_params == load_network(original, torch.float32, CPU, N_CTX, VOCAB).n_params
    head = load_mtp(folder, target, N_CTX)
    assert head.n_params == n_params
    assert head.modules[0].embedding is target.decoder.embedding
    assert head.modules[0].head is target.decoder.head
    assert head.modules[0].block.mixer.rope is target.decoder.blocks[0].mixer.rope
    assert check_mtp(head, target, Formula(tensors, 1e6, 1e-6, 32), DEEPSEEK) < TOLERANCE


@pytest.mark.sampled(keep=6)
def test_mtp_with_its_own_embedding_and_head(folder_of: Folders, tmp_path: Path) -> None:
    """In a folder of its own; what differs from the target's is used as it is."""
    make = made.Maker(3)
    own, matrix = make.matrix(VOCAB, 64), make.matrix(VOCAB, 64)
    tensors = made.mtp_deepseek("model.layers.0.", 4, head_norms=True, d_head=32)
    ends = {"model.layers.0.embed_tokens.weight": own, "model.layers.0.shared_head.head.weight": matrix}
    target = load_network(folder_of("qwen3"), torch.float32, CPU, N_CTX, VOCAB)
    head = load_mtp(made.write(tmp_path, tensors | ends, None), target, N_CTX)
    reference = mtp_reference(Formula(tensors, 1e6, 1e-6, 32), DEEPSEEK_ZERO, matrix)
    assert play(Rounds(head, own, reference), lanes_of(head, target)) < TOLERANCE


@pytest.mark.sampled(keep=6)
@pytest.mark.usefixtures("ops")
def test_mtp_of_mimo(folder_of: Folders, tmp_path: Path) -> None:
    tensors = made.mtp_mimo(5)
    folder = with_head(tmp_path / "both", folder_of("qwen2"), tensors, "MiMoForCausalLM")
    target = load_network(folder, torch.float32, CPU, N_CTX, VOCAB)
    head = load_mtp(folder, target, N_CTX)
    assert check_mtp(head, target, Formula(tensors, 1e6, 1e-6, 16), MIMO) < TOLERANCE


@pytest.mark.sampled(keep=6)
@pytest.mark.usefixtures("ops")
def test_mtp_in_the_names_of_qwen(folder_of: Folders, tmp_path: Path) -> None:
    """All norms are stored as what is added to 1; a folder without a config is read by the target's."""
    tensors = made.mtp_qwen(6, d_head=32)
    target = load_network(folder_of("qwen3"), torch.float32, CPU, N_CTX, VOCAB)
    head = load_mtp(made.write(tmp_path, tensors, None), target, N_CTX)
    assert check_mtp(head, target, Formula(tensors, 1e6, 1e-6, 32, one_plus=True), QWEN) < TOLERANCE


def test_mtp_recycled_before_the_norm(folder_of: Folders, tmp_path: Path) -> None:
    tensors = made.mtp_deepseek("model.layers.6.", 4, head_norms=True, d_head=32)
    target = load_network(folder_of("qwen3"), torch.float32, CPU, N_CTX, VOCAB)
    folder = made.write(tmp_path, tensors, None)
    normed, raw = (load_mtp(folder, target, N_CTX, HeadChoices(recycled=how)) for how in ("auto", "raw"))
    with pytest.raises(DraftMismatch, match="has one layer"):
        load_mtp(folder, target, N_CTX, HeadChoices(recycled="target"))
    span, results = Span(0, text(1, 9), 0, 0, 9), []
    hidden = streams_of(target, text(2, 9), (7,))[0]
    for head in (normed, raw):
        pages = Pages(head.needs)
        results.append(pages.run(head.modules[0], hidden, span))
    assert torch.equal(results[0][0], results[1][0])
    formula = Formula(tensors, 1e6, 1e-6, 32)
    assert worst(formula.norm("model.layers.6.shared_head.norm", results[1][1]), results[0][1]) < TOLERANCE
    assert not torch.equal(results[0][1], results[1][1])


@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("n_layers", [1, 2])
def test_mtp_is_that_of_transformers(folder_of: Folders, tmp_path: Path, n_layers: int) -> None:
    """Against MtpModel on a real target, each layer with keys and values of its own."""
    original = folder_of("qwen3")
    model = AutoModelForCausalLM.from_pretrained(original, attn_implementation="eager", dtype=torch.float32)
    model.config.num_mtp_layers = n_layers
    model.config.mtp_layer_types = ["full_attention"] * n_layers
    torch.manual_seed(0)
    oracle = MtpModel(model, n_layers).eval()
    make, tensors = made.Maker(12), {}
    with torch.no_grad():
        for name, parameter in oracle.layers.named_parameters():
            parameter.copy_(
                make.scale(len(parameter)) if parameter.dim() == 1 else make.matrix(*parameter.shape)
            )
            i, _, rest = name.partition(".")
            rest = rest.replace("mtp_block.", "").replace("post_norm", "shared_head.norm")
            tensors[f"model.layers.{6 + int(i)}.{rest}"] = parameter.clone()
    folder = with_head(tmp_path / "both", original, tensors)
    target = load_network(folder, torch.float32, CPU, N_CTX, VOCAB)
    head, ids = load_mtp(folder, target, N_CTX), text(7, 61)
    assert len(head.modules) == n_layers
    pages, at = Pages(head.needs), torch.arange(60)[None]
    shifted = [ids[1:][layer:] + ids[:layer] for layer in range(n_layers)]  # once more per layer
    (features,) = streams_of(target, ids[:-1], head.taps)
    with torch.inference_mode():
        true = [model(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states[-1]]
        for layer, tokens in enumerate(shifted):
            true.append(oracle.forward_layer(layer, true[-1], at, None, input_ids=torch.tensor([tokens])))
        for a, b in ((0, 37), (37, 38), (38, 60)):
            hidden = features[a:b]
            for layer, tokens in enumerate(shifted):
                span = Span(1, tokens[a:b], a, 0, b - a)
                logits, hidden = pages.run(head.modules[layer], hidden, span)
                assert worst(hidden, true[layer + 1][0, a:b]) < TOLERANCE
                assert worst(logits, model.lm_head(true[layer + 1])[0, a:b]) < TOLERANCE


def test_rows_do_not_depend_on_the_width_of_the_pass(folder_of: Folders, tmp_path: Path) -> None:
    """Bit for bit, alone and beside other spans."""
    eagle = made.write(
        tmp_path, made.eagle3_tensors(made.EAGLE3["SpecForge"]), made.EAGLE3["SpecForge"]["config"]
    )
    for dtype in (torch.float32, torch.bfloat16):
        target, ids = load_network(folder_of("llama"), dtype, CPU, N_CTX, VOCAB), text(1, 41)
        head = load_eagle3(eagle, target, N_CTX)
        hidden = head.fuse(streams_of(target, ids[:40], head.taps))
        pages, alone = Pages(head.needs, dtype), Pages(head.needs, dtype)
        whole = pages.run(head, hidden, Span(0, ids[1:], 0, 0, 40))
        for p in range(40):
            spans = Span(1, ids[:3], 0, 0, 0), Span(0, [ids[p + 1]], p, 0, 1)
            row = alone.run(head, torch.cat((hidden[:3], hidden[p : p + 1])), *spans)
            assert torch.equal(row[0][0], whole[0][p])
            assert torch.equal(row[1][0], whole[1][p])


def test_heads_in_bfloat16(folder_of: Folders, tmp_path: Path) -> None:
    """Near float32's logits, with the same ids unknown."""
    folder = made.write(
        tmp_path, made.eagle3_tensors(made.EAGLE3["SafeAILab"]), made.EAGLE3["SafeAILab"]["config"]
    )
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        target, ids = load_network(folder_of("llama"), dtype, CPU, N_CTX, VOCAB), text(1, 41)
        head = load_eagle3(folder, target, N_CTX)
        pages, hidden = Pages(head.needs, dtype), head.fuse(streams_of(target, ids[:40], head.taps))
        results.append(pages.run(head, hidden, Span(0, ids[1:], 0, 0, 40)))
    (exact, _), (coarse, recurrence) = results
    assert coarse.dtype == torch.float32
    assert recurrence.dtype == torch.bfloat16
    assert torch.equal(exact.isinf(), coarse.isinf())
    known = ~exact.isinf()
    assert (exact - coarse)[known].abs().mean() < 0.05 * exact[known].std()
