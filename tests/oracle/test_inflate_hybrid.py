"""Inflated hybrids compute what the small ones do, their MTP layers draft the same: through our engine's networks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from demo.checkpoint import hybrid_config
from demo.hybrid_mtp import HybridMtp
from demo.hybrid_network import HybridNetwork
from demo.train_hybrid import HYBRID_SHAPE
from slipstream.engine.batch import Span
from slipstream.engine.layers.decoder import Taps
from slipstream.engine.models.heads.mtp import load_mtp
from slipstream.engine.models.network import Network
from slipstream.engine.models.registry import load_network
from slipstream.engine.text.tokenizer import Tokenizer
from tests.bench.inflate import inflate
from tests.bench.inflate_hybrid import HybridInflation, HybridShape, place_layers
from tests.checkpoints import tiny_checkpoint
from tests.oracle.feeding import Runner
from tests.oracle.head_rounds import CPU, N_CTX, Pages, text
from tests.oracle.test_inflate import logits as theirs

pytestmark = pytest.mark.usefixtures("_selected")
DEMOS = [Path("demo/hybrid"), Path("demo/hybrid-draft")]
N_TEXT = 60
# Qwen3.5-27B's, but for its images.
SIZES_27B = HybridShape(
    hidden=5120,
    layers=64,
    ffn=17408,
    heads=24,
    kv_heads=4,
    head_dim=256,
    vocab=248320,
    linear_key_heads=16,
    linear_value_heads=48,
)
F, L = "full_attention", "linear_attention"
FOUR = {"layer_types": [L, L, L, F]}  # of as many layers, as released checkpoints have it
BIG = {"hidden": 256, "layers": 12, "ffn": 160, "heads": 12, "kv_heads": 3, "vocab": 1000}
BIG |= {"linear_key_heads": 4, "linear_value_heads": 12}
CASES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "nothing": ({}, {}),
    "nothing, tied": ({"tie_word_embeddings": True}, {}),
    "hidden": (FOUR, {"hidden": 256}),
    "hidden by 16": ({"tie_word_embeddings": True}, {"hidden": 1024}),
    "layers": (FOUR, {"layers": 8}),
    "layers of another pattern": ({}, {"layers": 8}),
    "ffn": ({}, {"ffn": 300}),
    "heads": ({}, {"heads": 12, "kv_heads": 3}),
    "smaller groups": ({}, {"heads": 4, "kv_heads": 4}),
    "key and value heads": ({}, {"linear_key_heads": 4, "linear_value_heads": 8}),
    "larger groups of value heads": ({}, {"linear_key_heads": 3, "linear_value_heads": 12}),
    "smaller groups of value heads": ({}, {"linear_key_heads": 5, "linear_value_heads": 5}),
    "vocab": (FOUR, {"hidden": 256, "vocab": 1000}),
    "all": (FOUR, BIG),
    "all, tied, as the demo": (
        {**FOUR, "tie_word_embeddings": True, "num_attention_heads": 2, "num_key_value_heads": 1}
        | {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_conv_kernel_dim": 3},
        BIG,
    ),
    "all, with a large eps": ({**FOUR, "rms_norm_eps": 0.05}, BIG),
}


def small_checkpoint(folder: Path, changes: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> Path:
    """A tiny hybrid with an MTP layer in its file: a noised copy of its full layer and what belongs around it."""
    tiny_checkpoint("qwen3_5", folder, changes=changes, dtype=dtype)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    start = next(name for name in tensors if "self_attn" in name).split("self_attn")[0]
    for name, one in list(tensors.items()):
        if name.startswith(start):
            noise = torch.randn(one.shape, generator=generator) * one.float().std()
            tensors["mtp.layers.0." + name.removeprefix(start)] = (one + 0.5 * noise).to(dtype)
    width = tensors["model.norm.weight"].shape[0]
    fc = torch.randn((width, 2 * width), generator=generator) * width**-0.5
    tensors["mtp.fc.weight"] = fc.to(dtype)
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        tensors[f"mtp.{name}.weight"] = (0.2 * torch.randn(width, generator=generator)).to(dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def network_of(folder: Path, dtype: torch.dtype) -> Network:
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    return load_network(folder, dtype, CPU, N_CTX, vocab)


def scored(network: Network, ids: list[int]) -> tuple[Tensor, Tensor]:
    """(logits [n, vocab], states after the final norm [n, d_model]) of a text, in chunks with guesses between them.

    Of three guesses the first is right and kept, so it is folded into the states of the pass after.
    """
    runner, last = Runner(network), network.config.n_layers + 1
    found, states, n = [], [], 0
    for size, n_drafts in ((23, 0), (1, 3), (17, 3), (1, 0), (len(ids), 0)):
        kept = min(1, n_drafts)
        certain = ids[n : n + size]
        guesses = [*ids[n + size : n + size + kept], *[7] * (n_drafts - kept)]
        span, taps = Span(0, certain + guesses, n, n_drafts, len(certain) + n_drafts), Taps([last])
        assert runner.cache.reserve(0, "target", n, n + len(certain) + n_drafts, n_drafts)
        with torch.inference_mode():
            batch = runner.cache.batch("target", [span])
            logits = network.forward(batch, runner.cache.stores["target"], taps)
        n += len(certain) + kept
        runner.cache.commit(0, "target", n)
        found.append(logits[: len(certain) + kept])
        states.append(taps.of([last])[0][: len(certain) + kept])
    return torch.cat(found), torch.cat(states)


def drafted(folder: Path, network: Network, ids: list[int], states: Tensor) -> Tensor:
    """Logits of the MTP layer of all rows, float32: of the first, second and third guess."""
    head = load_mtp(folder, network, N_CTX)
    pages, found, state = Pages(head.needs, network.dtype), [], states
    with torch.inference_mode():
        for step in range(3):
            n = len(ids) - 1 - step
            logits, state = pages.run(head.modules[0], state[:n], Span(step, ids[step + 1 :], 0, 0, n))
            found.append(logits)
    return torch.cat(found)


def compare(source: Path, target: Path, ids: list[int], dtype: torch.dtype) -> tuple[float, float]:
    """(largest difference over the spread of the logits, share of rows with the same first choice).

    Of the target and of the MTP layer. New tokens must be out of the question.
    """
    sides = []
    for folder in (source, target):
        network = network_of(folder, dtype)
        logits, states = scored(network, ids)
        has_mtp = "mtp.fc.weight" in load_file(folder / "model.safetensors")
        sides.append((logits, drafted(folder, network, ids, states) if has_mtp else logits))
    largest, same = 0.0, 1.0
    for expected, found in zip(*sides, strict=True):
        vocab = expected.shape[1]
        assert found[:, vocab:].numel() == 0 or found[:, vocab:].max() < expected.min() - 1000
        old = found[:, :vocab]
        assert expected.std() > 0.2, "logits must be large enough to show a difference"
        largest = max(largest, float((old - expected).abs().max() / expected.std()))
        same = min(same, float((old.argmax(1) == expected.argmax(1)).float().mean()))
    return largest, same


@pytest.mark.sampled(keep=5)
@pytest.mark.parametrize(("changes", "sizes"), CASES.values(), ids=CASES)
def test_same_function(tmp_path: Path, changes: dict[str, Any], sizes: dict[str, int]) -> None:
    source = small_checkpoint(tmp_path / "small", changes)
    new = inflate(source, tmp_path / "big", sizes)
    largest, same = compare(source, tmp_path / "big", text(4, N_TEXT), torch.float32)
    assert largest < 1e-4
    assert same == 1.0
    config = network_of(tmp_path / "big", torch.float32).config
    assert (config.d_model, config.n_layers, config.vocab_rows) == (new.hidden, new.layers, new.vocab)


@pytest.mark.parametrize("name", ["hidden by 16", "all, tied, as the demo"])
def test_transformers_agrees(tmp_path: Path, name: str) -> None:
    changes, sizes = CASES[name]
    source = small_checkpoint(tmp_path / "small", changes)
    new = inflate(source, tmp_path / "big", sizes)
    prompt = torch.tensor(text(6, N_TEXT))
    expected, found = theirs(source, prompt), theirs(tmp_path / "big", prompt)
    assert found.shape[1] == new.vocab
    assert (found[:, :384] - expected).abs().max() < 1e-4


def test_stored_in_bfloat16(tmp_path: Path) -> None:
    """Scales are powers of two: nothing old is rounded. Numbers are ordinary, and no new matrix that reads is zero."""
    source = small_checkpoint(tmp_path / "small", FOUR, torch.bfloat16)
    inflate(source, tmp_path / "big", BIG)
    largest, same = compare(source, tmp_path / "big", text(4, N_TEXT), torch.float32)
    assert largest < 1e-4
    assert same == 1.0
    for name, weight in load_file(tmp_path / "big" / "model.safetensors").items():
        assert weight.dtype == torch.bfloat16, name
        size = weight.float().abs()
        assert size.isfinite().all(), name
        assert size[size > 0].numel() == 0 or size[size > 0].min() > 1e-20, name
        if name.endswith(("k_proj.weight", "in_proj_qkv.weight", "in_proj_a.weight", "up_proj.weight")):
            assert size[-1].min() > 0, name


def test_float32_states_stay_float32(tmp_path: Path) -> None:
    """Released checkpoints keep A_log in float32 beside bfloat16 matrices."""
    source = small_checkpoint(tmp_path / "small", FOUR, torch.bfloat16)
    tensors = load_file(source / "model.safetensors")
    tensors |= {name: one.float() + 1e-4 for name, one in tensors.items() if name.endswith("A_log")}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    inflate(source, tmp_path / "big", BIG)
    found = load_file(tmp_path / "big" / "model.safetensors")
    assert {one.dtype for name, one in found.items() if name.endswith("A_log")} == {torch.float32}
    assert compare(source, tmp_path / "big", text(4, N_TEXT), torch.float32)[0] < 1e-4


def test_computed_in_bfloat16(tmp_path: Path) -> None:
    """As close to the small one as that is to itself in float32; only sums are ordered differently."""
    source = small_checkpoint(tmp_path / "small", FOUR, torch.bfloat16)
    inflate(source, tmp_path / "big", BIG)
    ids = text(4, N_TEXT)
    exact = scored(network_of(source, torch.float32), ids)[0]
    small = scored(network_of(source, torch.bfloat16), ids)[0]
    big = scored(network_of(tmp_path / "big", torch.bfloat16), ids)[0][:, :384]
    assert (big - small).square().mean() < (small - exact).square().mean()


def test_layers_lie_in_the_pattern(tmp_path: Path) -> None:
    source = small_checkpoint(tmp_path / "small", FOUR)
    inflate(source, tmp_path / "big", {"layers": 16})
    assert json.loads((tmp_path / "big" / "config.json").read_text())["layer_types"] == [L, L, L, F] * 4
    weights = load_file(tmp_path / "big" / "model.safetensors")
    outputs = [name for name in weights if name.endswith(("mlp.down_proj.weight",)) and "mtp" not in name]
    used = [name for name in outputs if weights[name].any()]
    assert used == [f"model.layers.{place}.mlp.down_proj.weight" for place in (0, 4, 8, 15)]


def test_layers_by_the_interval(tmp_path: Path) -> None:
    """A config may leave the list out; the interval, or four, then says where the full layers are."""
    source = small_checkpoint(tmp_path / "small", {"layer_types": [L, F, L, F]})
    config = json.loads((source / "config.json").read_text())
    config.pop("layer_types")
    (source / "config.json").write_text(json.dumps(config | {"full_attention_interval": 2}))
    inflate(source, tmp_path / "big", {"layers": 10})
    assert json.loads((tmp_path / "big" / "config.json").read_text())["layer_types"] == [L, F] * 5
    assert compare(source, tmp_path / "big", text(4, N_TEXT), torch.float32)[0] < 1e-4


@pytest.mark.parametrize(
    ("old", "new", "places"),
    [
        ([L, L, L, F] * 2, [L, L, L, F] * 2, list(range(8))),
        ([L, L, L, F] * 2, [L, L, L, F] * 4, [0, 2, 4, 7, 8, 10, 12, 15]),
        ([L, L, L, F], [L, L, L, F] * 6, [0, 6, 12, 19]),
        ([F, L], [L, L, L, F] * 2, [3, 4]),
        ([L, L, F, L], [L, L, L, F] * 2, [0, 2, 3, 6]),
        ([F, F], [L, L, L, F] * 2, [3, 7]),
    ],
)
def test_places(old: list[str], new: list[str], places: list[int]) -> None:
    assert place_layers(old, new) == places


def test_demo_fits_the_27b() -> None:
    """The plan alone, which makes no tensor: nobody writes 54 GB here."""
    weights = {f"model.{name}": one for name, one in HybridNetwork(HYBRID_SHAPE).state_dict().items()}
    weights |= {f"mtp.{name}": one for name, one in HybridMtp(HYBRID_SHAPE).state_dict().items()}
    weights = {name: one.bfloat16() for name, one in weights.items()}
    plan = HybridInflation(hybrid_config(HYBRID_SHAPE), weights, SIZES_27B, 0)
    shapes = {one.name: one.shape for one in plan.entries()}
    assert plan.layer_places == [0, 16, 32, 51]
    assert shapes["model.layers.62.linear_attn.in_proj_qkv.weight"] == (10240, 5120)
    assert shapes["model.layers.62.linear_attn.conv1d.weight"] == (10240, 1, 4)
    assert shapes["model.layers.63.self_attn.q_proj.weight"] == (12288, 5120)
    assert shapes["mtp.layers.0.self_attn.k_proj.weight"] == (1024, 5120)
    assert shapes["mtp.fc.weight"] == (5120, 10240)
    assert sum(map(math.prod, shapes.values())) / 1e9 == pytest.approx(27.3, abs=0.2)


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"hidden": 128}, "power of 4"),
        ({"layers": 3}, "below"),
        ({"layers": 5, "linear_key_heads": 1}, "below"),
        ({"heads": 6, "kv_heads": 4}, "multiple"),
        ({"linear_key_heads": 3, "linear_value_heads": 8}, "no multiple of 3 key heads"),
        ({"head_dim": 64}, "head_dim"),
        ({"vocab": 1000}, "constant channel"),
    ],
)
def test_sizes_that_cannot_work_are_refused(tmp_path: Path, sizes: dict[str, int], reason: str) -> None:
    source = small_checkpoint(tmp_path / "small", FOUR)
    with pytest.raises(ValueError, match=reason):
        inflate(source, tmp_path / "big", sizes)


def test_groups_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Three value heads per key head fill two groups of two, and there were two of them."""
    source = small_checkpoint(tmp_path / "small", {**FOUR, "linear_num_value_heads": 6})
    with pytest.raises(ValueError, match="3 groups of 2 heads cannot hold 6 heads in groups of 3"):
        inflate(source, tmp_path / "big", {"linear_key_heads": 3, "linear_value_heads": 6})


def test_layers_without_places_are_refused(tmp_path: Path) -> None:
    source = small_checkpoint(tmp_path / "small", {"layer_types": [F, L, F, F]})
    with pytest.raises(ValueError, match="no places for full_attention, linear"):
        inflate(source, tmp_path / "big", {"layers": 8})


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next", "gemma3"])
def test_other_families_are_refused(tmp_path: Path, family: str) -> None:
    source = tiny_checkpoint(family, tmp_path / "small")
    with pytest.raises(ValueError, match="is none of"):
        inflate(source, tmp_path / "big", {})


def test_unknown_tensors_and_sizes_are_refused(tmp_path: Path) -> None:
    source = small_checkpoint(tmp_path / "small", FOUR)
    tensors = load_file(source / "model.safetensors")
    tensors["mtp.layers.1.input_layernorm.weight"] = torch.zeros(64)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"mtp\.layers\.1"):
        inflate(source, tmp_path / "big", {})
    dense = tiny_checkpoint("llama", tmp_path / "dense")
    with pytest.raises(ValueError, match="LlamaForCausalLM has no linear_key_heads"):
        inflate(dense, tmp_path / "big", {"linear_key_heads": 4})


@pytest.mark.sampled
@pytest.mark.parametrize("demo", DEMOS, ids=[demo.name for demo in DEMOS])
def test_demo(tmp_path: Path, demo: Path) -> None:
    """Trained weights, in float32; nearly all first choices in bfloat16."""
    old = json.loads((demo / "config.json").read_text())
    sizes = {
        "hidden": 4 * old["hidden_size"],
        "layers": 5,
        "ffn": 512,
        "heads": 8,
        "kv_heads": 4,
        "vocab": 6000,
    }
    inflate(demo, tmp_path, {**sizes, "linear_key_heads": 4, "linear_value_heads": 8})
    ids = Tokenizer(demo).encode(Path(__file__).read_text())[:N_TEXT]
    largest, same = compare(demo, tmp_path, ids, torch.float32)
    assert largest < 1e-4
    assert same == 1.0
    assert compare(demo, tmp_path, ids, torch.bfloat16)[1] > 0.95
