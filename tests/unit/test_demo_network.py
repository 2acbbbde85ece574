"""The demo's little network: cached generation, checkpoints, and the replay of speculation."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from demo import acceptance, checkpoint  # noqa: E402
from demo.generate import generate  # noqa: E402
from demo.network import Network, Shape  # noqa: E402

SHAPE = Shape(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)


@pytest.fixture
def network() -> Network:
    made = Network(SHAPE, seed=1)
    generator = torch.Generator().manual_seed(0)
    for weight in made.parameters():
        weight.data += torch.randn(weight.shape, generator=generator) * 0.3
    return made


def test_cached_generation_equals_recomputing_every_prefix(network: Network) -> None:
    prompts = [[5, 9, 12], [7, 30, 31, 32, 33, 8, 9]]
    for prompt, answer in zip(prompts, generate(network, prompts, 12), strict=True):
        for length, token in enumerate(answer):
            tokens = torch.tensor([prompt + answer[:length]])
            assert int(network.logits(network(tokens)[0, -1]).argmax()) == token
        assert len(answer) == 12 or answer[-1] in checkpoint.EOS_IDS


def test_a_checkpoint_keeps_what_bfloat16_keeps(network: Network, tmp_path: Path) -> None:
    for name in checkpoint.TOKENIZER_FILES:
        (tmp_path / name).write_text("{}")
    checkpoint.export(network, tmp_path / "out", tmp_path)
    loaded = checkpoint.load(tmp_path / "out")
    assert loaded.shape == SHAPE
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, network.state_dict()[name].bfloat16().float())


@pytest.mark.parametrize(
    ("matches", "expected"),
    [
        ([], 0),
        ([True] * 9, 1),
        ([True] * 10, 2),
        ([False] * 4, 4),
        ([True, False, True, True], 2),
    ],
)
def test_replayed_passes(matches: list[bool], expected: int) -> None:
    assert acceptance.passes(matches, draft_tokens=8) == expected
