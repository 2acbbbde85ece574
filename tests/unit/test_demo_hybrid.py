"""The demo's hybrid: the gated delta rule in chunks, cached generation, transformers' names, the prediction layer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402

from demo import (  # noqa: E402
    checkpoint,
    evaluate,
    evaluate_hybrid,
    head_training,
    hybrid_mtp,
    hybrid_network,
    tasks,
)
from demo.distill_hybrid import DRAFT_SHAPE  # noqa: E402
from demo.drafting import ChainDrafter  # noqa: E402
from demo.generate import generate, prefill  # noqa: E402
from demo.heads import streams  # noqa: E402
from demo.hybrid_mtp import HybridMtp  # noqa: E402
from demo.hybrid_network import HybridNetwork, HybridShape, chunked, recurrent, unit  # noqa: E402
from demo.network import rope_tables  # noqa: E402
from demo.train_hybrid import HYBRID_SHAPE  # noqa: E402

SHAPE = HybridShape(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
)
DEMO = Path(hybrid_network.__file__).parent
MB = 10**6


def stir(module: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for weight in module.parameters():
        weight.data += torch.randn(weight.shape, generator=generator) * 0.3
    module.requires_grad_(requires_grad=False)


@pytest.fixture
def network() -> HybridNetwork:
    made = HybridNetwork(SHAPE, seed=1)
    stir(made, 0)
    return made


@pytest.fixture
def mtp() -> HybridMtp:
    made = HybridMtp(SHAPE)
    stir(made, 1)
    return made


def delta_inputs(length: int, seed: int) -> tuple:
    """Queries, keys and values, gates and a state, in float64."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k, v = unit(drawn(2, length, 2, 8)), unit(drawn(2, length, 2, 8)), drawn(2, length, 4, 6)
    decay, beta = -drawn(2, length, 4).exp(), drawn(2, length, 4).sigmoid()
    return (q, k, v), (decay, beta), drawn(2, 4, 8, 6)


@pytest.mark.parametrize("length", [1, 7, 16, 37])
@pytest.mark.parametrize("known", [False, True])
def test_the_rule_in_chunks_is_the_rule(length: int, known: bool) -> None:
    qkv, gates, state = delta_inputs(length, seed=length)
    before = state if known else None
    expected, last = recurrent(qkv, gates, before)
    found, held = chunked(qkv, gates, before, size=16)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(held, last, rtol=1e-11, atol=1e-12)


def test_the_slope_in_chunks_is_the_slope_of_the_rule() -> None:
    slopes = []
    for rule in (recurrent, lambda *inputs: chunked(*inputs, size=8)):
        qkv, gates, state = delta_inputs(21, seed=3)
        leaves = [leaf.requires_grad_() for leaf in (*qkv, *gates, state)]
        out, held = rule(tuple(leaves[:3]), tuple(leaves[3:5]), leaves[5])
        (out.square().sum() + held.sum()).backward()
        slopes.append([leaf.grad for leaf in leaves])
    for found, expected in zip(*slopes, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def test_cached_generation_equals_recomputing_every_prefix(network: HybridNetwork) -> None:
    prompts = [[5, 9, 12], [7], [7, 30, 31, 32, 33, 8, 9]]
    for prompt, answer in zip(prompts, generate(network, prompts, 12), strict=True):
        for length, token in enumerate(answer):
            tokens = torch.tensor([prompt + answer[:length]])
            assert int(network.logits(network(tokens)[0, -1]).argmax()) == token
        assert len(answer) == 12 or answer[-1] in checkpoint.EOS_IDS


def test_a_step_leaves_the_state_that_the_whole_text_leaves(network: HybridNetwork) -> None:
    text = [5, 9, 12, 40, 41, 42]
    stepped, _, _ = prefill(network, [text], 1)
    whole = network.caches(1, len(text) + 2)
    network.fill(torch.tensor([text]), whole)
    for found, expected in zip(stepped, whole, strict=True):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def transformers_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    transformers = pytest.importorskip("transformers")
    made = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert type(made).__name__ == "Qwen3_5ForCausalLM"
    with torch.no_grad():
        return made(tokens).logits


def exported(network: HybridNetwork, mtp: HybridMtp | None, folder: Path) -> Path:
    for name in checkpoint.TOKENIZER_FILES:
        (folder / name).write_text("{}")
    checkpoint.export(network, folder / "out", folder, mtp and mtp.state_dict())
    return folder / "out"


def test_transformers_reads_a_checkpoint_alike(
    network: HybridNetwork, mtp: HybridMtp, tmp_path: Path
) -> None:
    folder = exported(network, mtp, tmp_path)
    tokens = torch.randint(0, 64, (2, 70), generator=torch.Generator().manual_seed(2))
    loaded = checkpoint.load(folder).requires_grad_(requires_grad=False)
    found = loaded.logits(loaded(tokens))
    torch.testing.assert_close(found, transformers_logits(folder, tokens), rtol=1e-4, atol=1e-4)


def test_a_checkpoint_keeps_what_bfloat16_keeps(
    network: HybridNetwork, mtp: HybridMtp, tmp_path: Path
) -> None:
    folder = exported(network, mtp, tmp_path)
    loaded = checkpoint.load(folder)
    assert isinstance(loaded, HybridNetwork)
    assert loaded.shape == SHAPE
    for made, kept in ((network, loaded), (mtp, hybrid_mtp.load(folder))):
        for name, weight in kept.state_dict().items():
            assert torch.equal(weight, made.state_dict()[name].bfloat16().float())
    assert json.loads((folder / "config.json").read_text())["mtp_num_hidden_layers"] == 1


def test_a_draft_ships_no_prediction_layer(network: HybridNetwork, tmp_path: Path) -> None:
    folder = exported(network, None, tmp_path)
    assert json.loads((folder / "config.json").read_text())["mtp_num_hidden_layers"] == 0
    assert not any(name.startswith("mtp.") for name in load_file(str(folder / "model.safetensors")))


def test_training_unrolls_the_prediction_layer_as_drafting_does(
    network: HybridNetwork, mtp: HybridMtp
) -> None:
    tokens, steps = torch.randint(0, 64, (12,), generator=torch.Generator().manual_seed(2)).tolist(), 4
    states = streams(network, torch.tensor([tokens]), torch.float32)[-1][0]  # [12, hidden]
    for seen in (1, 5, 8):
        made = ChainDrafter(mtp, network)
        made.observe(states[:seen], tokens[1 : seen + 1])
        drafted = made.draft(steps)
        embedded = network.embed_tokens(torch.tensor([tokens[: seen + 1] + drafted]))
        for step, scored in enumerate(head_training.unroll(mtp, states[None, :seen], embedded, steps)):
            assert int(mtp.scores(scored[0, -1], network).argmax()) == drafted[step]


def test_along_a_reference_a_draft_is_compared_with_the_first_choice() -> None:
    shape = replace(SHAPE, vocab_size=4)  # so few that drafts are right now and then
    network, mtp = HybridNetwork(shape, seed=1), HybridMtp(shape)
    stir(network, 0)
    stir(mtp, 1)
    prompt, answer = [1, 2, 3], [0, 3, 1, 1, 2, 0, 3, 2, 1]
    places = evaluate_hybrid.reference_places(network, mtp, prompt, answer)
    # answer[0] is the prompt's own pass; every other token is the first that is drafted from its place.
    assert [len(place) for place in places] == [8, 7, 6, 5, 4, 3, 2, 1]
    whole = prompt + answer
    states = network(torch.tensor([whole]))  # [1, 12, hidden]
    chosen = network.logits(states)[0].argmax(-1).tolist()  # [12]
    first = []
    for newest in range(len(prompt), len(whole) - 1):
        made = ChainDrafter(mtp, network)
        made.observe(states[0, :newest], whole[1 : newest + 1])
        first.append(made.draft(1)[0] == chosen[newest])
    assert [place[0] for place in places] == first
    assert len(set(first)) == 2


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([[True] * 4, [True] * 3, [True] * 2, [True]], 1),
        ([[False] * 4, [False] * 3, [False] * 2, [False]], 4),
        ([[True, False, True, True], [False] * 3, [False, True], [True]], 3),
    ],
)
def test_a_pass_gives_the_drafts_before_the_first_wrong_one_and_one_more(
    places: list[list[bool]], expected: int
) -> None:
    assert evaluate_hybrid.passes(places) == expected


def test_the_prediction_layer_is_a_layer_of_transformers(mtp: HybridMtp) -> None:
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    fields = {**checkpoint.config(SHAPE), "attn_implementation": "eager"}
    config = modeling.Qwen3_5TextConfig(**fields)
    block = modeling.Qwen3_5DecoderLayer(config, 3)
    block.load_state_dict(mtp.layers[0].state_dict())
    generator = torch.Generator().manual_seed(5)
    state, embedded = (torch.randn(1, 9, 16, generator=generator) for _ in range(2))
    positions = torch.arange(9)[None]  # [1, 9]

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + weight)

    held = mtp.state_dict()
    both = (
        normed(embedded, held["pre_fc_norm_embedding.weight"]),
        normed(state, held["pre_fc_norm_hidden.weight"]),
    )
    out = block(
        torch.cat(both, -1) @ held["fc.weight"].T,
        position_embeddings=modeling.Qwen3_5TextRotaryEmbedding(config)(state, positions[None]),
        attention_mask=torch.full((9, 9), -torch.inf).triu(1)[None, None],
    )
    rope = rope_tables(SHAPE, positions, torch.float32)
    found, carried = mtp(state, embedded, rope, hybrid_network.causal)
    torch.testing.assert_close(found, normed(out, held["norm.weight"]), rtol=1e-4, atol=1e-5)
    assert carried is found


def test_a_copy_is_told_from_a_rename(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [tasks.rename_text(f"{name} = {name} + 1", name, "fresh") for name in ("old", "last")]
    monkeypatch.setattr(evaluate, "rename_tasks", lambda _: made)
    # The first answer replaces one name of two; the second repeats the new one more often than it is wanted.
    given = ["fresh = old + 1", "fresh = fresh + fresh"]
    monkeypatch.setattr(evaluate, "answers", lambda *_: given)
    found = evaluate_hybrid.substitutions(None, None)
    assert (found["names_written"], found["names_wanted"]) == (3, 4)
    ratios = [evaluate.similarity(f"{name} = {name} + 1", "fresh = fresh + 1") for name in ("old", "last")]
    assert found["copy_similarity"] == pytest.approx(sum(ratios) / 2)


def expected_layout(shape: HybridShape, *, with_mtp: bool) -> dict[str, list[int]]:
    """Names and shapes of a text-only Qwen3.5 checkpoint."""
    hidden, wide = shape.hidden_size, shape.intermediate_size
    heads, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    channels, values = 2 * shape.key_width + shape.value_width, shape.value_width
    n_values = shape.linear_num_value_heads
    around = {
        "input_layernorm.weight": [hidden],
        "post_attention_layernorm.weight": [hidden],
        "mlp.gate_proj.weight": [wide, hidden],
        "mlp.up_proj.weight": [wide, hidden],
        "mlp.down_proj.weight": [hidden, wide],
    }
    full = around | {
        "self_attn.q_proj.weight": [2 * heads, hidden],
        "self_attn.k_proj.weight": [kv, hidden],
        "self_attn.v_proj.weight": [kv, hidden],
        "self_attn.o_proj.weight": [hidden, heads],
        "self_attn.q_norm.weight": [shape.head_dim],
        "self_attn.k_norm.weight": [shape.head_dim],
    }
    linear = around | {
        "linear_attn.in_proj_qkv.weight": [channels, hidden],
        "linear_attn.in_proj_z.weight": [values, hidden],
        "linear_attn.in_proj_b.weight": [n_values, hidden],
        "linear_attn.in_proj_a.weight": [n_values, hidden],
        "linear_attn.conv1d.weight": [channels, 1, 4],
        "linear_attn.A_log": [n_values],
        "linear_attn.dt_bias": [n_values],
        "linear_attn.norm.weight": [shape.linear_value_head_dim],
        "linear_attn.out_proj.weight": [hidden, values],
    }
    held = {"model.embed_tokens.weight": [shape.vocab_size, hidden], "model.norm.weight": [hidden]}
    for layer in range(4):
        parts = full if layer == 3 else linear
        held |= {f"model.layers.{layer}.{name}": size for name, size in parts.items()}
    if with_mtp:
        held |= {f"mtp.layers.0.{name}": size for name, size in full.items()}
        held |= {
            f"mtp.{name}.weight": [hidden] for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
        }
        held |= {"mtp.fc.weight": [hidden, 2 * hidden]}
    return held


@pytest.mark.parametrize(("name", "shape"), [("hybrid", HYBRID_SHAPE), ("hybrid-draft", DRAFT_SHAPE)])
def test_the_checkpoints_have_the_published_names_and_shapes(name: str, shape: HybridShape) -> None:
    held = load_file(str(DEMO / name / "model.safetensors"))
    found = {key: list(value.shape) for key, value in held.items()}
    assert found == expected_layout(shape, with_mtp=name == "hybrid")
    assert all(value.dtype == torch.bfloat16 and value.isfinite().all() for value in held.values())
    assert checkpoint.load_shape(DEMO / name) == shape


@pytest.mark.parametrize(("name", "most", "folder"), [("hybrid", 6.0, 12.0), ("hybrid-draft", 1.5, 3.3)])
def test_the_checkpoints_are_small(name: str, most: float, folder: float) -> None:
    held = load_file(str(DEMO / name / "model.safetensors"))
    assert sum(value.numel() for value in held.values()) <= most * MB
    assert sum(file.stat().st_size for file in (DEMO / name).iterdir()) <= folder * MB


@pytest.mark.parametrize("name", ["hybrid", "hybrid-draft"])
def test_transformers_gives_our_logits(name: str) -> None:
    loaded = checkpoint.load(DEMO / name).requires_grad_(requires_grad=False)
    tokens = torch.randint(0, 4096, (1, 100), generator=torch.Generator().manual_seed(4))
    found, expected = loaded.logits(loaded(tokens)), transformers_logits(DEMO / name, tokens)
    assert float((found - expected).norm() / expected.norm()) <= 1e-3


@pytest.mark.parametrize("name", ["hybrid", "hybrid-draft"])
def test_the_checkpoints_share_the_tokenizer_of_the_target(name: str) -> None:
    for file in (*checkpoint.TOKENIZER_FILES, "generation_config.json"):
        assert (DEMO / name / file).read_bytes() == (DEMO / "target" / file).read_bytes()


@pytest.mark.parametrize("name", ["hybrid", "hybrid-draft"])
def test_the_checkpoints_come_with_their_figures_and_cards(name: str) -> None:
    training, text = (
        json.loads((DEMO / name / "training.json").read_text()),
        (DEMO / name / "README.md").read_text(),
    )
    for figures in ("acceptance_length", "reference_acceptance_length"):
        assert set(training[figures]) == {"rename", "continue", "docstring"}
        assert f"{training[figures]['continue']:.2f}" in text


def test_the_shape_says_which_layers_attend() -> None:
    assert SHAPE.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    longer = replace(SHAPE, num_hidden_layers=5, full_attention_interval=2)
    assert [kind[:4] for kind in longer.layer_types] == ["line", "full", "line", "full", "line"]
