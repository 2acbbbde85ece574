"""The mixture of experts in Triton's interpreter: against the definitions, and at any width."""

from __future__ import annotations

import random as randoms
from typing import Literal

import pytest
import torch
from torch import Tensor

from slipstream.kernels.gated.activation import GELU, SILU, Activation
from slipstream.kernels.moe import reference as plain
from slipstream.kernels.moe.types import ExpertBiases, Routed, Routing
from tests.oracle.interpreted import assert_near

# isort: split
from slipstream.kernels.moe import triton as moe

pytestmark = pytest.mark.sampled(keep=3, together=True)
ABOUT = ("kernels/triton_launch.py",)

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
WIDTHS = (1, 2, 3, 5, 8, 16)
each_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: str(dtype)[6:])
each_draw = pytest.mark.parametrize("seed", range(20))


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def drawn_routing(random: randoms.Random, n_groups: int, n_in_group: int) -> Routing:
    n_kept = random.randint(1, n_groups)
    n_experts = n_groups * n_in_group
    return Routing(
        top_k=random.randint(1, n_kept * n_in_group),
        scores=random.choice(["softmax", "sigmoid"]),
        normed=random.random() < 0.5,
        scale=random.choice([1.0, 2.5]),
        bias=normal(n_experts, seed=5) * 0.3 if random.random() < 0.5 else None,
        n_groups=n_groups,
        n_groups_kept=n_kept,
    )


def some_routed(n_rows: int, n_experts: int, top_k: int, seed: int) -> Routed:
    """Ascending distinct experts; most rows agree on the first."""
    likes = normal(n_rows, n_experts, seed=seed)
    likes[:, 0] += 1
    ids = likes.topk(top_k).indices.sort(-1).values.int()
    return Routed(ids, normal(n_rows, top_k, seed=seed + 1))


@each_dtype
@each_draw
def test_route(seed: int, dtype: torch.dtype) -> None:
    random = randoms.Random(seed)
    n_groups, n_in_group = random.choice([1, 1, 2, 3, 4]), random.randint(2, 9)
    routing = drawn_routing(random, n_groups, n_in_group)
    logits = normal(3, n_groups * n_in_group, dtype=dtype, seed=seed) * 2
    got, meant = moe.route(logits, routing), plain.route(logits, routing)
    assert torch.equal(got.expert_ids, meant.expert_ids)
    assert_near(got.weights.to(dtype), meant.weights.to(dtype))
    assert got.weights.dtype == torch.float32
    assert torch.equal(got.weights, got.weights.to(dtype).float())  # rounded as the logits are


@each_dtype
def test_ties_go_to_the_lowest_id(dtype: torch.dtype) -> None:
    logits = torch.zeros(4, 12, dtype=dtype)
    logits[1, 5:] = 1
    logits[2, 7] = 1
    logits[3, 1:] = -torch.inf  # still three that exist
    one = moe.route(logits, Routing(top_k=3, scores="softmax", normed=True)).expert_ids
    assert one.tolist() == [[0, 1, 2], [5, 6, 7], [0, 1, 7], [0, 1, 2]]
    grouped = Routing(top_k=3, scores="sigmoid", normed=True, n_groups=4, n_groups_kept=1)
    assert moe.route(logits[:3], grouped).expert_ids.tolist() == [[0, 1, 2], [6, 7, 8], [6, 7, 8]]


@pytest.mark.parametrize(("scores", "n_groups"), [("softmax", 1), ("sigmoid", 1), ("sigmoid", 3)])
@each_dtype
def test_a_nan_spoils_its_row_alone(
    dtype: torch.dtype, scores: Literal["softmax", "sigmoid"], n_groups: int
) -> None:
    routing = Routing(top_k=4, scores=scores, normed=True, n_groups=n_groups, n_groups_kept=n_groups)
    logits = normal(3, 12, dtype=dtype)
    meant = moe.route(logits, routing)
    logits[1, 4] = torch.nan
    got = moe.route(logits, routing)
    assert got.weights.isnan().all(1).tolist() == [False, True, False]
    assert bool((got.expert_ids.diff(dim=1) > 0).all())
    assert got.expert_ids[1].min() >= 0
    assert got.expert_ids[1].max() < 12
    for row in (0, 2):
        assert torch.equal(got.expert_ids[row], meant.expert_ids[row])
        assert torch.equal(got.weights[row], meant.weights[row])


@each_dtype
@each_draw
def test_experts(seed: int, dtype: torch.dtype) -> None:
    random = randoms.Random(seed)
    n_experts, d_model, d_inner = random.randint(1, 9), random.randint(1, 90), random.randint(1, 70)
    n_rows = random.choice([1, 2, 7, 100])
    gate_up = normal(n_experts, 2 * d_inner, d_model, dtype=dtype, seed=1) / d_model**0.5
    down = normal(n_experts, d_model, d_inner, dtype=dtype, seed=2) / d_inner**0.5
    routed = some_routed(n_rows, n_experts, random.randint(1, min(n_experts, 4)), seed)
    x = normal(n_rows, d_model, dtype=dtype, seed=seed)
    biases, wide_biases = None, None
    if seed % 2:
        biases = ExpertBiases(*(normal(n_experts, n, dtype=dtype, seed=n) for n in (2 * d_inner, d_model)))
        wide_biases = ExpertBiases(*(one.double() for one in biases))
    activation = (Activation("clamped", 0.7, 1.702), GELU, Activation("limited", 0.3), SILU)[seed % 4]
    got = moe.experts(x, routed, moe.pack_experts(gate_up, down, biases, activation))
    # The definition in float64 of the same numbers: unlike in the narrow dtype, it rounds nothing in between.
    wide = Routed(routed.expert_ids, routed.weights.double())
    packed = plain.pack_experts(gate_up.double(), down.double(), wide_biases, activation)
    meant = plain.experts(x.double(), wide, packed)
    largest = meant.abs().max().item()
    share = {torch.float32: 3e-6, torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3}[dtype]
    assert got.dtype == dtype
    assert (got.double() - meant).abs().max().item() <= share * max(largest, 1e-3)


@each_dtype
def test_width_is_not_seen(dtype: torch.dtype) -> None:
    n_rows, n_experts = 18, 5
    packed = moe.pack_experts(
        normal(n_experts, 2 * 20, 70, dtype=dtype, seed=1) / 8,
        normal(n_experts, 70, 20, dtype=dtype, seed=2) / 4,
    )
    x, routed = normal(n_rows, 70, dtype=dtype), some_routed(n_rows, n_experts, 3, 7)
    routing = Routing(top_k=3, scores="sigmoid", normed=True)
    whole, chosen = moe.experts(x, routed, packed), moe.route(x, routing)
    for width in WIDTHS:
        for first in (0, n_rows - width):
            rows = slice(first, first + width)
            part = Routed(routed.expert_ids[rows], routed.weights[rows])
            assert torch.equal(moe.experts(x[rows], part, packed), whole[rows])
            again = moe.route(x[rows], routing)
            assert torch.equal(again.expert_ids, chosen.expert_ids[rows])
            assert torch.equal(again.weights, chosen.weights[rows])


def test_pairs_are_sorted_by_expert() -> None:
    """Many pairs: more than are looked at together, and experts of several tiles, of one, and of none."""
    routed = some_routed(700, 7, 2, 3)
    routed.expert_ids[routed.expert_ids == 4] = 5
    n_pairs, got = 1400, moe._sort(routed.expert_ids, 7)
    ids = routed.expert_ids.flatten()
    assert torch.equal(got.pairs.long(), torch.sort(ids, stable=True).indices)
    counts, first, meant = torch.bincount(ids, minlength=7).tolist(), 0, []
    for expert, n in enumerate(counts):
        meant += [(expert, at, first + n) for at in range(first, first + n, moe.PAIRS)]
        first += n
    assert counts[4] == 0
    n_tiles = len(meant)
    assert list(zip(*(x[:n_tiles].tolist() for x in got[1:]), strict=True)) == meant
    assert (got.experts[n_tiles:] == -1).all()
    assert n_tiles < len(got.experts) <= 7 + n_pairs // moe.PAIRS


def test_no_rows_and_weights_of_another_implementation() -> None:
    packed = moe.pack_experts(normal(3, 8, 6), normal(3, 6, 4))
    none = Routed(torch.empty((0, 2), dtype=torch.int32), torch.empty((0, 2)))
    assert moe.experts(torch.empty((0, 6)), none, packed).shape == (0, 6)
    assert moe.route(torch.empty((0, 3)), Routing(top_k=2, scores="softmax", normed=True)).weights.shape == (
        0,
        2,
    )
    with pytest.raises(TypeError, match="pack them with triton"):
        moe.experts(torch.empty((0, 6)), none, plain.pack_experts(normal(3, 8, 6), normal(3, 6, 4)))
