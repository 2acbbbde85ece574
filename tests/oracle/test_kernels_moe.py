"""Mixture of experts: the ops against dense formulas of their own, each other, and themselves at other widths."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from slipstream import kernels
from slipstream.kernels.gated.activation import GELU, SILU, Activation
from slipstream.kernels.gated.op import gated_mul
from slipstream.kernels.matmul import panels
from slipstream.kernels.matmul.op import linear, pack
from slipstream.kernels.moe import op
from slipstream.kernels.moe.op import ExpertBiases, PackedExperts, Routed, Routing
from tests.oracle.test_kernels import FAST, assert_near, cases, random
from tests.oracle.test_kernels_width import WIDTHS, assert_rows_alone

N_EXPERTS = 12
BIAS = random(N_EXPERTS, dtype=torch.float32, seed=9) * 0.2
ROUTINGS = {
    "softmax": Routing(top_k=3, scores="softmax", normed=False),
    "softmax, normed": Routing(top_k=3, scores="softmax", normed=True),
    "one expert": Routing(top_k=1, scores="softmax", normed=True),
    "all experts": Routing(top_k=12, scores="sigmoid", normed=False),
    "sigmoid, bias": Routing(top_k=4, scores="sigmoid", normed=True, scale=2.5, bias=BIAS),
    "groups": Routing(
        top_k=4, scores="sigmoid", normed=True, scale=2.5, bias=BIAS, n_groups=4, n_groups_kept=2
    ),
    "groups, one kept": Routing(top_k=2, scores="softmax", normed=False, n_groups=3, n_groups_kept=1),
}
each_routing = pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS.keys())
each_case = cases("cpu", "panels")
each_fast_dtype = pytest.mark.parametrize("dtype", FAST, ids=lambda dtype: str(dtype)[6:])


@pytest.fixture
def chosen(implementation: str, dtype: torch.dtype) -> Iterator[None]:
    skip_without_panels(implementation, dtype)
    kernels.select("cpu", dtype)  # for what the op is made of
    with kernels.use(implementation, "moe"):
        yield


@pytest.fixture(params=[1, 2], ids=["one-thread", "two-threads"])
def n_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def skip_without_panels(implementation: str, dtype: torch.dtype) -> None:
    if implementation == "panels" and (reason := panels.refuses(torch.device("cpu"), dtype)):
        pytest.skip(reason)


def by_hand(logits: Tensor, routing: Routing) -> Tensor:
    """Weight of every expert in every row, [n_rows, n_experts] float64, one row and one expert at a time."""
    weights = torch.zeros(logits.shape, dtype=torch.float64)
    bias = [0.0] * N_EXPERTS if routing.bias is None else routing.bias.double().tolist()
    for r, row in enumerate(logits.double().tolist()):
        total = sum(math.exp(x) for x in row)
        scores = [math.exp(x) / total if routing.scores == "softmax" else 1 / (1 + math.exp(-x)) for x in row]
        keys = [score + more for score, more in zip(scores, bias, strict=True)]
        n = N_EXPERTS // routing.n_groups
        groups = [range(first, first + n) for first in range(0, N_EXPERTS, n)]
        groups.sort(key=lambda group: -sum(sorted(keys[e] for e in group)[-2:]))
        allowed = sorted(itertools.chain(*groups[: routing.n_groups_kept]))
        best = sorted(allowed, key=lambda e: -keys[e])[: routing.top_k]  # a stable sort: lowest id first
        divisor = sum(scores[e] for e in best) if routing.normed else 1.0
        for e in best:
            weights[r, e] = scores[e] / divisor * routing.scale
    return weights


def dense(routed: Routed) -> Tensor:
    """The weights at the places of their experts, [n_rows, n_experts] float64."""
    weights = torch.zeros(len(routed.expert_ids), N_EXPERTS, dtype=torch.float64)
    return weights.scatter(1, routed.expert_ids.long(), routed.weights.double())


def matrices(d_model: int, d_inner: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """gate_up [n_experts, 2 * d_inner, d_model] and down [n_experts, d_model, d_inner]."""
    gate_up = random(N_EXPERTS, 2 * d_inner, d_model, dtype=dtype, seed=1) / d_model**0.5
    return gate_up, random(N_EXPERTS, d_model, d_inner, dtype=dtype, seed=2) / d_inner**0.5


def gpt_oss(d_model: int, d_inner: int, dtype: torch.dtype) -> tuple[ExpertBiases, Activation]:
    """Biases and activation as that family has them, at a limit that is often reached."""
    biases = (random(N_EXPERTS, n, dtype=dtype, seed=n) for n in (2 * d_inner, d_model))
    return ExpertBiases(*biases), Activation("clamped", 1.5, 1.702)


def some_routed(n_rows: int, top_k: int = 3) -> Routed:
    ids = random(n_rows, N_EXPERTS, seed=3).topk(top_k).indices.sort(-1).values.int()
    return Routed(ids, random(n_rows, top_k, seed=4).float())


def first_rows(routed: Routed, rows: slice) -> Routed:
    return Routed(routed.expert_ids[rows].contiguous(), routed.weights[rows].contiguous())


@each_case
@each_routing
def test_route(chosen: None, dtype: torch.dtype, routing: Routing) -> None:
    logits = random(40, N_EXPERTS, dtype=dtype) * 2
    routed = op.route(logits, routing)
    assert routed.expert_ids.dtype == torch.int32
    assert routed.expert_ids.shape == routed.weights.shape == (40, routing.top_k)
    assert bool((routed.expert_ids.diff(dim=1) > 0).all())
    assert_near(dense(routed), by_hand(logits, routing), dtype)


@each_case
def test_ties_go_to_the_lowest_id(chosen: None, dtype: torch.dtype) -> None:
    logits = torch.zeros(3, N_EXPERTS, dtype=dtype)
    logits[1, 5:] = 1
    logits[2, 7] = 1
    plain = op.route(logits, Routing(top_k=3, scores="softmax", normed=True)).expert_ids
    assert plain.tolist() == [[0, 1, 2], [5, 6, 7], [0, 1, 7]]
    grouped = Routing(top_k=3, scores="sigmoid", normed=True, n_groups=4, n_groups_kept=1)
    # of the third row's groups 6 to 8 is best; of the second's 6 to 8 and 9 to 11 are equal
    assert op.route(logits, grouped).expert_ids.tolist() == [[0, 1, 2], [6, 7, 8], [6, 7, 8]]


@pytest.mark.parametrize("implementation", ["reference", "cpu"])
def test_logits_that_softmax_rounds_to_one_score_are_still_told_apart(implementation: str) -> None:
    logits = torch.zeros(1, N_EXPERTS)
    logits[0, 8] = 1e-9
    with kernels.use(implementation, "moe"):
        routed = op.route(logits, Routing(top_k=1, scores="softmax", normed=True))
    assert routed.expert_ids.item() == 8


@each_fast_dtype
@pytest.mark.parametrize("implementation", ["reference", "cpu"])
def test_weights_are_rounded_as_the_logits(implementation: str, dtype: torch.dtype) -> None:
    with kernels.use(implementation, "moe"):
        weights = op.route(random(20, N_EXPERTS, dtype=dtype), ROUTINGS["softmax, normed"]).weights
    assert weights.dtype == torch.float32
    assert torch.equal(weights, weights.to(dtype).float())


@each_case
@each_routing
def test_a_nan_spoils_its_row_alone(chosen: None, dtype: torch.dtype, routing: Routing) -> None:
    logits = random(5, N_EXPERTS, dtype=dtype)
    logits[0, 3] = -200.0
    meant = op.route(logits, routing)
    logits[2, 4] = float("nan")
    routed = op.route(logits, routing)
    assert routed.weights.isnan().all(1).tolist() == [False, False, True, False, False]
    assert bool(((routed.expert_ids >= 0) & (routed.expert_ids < N_EXPERTS)).all())
    others = [0, 1, 3, 4]
    assert torch.equal(routed.weights[others], meant.weights[others])
    packed = op.pack_experts(*matrices(16, 8, dtype))
    bad = op.experts(random(5, 16, dtype=dtype), routed, packed).isnan()
    assert bad.any(1).tolist() == [False, False, True, False, False]


@pytest.mark.sampled(keep=16)
@each_case
@pytest.mark.parametrize(("d_model", "d_inner"), [(16, 8), (7, 3), (130, 70), (64, 200)])
@pytest.mark.parametrize("n_rows", [1, 4, 33])
def test_experts(chosen: None, dtype: torch.dtype, d_model: int, d_inner: int, n_rows: int) -> None:
    x, (gate_up, down) = random(n_rows, d_model, dtype=dtype), matrices(d_model, d_inner, dtype)
    routed = some_routed(n_rows)
    packed = op.pack_experts(gate_up, down)
    assert packed.n_experts == N_EXPERTS
    gates, ups = torch.einsum("rm,eim->rei", x.double(), gate_up.double()).chunk(2, -1)
    said = torch.einsum("rei,emi->rem", gates / (1 + torch.exp(-gates)) * ups, down.double())
    got = op.experts(x, routed, packed)
    assert got.dtype == dtype
    assert_near(got, torch.einsum("re,rem->rm", dense(routed), said), dtype)


@each_case
@pytest.mark.parametrize(("d_model", "d_inner"), [(16, 8), (7, 3), (130, 70)])
@pytest.mark.parametrize("n_rows", [1, 33])
def test_biases_and_a_clamped_activation(
    chosen: None, dtype: torch.dtype, d_model: int, d_inner: int, n_rows: int
) -> None:
    x, (gate_up, down) = random(n_rows, d_model, dtype=dtype), matrices(d_model, d_inner, dtype)
    biases, clamped = gpt_oss(d_model, d_inner, dtype)
    routed = some_routed(n_rows)
    both = torch.einsum("rm,eim->rei", x.double(), gate_up.double()) + biases.gate_up.double()
    gates, ups = both.chunk(2, -1)
    gates, ups = gates.minimum(torch.tensor(1.5)), ups.clamp(-1.5, 1.5)
    inner = (ups + 1) * gates / (1 + torch.exp(-1.702 * gates))
    said = torch.einsum("rei,emi->rem", inner, down.double()) + biases.down.double()
    meant = torch.einsum("re,rem->rm", dense(routed), said)
    assert_near(op.experts(x, routed, op.pack_experts(gate_up, down, biases, clamped)), meant, dtype)
    # Each by itself.
    no_clamp = op.experts(x, routed, op.pack_experts(gate_up, down, biases))
    said = torch.einsum(
        "rei,emi->rem", torch.nn.functional.silu(both[..., :d_inner]) * both[..., d_inner:], down.double()
    )
    assert_near(no_clamp, torch.einsum("re,rem->rm", dense(routed), said + biases.down.double()), dtype)
    zeros = ExpertBiases(torch.zeros_like(biases.gate_up), torch.zeros_like(biases.down))
    unbiased = op.experts(x, routed, op.pack_experts(gate_up, down, activation=clamped))
    assert torch.equal(unbiased, op.experts(x, routed, op.pack_experts(gate_up, down, zeros, clamped)))


@each_case
@pytest.mark.parametrize("n_rows", [1, 33])
def test_experts_with_gelu(chosen: None, dtype: torch.dtype, n_rows: int) -> None:
    x, (gate_up, down) = random(n_rows, 130, dtype=dtype), matrices(130, 70, dtype)
    routed = some_routed(n_rows)
    gates, ups = torch.einsum("rm,eim->rei", x.double(), gate_up.double()).chunk(2, -1)
    inner = torch.nn.functional.gelu(gates, approximate="tanh") * ups
    meant = torch.einsum("re,rem->rm", dense(routed), torch.einsum("rei,emi->rem", inner, down.double()))
    assert_near(op.experts(x, routed, op.pack_experts(gate_up, down, activation=GELU)), meant, dtype)


@each_case
@pytest.mark.parametrize("n_rows", [1, 33])
def test_experts_with_limits(chosen: None, dtype: torch.dtype, n_rows: int) -> None:
    x, (gate_up, down) = random(n_rows, 130, dtype=dtype), matrices(130, 70, dtype)
    routed, limit = some_routed(n_rows), 0.4
    gates, ups = torch.einsum("rm,eim->rei", x.double(), gate_up.double()).chunk(2, -1)
    swish = torch.nn.functional.silu(gates)
    assert 0.1 < (swish > limit).double().mean() < 0.5  # often reached
    inner = swish.clamp(max=limit) * ups.clamp(-limit, limit)
    meant = torch.einsum("re,rem->rm", dense(routed), torch.einsum("rei,emi->rem", inner, down.double()))
    packed = op.pack_experts(gate_up, down, activation=Activation("limited", limit))
    assert_near(op.experts(x, routed, packed), meant, dtype)


@each_case
def test_experts_that_nobody_asks_for_are_not_read(chosen: None, dtype: torch.dtype) -> None:
    x, (gate_up, down) = random(9, 40, dtype=dtype), matrices(40, 24, dtype)
    routed = some_routed(9, top_k=2)
    routed.expert_ids[:] = torch.tensor([3, 8])
    routed.expert_ids[4] = torch.tensor([0, 8])
    meant = op.experts(x, routed, op.pack_experts(gate_up, down))
    for expert in set(range(N_EXPERTS)) - {0, 3, 8}:
        gate_up[expert] = down[expert] = float("nan")
    assert torch.equal(op.experts(x, routed, op.pack_experts(gate_up, down)), meant)


@each_case
def test_no_rows(chosen: None, dtype: torch.dtype) -> None:
    routed = op.route(torch.empty(0, N_EXPERTS, dtype=dtype), ROUTINGS["groups"])
    assert routed.expert_ids.shape == routed.weights.shape == (0, 4)
    packed = op.pack_experts(*matrices(16, 8, dtype))
    got = op.experts(torch.empty(0, 16, dtype=dtype), routed, packed)
    assert (got.shape, got.dtype) == ((0, 16), dtype)


@each_fast_dtype
def test_panels_have_the_bits_of_one_product_after_the_other(dtype: torch.dtype) -> None:
    skip_without_panels("panels", dtype)
    kernels.select("cpu", dtype)
    x, routed = random(70, 300, dtype=dtype), some_routed(70)
    weights = *matrices(300, 90, dtype), *gpt_oss(300, 90, dtype)
    with kernels.use("panels", "matmul", "moe"):
        together = op.experts(x, routed, op.pack_experts(*weights))
    with kernels.use("panels", "matmul"), kernels.use("cpu", "moe"):
        assert torch.equal(op.experts(x, routed, op.pack_experts(*weights)), together)


@each_fast_dtype
@pytest.mark.parametrize("implementation", ["cpu", "panels"])
def test_the_sum_goes_up_by_expert_in_float32_and_is_rounded_once(
    implementation: str, dtype: torch.dtype
) -> None:
    skip_without_panels(implementation, dtype)
    kernels.select("cpu", dtype)
    x, (gate_up, down), routed = random(6, 64, dtype=dtype), matrices(64, 32, dtype), some_routed(6, 5)
    meant = torch.zeros(6, 64)
    for row, (ids, weights) in enumerate(zip(*(part.tolist() for part in routed), strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            inner = gated_mul(linear(x[row, None], pack(gate_up[expert])), SILU)
            meant[row] += linear(inner, pack(down[expert]), torch.float32)[0] * weight
    with kernels.use(implementation, "moe"):
        assert torch.equal(op.experts(x, routed, op.pack_experts(gate_up, down)), meant.to(dtype))


@pytest.mark.sampled(keep=12)
@each_fast_dtype
@pytest.mark.parametrize("implementation", ["cpu", "panels"])
@pytest.mark.parametrize(("d_model", "d_inner"), [(41, 23), (512, 200), (1200, 96)])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
def test_width(
    implementation: str, dtype: torch.dtype, d_model: int, d_inner: int, biased: bool, n_threads: int
) -> None:
    skip_without_panels(implementation, dtype)
    kernels.select("cpu", dtype)
    x, routed = random(70, d_model, dtype=dtype), some_routed(70)
    more = gpt_oss(d_model, d_inner, dtype) if biased else ()
    with kernels.use(implementation, "moe"):
        packed = op.pack_experts(*matrices(d_model, d_inner, dtype), *more)
        whole = op.experts(x, routed, packed)
        for width in WIDTHS:
            for rows in (slice(0, width), slice(70 - width, 70), slice(3, 3 + width)):
                some = op.experts(x[rows], first_rows(routed, rows), packed)
                assert torch.equal(some, whole[rows]), width
    name = f"{implementation} {d_model} {biased} {dtype}"
    assert torch.equal(SEEN.setdefault(name, whole.clone()), whole), f"differs at {n_threads} threads"


SEEN: dict[str, Tensor] = {}


@each_fast_dtype
def test_rows_of_one_expert_and_rows_of_many(dtype: torch.dtype, n_threads: int) -> None:
    """However unevenly the rows fall on the experts, a row's bits stay."""
    kernels.select("cpu", dtype)
    x, packed = random(64, 256, dtype=dtype), op.pack_experts(*matrices(256, 128, dtype))
    uneven = some_routed(64)
    uneven.expert_ids[1:] = torch.tensor([0, 5, 11])
    whole = op.experts(x, uneven, packed)
    for row in (0, 1, 40, 63):
        one = slice(row, row + 1)
        assert torch.equal(op.experts(x[one], first_rows(uneven, one), packed), whole[one])


@each_fast_dtype
@each_routing
def test_width_of_routing(dtype: torch.dtype, routing: Routing) -> None:
    logits = random(70, N_EXPERTS, dtype=dtype)
    with kernels.use("cpu", "moe"):
        for part in ("expert_ids", "weights"):
            assert_rows_alone(lambda rows, part=part: getattr(op.route(rows, routing), part), logits)


def test_experts_packed_elsewhere_are_refused() -> None:
    kernels.select("cpu", torch.float32)
    names = [
        name
        for name in ("reference", "cpu", "panels")
        if name != "panels" or not panels.refuses(torch.device("cpu"), torch.float32)
    ]
    packed: dict[str, PackedExperts] = {}
    for name in names:
        with kernels.use(name, "moe"):
            packed[name] = op.pack_experts(*matrices(8, 4, torch.float32))
    for one, other in itertools.permutations(names, 2):
        with kernels.use(one, "moe"), pytest.raises(TypeError, match=f"pack them with {one}"):
            op.experts(torch.zeros(3, 8), some_routed(3), packed[other])
