"""The demo's draft heads: published layouts, and training that unrolls them as drafting uses them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402

from demo import acceptance, assemble_dspark, evaluate_heads, head_files, head_training, optimizer  # noqa: E402
from demo.drafting import BlockDrafter, ChainDrafter, drafter  # noqa: E402
from demo.heads import DFlashHead, DSparkHead, Eagle3Head, MtpHead, streams  # noqa: E402
from demo.network import Network, Shape, rope_tables  # noqa: E402

SHAPE = Shape(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=5,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)
DRAFT_IDS = torch.arange(1, 64, 2)  # [32]
DEMO = Path(head_files.__file__).parent
HIDDEN, VOCAB, MB = 256, 4096, 10**6
MLP = ("gate_proj", "up_proj", "down_proj")


def stir(module: torch.nn.Module, seed: int) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for weight in module.parameters():
        weight.data += torch.randn(weight.shape, generator=generator) * 0.3
    return module


@pytest.fixture
def target() -> Network:
    made = Network(SHAPE, seed=1)
    stir(made, 0)
    return made


def chain_heads() -> list[Eagle3Head | MtpHead]:
    heads = [Eagle3Head(SHAPE, DRAFT_IDS), MtpHead(SHAPE)]
    return [stir(head, seed).requires_grad_(requires_grad=False) for seed, head in enumerate(heads)]


def block_head() -> DFlashHead:
    head = DFlashHead(replace(SHAPE, num_key_value_heads=4), len(head_files.DFLASH_TAPS))
    stir(head, 5).requires_grad_(requires_grad=False)
    return head


def spark_head() -> DSparkHead:
    """`block_head` with a correction that changes most picks."""
    head = DSparkHead(replace(SHAPE, num_key_value_heads=4), len(head_files.DFLASH_TAPS), rank=6)
    stir(head, 6).requires_grad_(requires_grad=False)
    head.take_backbone(block_head())
    head.markov_head.markov_w2.weight *= 4
    return head


def layer_shapes(prefix: str, shape: Shape, inputs: int) -> dict[str, list[int]]:
    """What every transformer layer holds, by name."""
    heads, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    found = {
        f"{prefix}self_attn.q_proj.weight": [heads, inputs],
        f"{prefix}self_attn.k_proj.weight": [kv, inputs],
        f"{prefix}self_attn.v_proj.weight": [kv, inputs],
        f"{prefix}self_attn.o_proj.weight": [HIDDEN, heads],
        f"{prefix}input_layernorm.weight": [HIDDEN],
        f"{prefix}post_attention_layernorm.weight": [HIDDEN],
    }
    wide = shape.intermediate_size
    found |= {f"{prefix}mlp.{name}.weight": [wide, HIDDEN] for name in MLP[:2]}
    return found | {f"{prefix}mlp.down_proj.weight": [HIDDEN, wide]}


def layout(name: str) -> dict[str, list[int]]:
    """Names and shapes of a published checkpoint of our dimensions."""
    if name == "eagle3":
        return layer_shapes("midlayer.", head_files.EAGLE_SHAPE, 2 * HIDDEN) | {
            "fc.weight": [HIDDEN, 3 * HIDDEN],
            "midlayer.hidden_norm.weight": [HIDDEN],
            "norm.weight": [HIDDEN],
            "lm_head.weight": [head_files.DRAFT_VOCAB_SIZE, HIDDEN],
            "d2t": [head_files.DRAFT_VOCAB_SIZE],
            "t2d": [VOCAB],
        }
    if name == "mtp":
        prefix, shape = "model.mtp_layers.0.", head_files.MTP_SHAPE
        kv = shape.num_key_value_heads * shape.head_dim
        norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
        return (
            layer_shapes(prefix, shape, HIDDEN)
            | {f"{prefix}{norm}.weight": [HIDDEN] for norm in norms}
            | {f"{prefix}input_proj.weight": [HIDDEN, 2 * HIDDEN]}
            | {f"{prefix}self_attn.q_proj.bias": [shape.num_attention_heads * shape.head_dim]}
            | {f"{prefix}self_attn.{one}_proj.bias": [kv] for one in "kv"}
        )
    if name == "dspark":
        return {
            "markov_head.markov_w1.weight": [VOCAB, head_files.MARKOV_RANK],
            "markov_head.markov_w2.weight": [VOCAB, head_files.MARKOV_RANK],
            "confidence_head.proj.weight": [1, HIDDEN + head_files.MARKOV_RANK],
            "confidence_head.proj.bias": [1],
        }
    return layer_shapes("layers.0.", head_files.DFLASH_SHAPE, HIDDEN) | {
        "fc.weight": [HIDDEN, len(head_files.DFLASH_LAYERS) * HIDDEN],
        "hidden_norm.weight": [HIDDEN],
        "norm.weight": [HIDDEN],
        "layers.0.self_attn.q_norm.weight": [head_files.DFLASH_SHAPE.head_dim],
        "layers.0.self_attn.k_norm.weight": [head_files.DFLASH_SHAPE.head_dim],
    }


@pytest.mark.parametrize("name", head_files.NAMES)
def test_the_checkpoints_have_the_published_names_and_shapes(name: str) -> None:
    held = load_file(str(DEMO / name / "model.safetensors"))
    assert {key: list(value.shape) for key, value in held.items()} == layout(name)
    kinds = {"d2t": torch.int64, "t2d": torch.bool}
    assert all(value.dtype == kinds.get(key, torch.bfloat16) for key, value in held.items())
    assert not any(value.is_floating_point() and value.isnan().any() for value in held.values())


def test_the_checkpoints_are_small() -> None:
    for name in head_files.NAMES:
        assert head_files.parameter_count(head_files.load(DEMO / name)) <= 2e6
    sizes = [(DEMO / name / "model.safetensors").stat().st_size for name in head_files.NAMES]
    assert sum(sizes) <= 10 * MB


def test_the_assembled_dspark_has_all_of_a_published_one(tmp_path: Path) -> None:
    held = load_file(str(assemble_dspark.assemble(tmp_path) / "model.safetensors"))
    assert {key: list(value.shape) for key, value in held.items()} == layout("dflash") | layout("dspark")
    for name in ("dflash", "dspark"):
        part = load_file(str(DEMO / name / "model.safetensors"))
        assert all(torch.equal(held[key], value) for key, value in part.items())
    config, flash = (
        json.loads((folder / "config.json").read_text()) for folder in (tmp_path, DEMO / "dflash")
    )
    assert config["markov_rank"] == head_files.MARKOV_RANK
    assert {key: config[key] for key in flash} == flash | {"architectures": ["DSparkDraftModel"]}


@pytest.mark.parametrize("name", head_files.NAMES)
def test_every_head_comes_with_its_figures_and_its_card(name: str) -> None:
    training = json.loads((DEMO / name / "training.json").read_text())
    assert set(training["acceptance_length"]) == {"rename", "continue", "docstring"}
    assert f"{training['acceptance_length']['continue']:.2f}" in (DEMO / name / "README.md").read_text()


def test_dspark_goes_further_than_the_dflash_it_is_made_of() -> None:
    flash, spark = (
        json.loads((DEMO / name / "training.json").read_text())["acceptance_length"]
        for name in ("dflash", "dspark")
    )
    assert all(spark[kind] > flash[kind] for kind in flash)
    assert min(spark.values()) >= 1.5


def test_the_vocabulary_tables_invert_each_other() -> None:
    head = head_files.load(DEMO / "eagle3")
    assert isinstance(head, Eagle3Head)
    assert head.t2d.nonzero()[:, 0].tolist() == head.draft_ids().tolist()
    drafted = torch.arange(len(head.d2t))
    assert torch.equal(head.tokens(drafted), head.draft_ids())
    # The rank of a target id among those that can be drafted is its draft id.
    assert torch.equal(head.t2d.cumsum(0)[head.draft_ids()] - 1, drafted)


@pytest.mark.parametrize("name", head_files.NAMES)
def test_a_head_survives_its_file(name: str, tmp_path: Path) -> None:
    head = head_files.make(name, torch.arange(0, VOCAB, 2))
    stir(head, 3)
    if isinstance(head, DSparkHead):  # whose file is without its backbone's tensors
        backbone = stir(head_files.make("dflash"), 4)
        head_files.export(backbone, tmp_path / head_files.BACKBONE)
        head.take_backbone(backbone)
    head_files.export(head, tmp_path / name)
    loaded = head_files.load(tmp_path / name).state_dict()
    for key, value in head.state_dict().items():
        assert torch.equal(loaded[key], value.bfloat16().float() if value.is_floating_point() else value)


@pytest.mark.parametrize("index", [0, 1])
@torch.no_grad()
def test_training_unrolls_a_head_as_drafting_does(index: int, target: Network) -> None:
    head, steps = chain_heads()[index], 4
    tokens = torch.randint(0, 64, (12,), generator=torch.Generator().manual_seed(2)).tolist()
    found = streams(target, torch.tensor([tokens]), torch.float32)
    states = head_files.states(head, found)[0]  # [12, width]
    for seen in (1, 5, 8):
        made = ChainDrafter(head, target)
        made.observe(states[:seen], tokens[1 : seen + 1])
        drafted = made.draft(steps)
        # The unrolled head is fed the tokens that were drafted.
        text = torch.tensor([tokens[: seen + 1] + drafted])
        embedded = target.embed_tokens(text)
        unrolled = head_training.unroll(head, head.carry(states[None, :seen]), embedded, steps)
        for step, scored in enumerate(unrolled):
            choice = head.scores(scored[0, -1], target).argmax()
            assert int(head.tokens(choice)) == drafted[step]


@pytest.mark.parametrize("index", [0, 1, 2, 3])
@torch.no_grad()
def test_a_drafter_forgets_its_drafts(index: int, target: Network) -> None:
    head = [*chain_heads(), block_head(), spark_head()][index]
    tokens = torch.randint(0, 64, (20,), generator=torch.Generator().manual_seed(3)).tolist()
    states = head_files.states(head, streams(target, torch.tensor([tokens]), torch.float32))[0]
    played, fresh = drafter(head, target), drafter(head, target)
    for begin, end in ((0, 6), (6, 7), (7, 11), (11, 15)):
        played.observe(states[begin:end], tokens[begin + 1 : end + 1])
        last = played.draft(5)
    fresh.observe(states[:15], tokens[1:16])
    assert fresh.draft(5) == last == played.draft(5)


@torch.no_grad()
def test_blocks_of_a_row_do_not_see_each_other(target: Network) -> None:
    head, size = block_head(), head_files.BLOCK_SIZE
    tokens = torch.randint(1, 64, (1, 24), generator=torch.Generator().manual_seed(4))
    states = head_files.states(head, streams(target, tokens, torch.float32))  # [1, 24, width]
    starts = torch.tensor([[3, 9, 14]])
    masked = torch.full((1, 3, size), head_files.MASK_TOKEN)
    masked[..., 0] = tokens[0, starts[0]]
    places = (starts[..., None] + torch.arange(size)).flatten(1)
    every = torch.arange(24)
    context = head.context(states, rope_tables(head.shape, every[None], torch.float32))
    attend = head_training.BlockAttention(context, every < starts[..., None], size)
    out = head(target.embed_tokens(masked.flatten(1)), rope_tables(head.shape, places, torch.float32), attend)
    together = target.logits(out.view(3, size, -1)[:, 1:]).argmax(-1)  # [3, size - 1]
    for start, drafted in zip(starts[0].tolist(), together.tolist(), strict=True):
        made = BlockDrafter(head, target)
        made.observe(states[0, :start], tokens[0, 1 : start + 1].tolist())
        assert made.draft(size - 1) == drafted


@torch.no_grad()
def test_dspark_drafts_what_its_correction_makes_of_the_token_before(target: Network) -> None:
    head, plain = spark_head(), block_head()
    head.take_backbone(plain)
    tokens = torch.randint(1, 64, (12,), generator=torch.Generator().manual_seed(7)).tolist()
    states = head_files.states(head, streams(target, torch.tensor([tokens]), torch.float32))[0]
    drafters = BlockDrafter(head, target), BlockDrafter(plain, target)
    for made in drafters:
        made.observe(states[:9], tokens[1:10])
    corrected, uncorrected = (made.draft(7) for made in drafters)
    assert corrected != uncorrected
    assert drafters[0].draft(3) == corrected[:3]
    # Without the table it is the DFlash that it was made from; with nothing else, the table's own chain.
    after = head.markov_head.markov_w2.weight.clone()  # [V, rank]
    table = after @ head.markov_head.markov_w1.weight.mT  # [V, V]: next, before
    head.markov_head.markov_w2.weight *= 0
    assert drafters[0].draft(7) == uncorrected
    head.norm.weight *= 0
    head.markov_head.markov_w2.weight += after
    chain = [tokens[9]]
    for _ in range(7):
        chain.append(int(table[:, chain[-1]].argmax()))
    assert drafters[0].draft(7) == chain[1:]


def test_training_dspark_leaves_its_backbone_alone(target: Network) -> None:
    head = DSparkHead(replace(SHAPE, num_key_value_heads=4), len(head_files.DFLASH_TAPS), rank=6)
    head.take_backbone(block_head())
    before = {name: value.clone() for name, value in head.state_dict().items()}
    target.requires_grad_(requires_grad=False)
    loss = head_training.block_loss(target)
    steps, losses = optimizer.build(head, 0.02, 0.01), []
    tokens = torch.randint(1, 64, (4, 40), generator=torch.Generator().manual_seed(8))
    for _ in range(30):
        torch.manual_seed(9)  # the same blocks every time
        value = loss(head, tokens, torch.ones(4, 40))
        torch.autograd.backward(value)
        for held in steps:
            held.step()
            held.zero_grad(set_to_none=True)
        losses.append(value.item())
    assert losses[-1] < losses[0] - 0.2
    changed = {name for name, value in head.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if name.startswith(head_files.DSPARK_PREFIXES)}


def test_the_overlap_is_how_often_a_draft_survives() -> None:
    wanted, given = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]]), torch.tensor([[0.25, 0.25, 0.5]] * 2)
    found = head_training.overlap(wanted.log(), given.log())
    torch.testing.assert_close(found, torch.tensor([0.5, 0.95]))


def test_the_divergence_has_the_value_and_slope_of_torch() -> None:
    generator = torch.Generator().manual_seed(6)
    wanted, given = (torch.randn(300, 11, generator=generator) for _ in range(2))
    ours, plain = given.clone().requires_grad_(), given.clone().requires_grad_()
    found = head_training.divergence(wanted, ours)
    expected = torch.nn.functional.kl_div(
        plain.log_softmax(-1), wanted.log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)
    torch.testing.assert_close(found, expected)
    weights = torch.rand(300, generator=generator)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(ours.grad, plain.grad)


class Oracle:
    """Drafts the text itself, wrong in every third token."""

    def __init__(self, text: list[int]) -> None:
        self.text, self.newest = text, 0

    def observe(self, states: torch.Tensor, tokens: list[int]) -> None:
        assert tokens == self.text[self.newest + 1 : self.newest + 1 + len(states)]
        self.newest += len(tokens)

    def draft(self, count: int) -> list[int]:
        ahead = range(self.newest + 1, min(len(self.text), self.newest + 1 + count))
        return [self.text[place] if place % 3 else -1 for place in ahead]


def test_rounds_count_what_a_server_keeps() -> None:
    prompt, answer = [7, 8, 9], list(range(10, 22))
    made = Oracle(prompt + answer)
    played = list(evaluate_heads.rounds(made, prompt, answer, torch.zeros(15, 1)))
    # The token at place 3 is the prompt's own; drafts at places 6, 9 and 12 are wrong, place 14 is the last.
    assert played == [(2, 8), (2, 7), (2, 4), (1, 1)]
    kept = [n for n, _ in played]
    assert sum(kept) + len(kept) == len(answer) - 1
    assert evaluate_heads.counted(kept, 12) == 4
    assert evaluate_heads.counted(kept, 11) == 3
    assert evaluate_heads.counted(kept, 9) == 2
    assert evaluate_heads.counted(kept, 1) == 1


def test_a_reply_counts_until_it_loops() -> None:
    assert acceptance.before_loop([1] * 20) == 10
    assert acceptance.before_loop(list(range(20)) * 2) == 40
    assert acceptance.before_loop(list(range(20)) * 4) == 48
    assert acceptance.before_loop([1, 2]) == 2
