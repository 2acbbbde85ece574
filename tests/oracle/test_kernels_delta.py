"""Recurrent ops: against the formulas in float64, and bit for bit however a sequence is cut, parked and folded."""

from __future__ import annotations

import itertools
import random as randoms
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from slipstream import kernels
from slipstream.kernels.gated_delta.op import DeltaState
from slipstream.kernels.gated_norm.op import Activation, gated_norm
from slipstream.kernels.short_conv.op import ConvState
from tests.oracle.recurrent import (
    N_TOKENS,
    Layer,
    Sizes,
    Span,
    Tokens,
    assert_nan_stays_in_its_slot,
    assert_same,
    recurrence,
)

pytestmark = pytest.mark.sampled(keep=8)

FAST = (torch.float32, torch.bfloat16)
SIZES = [
    Sizes(n_key_heads, n_value_heads, d_key, d_value, per_key)
    for n_key_heads, n_value_heads, d_key, d_value in ((2, 4, 24, 37), (3, 3, 7, 150), (1, 2, 16, 64))
    for per_key in (False, True)
]
# Largest difference allowed from float64, as a share of the largest value.
SHARE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 2e-2}

each_size = pytest.mark.parametrize(
    "sizes",
    SIZES,
    ids=lambda s: (
        f"{s.n_key_heads}x{s.d_key}-{s.n_value_heads}x{s.d_value}-{'per-key' if s.per_key else 'per-head'}"
    ),
)
each_case = pytest.mark.parametrize(
    ("implementation", "dtype"),
    [("reference", torch.float64), *itertools.product(("reference", "cpu"), FAST)],
    ids=lambda one: str(one).split(".")[-1],
)
each_fast_dtype = pytest.mark.parametrize("dtype", FAST, ids=lambda dtype: str(dtype)[6:])


@pytest.fixture(autouse=True)
def _chosen(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs each test with the implementation it names, else with the fast one."""
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    with kernels.use(parameters.get("implementation", "cpu"), "short_conv", "gated_delta", "gated_norm"):
        yield


@pytest.fixture(params=[1, 2], ids=["one-thread", "two-threads"])
def n_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def assert_near(got: Tensor, meant: Tensor, dtype: torch.dtype) -> None:
    worst = (got.double() - meant.double()).abs().max().item()
    assert got.shape == meant.shape
    assert worst <= SHARE[dtype] * max(1.0, meant.abs().max().item()), worst


def parked_parts(state: DeltaState) -> tuple[Tensor, Tensor, Tensor]:
    return state.parked_keys, state.parked_deltas, state.parked_decays


def assert_follows(layer: Layer, slot: int, settled: list[int]) -> None:
    """The slot holds what the formulas leave after these tokens."""
    _, _, window, state = recurrence(layer.tokens, settled, layer.sizes)
    assert_near(layer.conv.window[slot], window, layer.dtype)
    assert_near(layer.delta.state[slot], state, layer.dtype)


def assert_row_follows(layer: Layer, got: tuple[Tensor, Tensor], ids: list[int]) -> None:
    """Outputs `got` are those of the last tokens of the sequence."""
    mixed, o, _, _ = recurrence(layer.tokens, ids, layer.sizes)
    assert_near(got[0], mixed[-len(got[0]) :], layer.dtype)
    assert_near(got[1], o[-len(got[1]) :], layer.dtype)


@each_case
@each_size
def test_passes_follow_the_formulas(implementation: str, dtype: torch.dtype, sizes: Sizes) -> None:
    layer = Layer(sizes, dtype).begin(0, 1, 2)
    first = layer.feed(
        Span(2, range(5), n_settled=5),
        Span(0),
        Span(1, [10, 11, 12, 13], n_settled=1, parks=[4, 1, 7]),
    )
    assert_row_follows(layer, first[0], [0, 1, 2, 3, 4])
    assert_row_follows(layer, first[2], [10, 11, 12, 13])
    assert_follows(layer, 2, [0, 1, 2, 3, 4])
    assert_follows(layer, 1, [10])
    second = layer.feed(
        Span(1, [20, 21, 22], history=[4, 1], n_settled=3, parks=[4, 7]),  # over its own history
        Span(2, range(30, 48), n_settled=18),
    )
    assert_row_follows(layer, second[0], [10, 11, 12, 20, 21, 22])
    assert_row_follows(layer, second[1], [0, 1, 2, 3, 4, *range(30, 48)])
    assert_follows(layer, 1, [10, 11, 12, 20])
    third = layer.feed(
        Span(1, [23], history=[4, 7], n_settled=1, parks=[9])
    )  # one more settled, one replayed
    assert_row_follows(layer, third[0], [10, 11, 12, 20, 21, 22, 23])
    assert_follows(layer, 1, [10, 11, 12, 20, 21])
    layer.settle(Span(1, history=[7, 9], n_settled=1), Span(0), Span(2))
    assert_follows(layer, 1, [10, 11, 12, 20, 21, 22])
    layer.feed(Span(1, history=[9], n_settled=1), Span(2, [5], n_settled=1))  # a span that only folds
    assert_follows(layer, 1, [10, 11, 12, 20, 21, 22, 23])
    assert_follows(layer, 2, [0, 1, 2, 3, 4, *range(30, 48), 5])
    assert not layer.delta.state[0].any()


@each_case
@each_size
def test_committing_drafts_is_feeding_them(implementation: str, dtype: torch.dtype, sizes: Sizes) -> None:
    n_drafts, places = 6, [8, 3, 30, 2, 5, 17]
    text, after = list(range(20, 27)), list(range(40, 44))
    for m in range(n_drafts + 1):
        parked, fed = Layer(sizes, dtype).begin(1), Layer(sizes, dtype).begin(1)
        for layer in (parked, fed):
            layer.feed(Span(1, range(5), n_settled=5))
        drafted = parked.feed(Span(1, text, n_settled=1, parks=places))[0]
        meant = fed.feed(Span(1, text[: 1 + m], n_settled=1 + m))[0]
        assert_same(tuple(part[: 1 + m] for part in drafted), meant)
        # The next pass folds what was kept, and parks over it.
        next_drafted = parked.feed(
            Span(1, after, history=places[:m], n_settled=m + 1, parks=[places[0], places[2], places[1]])
        )[0]
        assert_same(next_drafted, fed.feed(Span(1, after, n_settled=1, parks=[1, 2, 3]))[0])
        assert_same(parked.kept(1), fed.kept(1))
        # So does settling without rows of its own.
        parked.settle(Span(1, history=[places[0], places[2]], n_settled=2))
        fed.settle(Span(1, history=[1, 2], n_settled=2))
        again = Layer(sizes, dtype).begin(1)
        again.feed(Span(1, [*range(5), *text[: 1 + m], *after[:3]], n_settled=5 + 1 + m + 3))
        assert_same(parked.kept(1), again.kept(1))
        assert_same(fed.kept(1), again.kept(1))


@each_case
@each_size
def test_replayed_chain(implementation: str, dtype: torch.dtype, sizes: Sizes) -> None:
    """A draft network: one provisional row per pass on top of the rows before, nothing stored until accepted."""
    chain, places = list(range(60, 66)), [7, 1, 9, 4, 0, 12]
    meant = Layer(sizes, dtype).begin(0)
    meant.feed(Span(0, range(3), n_settled=3))
    whole = meant.feed(Span(0, chain, n_settled=0, parks=places))[0]
    layer = Layer(sizes, dtype).begin(0)
    layer.feed(Span(0, range(3), n_settled=3))
    before = layer.kept(0)
    for i, token in enumerate(chain):
        row = layer.feed(Span(0, [token], history=places[:i], parks=[places[i]]))[0]
        assert_same(row, tuple(part[i : i + 1] for part in whole))
        assert_same(layer.kept(0), before)
    for m in (0, 2, 6):
        one = Layer(sizes, dtype).begin(0)
        one.feed(Span(0, [*range(3), *chain[:m], 70], n_settled=4 + m))
        layer.delta.state[0], layer.conv.window[0] = before[1], before[0]
        layer.feed(Span(0, [70], history=places[:m], n_settled=m + 1))
        assert_same(layer.kept(0), one.kept(0))


@each_case
@pytest.mark.parametrize("sizes", [SIZES[0], SIZES[3]], ids=["per-head", "per-key"])
def test_long_drafts(implementation: str, dtype: torch.dtype, sizes: Sizes) -> None:
    """More drafts than compiled code prepares at a time, and parked over a history of which a part is settled."""
    places = [*range(39, 14, -1)]
    for m, n_settled in ((25, 26), (25, 18), (17, 18), (17, 3), (25, 0)):
        parked, fed = Layer(sizes, dtype).begin(0), Layer(sizes, dtype).begin(0)
        parked.feed(Span(0, range(26), n_settled=1, parks=places))
        got = parked.feed(Span(0, range(50, 70), places[:m], n_settled, places[:19][::-1]))[0]
        text = [*range(1 + m), *range(50, 70)]
        meant = fed.feed(Span(0, text, n_settled=1 + n_settled))[0]
        assert_same(got, tuple(part[1 + m :] for part in meant))
        assert_same(parked.kept(0), fed.kept(0))
        parked.settle(Span(0, history=places[:19][::-1][:2], n_settled=0))
        assert_same(parked.kept(0), fed.kept(0))


@each_case
@pytest.mark.parametrize("seed", range(3))
def test_any_schedule(implementation: str, dtype: torch.dtype, seed: int) -> None:
    """Chunks, drafts right and wrong, settling and idling over four slots give what one pass per slot gives."""
    random, sizes = randoms.Random(seed), SIZES[seed % 2]
    layer = Layer(sizes, dtype).begin(0, 1, 2, 3)
    texts = {slot: [random.randrange(N_TOKENS) for _ in range(40)] for slot in range(4)}
    done = dict.fromkeys(texts, 0)
    kept: dict[int, list[int]] = {slot: [] for slot in texts}
    outputs: dict[int, list[tuple[Tensor, Tensor]]] = {slot: [] for slot in texts}
    while min(done.values()) < 40:
        unfinished = [slot for slot in texts if done[slot] < 40]
        slots = random.sample(unfinished, random.randint(1, len(unfinished)))
        spans, keeps = [], []
        for slot in slots:
            left = texts[slot][done[slot] :]
            n_certain, n_right = random.choice([(1, random.randint(0, 4)), (random.randint(1, 20), 0)])
            certain = left[:n_certain]
            right = left[n_certain : n_certain + n_right]
            wrong = [random.randrange(N_TOKENS) for _ in range(random.randint(0, 2))]
            places = random.sample(range(slot * 10, slot * 10 + 10), len(right) + len(wrong))
            n_settled = len(kept[slot]) + len(certain)
            spans.append(Span(slot, [*certain, *right, *wrong], kept[slot], n_settled, places))
            keeps.append((slot, len(certain), places[: len(right)]))
        for (slot, n_certain, places), got in zip(keeps, layer.feed(*spans), strict=True):
            n_kept = n_certain + len(places)
            outputs[slot].append((got[0][:n_kept], got[1][:n_kept]))
            done[slot], kept[slot] = done[slot] + n_kept, places
        if random.random() < 0.3:
            layer.settle(*(Span(slot, history=kept[slot], n_settled=len(kept[slot])) for slot in kept))
            kept = {slot: [] for slot in texts}
    layer.settle(*(Span(slot, history=kept[slot], n_settled=len(kept[slot])) for slot in kept))
    for slot, text in texts.items():
        alone = Layer(sizes, dtype).begin(slot)
        meant = alone.feed(Span(slot, text, n_settled=40))[0]
        assert_same(tuple(torch.cat(parts) for parts in zip(*outputs[slot], strict=True)), meant)
        assert_same(layer.kept(slot), alone.kept(slot))


SEEN: dict[str, tuple[Tensor, ...]] = {}


@each_fast_dtype
@pytest.mark.parametrize(
    "sizes", [SIZES[0], Sizes(2, 4, 128, 128, False), Sizes(2, 2, 64, 96, True)], ids=str
)
def test_width_is_not_seen(dtype: torch.dtype, sizes: Sizes, n_threads: int) -> None:
    whole = Layer(sizes, dtype).begin(1)
    meant = whole.feed(Span(1, range(70), n_settled=70))[0]
    seen = SEEN.setdefault(f"{dtype} {sizes}", (*meant, *whole.kept(1)))
    assert_same((*meant, *whole.kept(1)), seen)
    others = (
        Span(3, range(90, 154), n_settled=64),
        Span(0, [200], n_settled=1),
        Span(4, [9, 8, 7, 6, 5], n_settled=5),
    )
    for width in (1, 2, 3, 5, 8, 16, 64):
        alone, beside = Layer(sizes, dtype).begin(1), Layer(sizes, dtype).begin(*range(5))
        rows: list[tuple[Tensor, Tensor]] = []
        for start in range(0, 70, width):
            span = Span(1, range(start, min(start + width, 70)), n_settled=min(width, 70 - start))
            rows.append(alone.feed(span)[0])
            n_before = start // width % 4  # spans before it in the pass
            among = (*others[:n_before], span, *others[n_before:]) if start < 3 * width else (span,)
            assert_same(beside.feed(*among)[among.index(span)], rows[-1])
        assert_same(tuple(torch.cat(parts) for parts in zip(*rows, strict=True)), meant)
        assert_same(alone.kept(1), whole.kept(1))
        assert_same(beside.kept(1), whole.kept(1))


@each_case
def test_no_room_to_park(implementation: str, dtype: torch.dtype) -> None:
    layer = Layer(SIZES[1], dtype).begin(0)
    layer.delta = DeltaState(layer.delta.state, *(x[:0] for x in parked_parts(layer.delta)))
    layer.conv = ConvState(layer.conv.window, layer.conv.parked[:0])
    assert_row_follows(layer, layer.feed(Span(0, range(6), n_settled=6))[0], list(range(6)))
    layer.settle(Span(0))
    assert_follows(layer, 0, list(range(6)))


@each_case
def test_nan_stays_in_its_slot(implementation: str, dtype: torch.dtype) -> None:
    assert_nan_stays_in_its_slot(SIZES[1], dtype)


@pytest.mark.parametrize("sizes", SIZES[:2], ids=["per-head", "per-key"])
def test_extreme_gates(sizes: Sizes) -> None:
    """Decays near 0 and 1, steps far from 0: still what float64 says."""
    layer = Layer(sizes, torch.float32).begin(0)
    for token, (raw, beta) in enumerate(
        [(-60.0, 40.0), (-5.0, -40.0), (80.0, 0.0), (9.0, 3.0), (-12.0, 90.0)]
    ):
        layer.tokens.raw_decay[token], layer.tokens.raw_beta[token] = raw, beta
    got = layer.feed(Span(0, range(5), n_settled=5))[0]
    assert_row_follows(layer, got, list(range(5)))
    assert_follows(layer, 0, list(range(5)))


def test_settling_gives_the_same_bits_everywhere() -> None:
    layer = Layer(SIZES[1], torch.float32).begin(0)
    layer.feed(Span(0, range(8), n_settled=3, parks=range(5)))
    before, results = layer.kept(0), []
    for implementation in ("reference", "cpu"):
        layer.conv.window[0], layer.delta.state[0] = before
        with kernels.use(implementation, "short_conv", "gated_delta"):
            layer.settle(Span(0, history=range(5), n_settled=4))
        results.append(layer.kept(0))
    assert_same(*results)


def test_settling_takes_float64_where_float32_was_selected() -> None:
    layer = Layer(SIZES[0], torch.float64).begin(0)
    with kernels.use("reference", "short_conv", "gated_delta"):
        layer.feed(Span(0, range(3), n_settled=1, parks=[0, 1]))
        expected = Tokens.random(SIZES[0], torch.float64)
    with kernels.use("cpu", "gated_delta"), kernels.use("reference", "short_conv"):
        layer.settle(Span(0, history=[0, 1], n_settled=2))
    _, _, _, state = recurrence(expected, [0, 1, 2], SIZES[0])
    assert_near(layer.delta.state[0], state, torch.float64)


@each_case
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("weight_is_wide", [False, True])
def test_gated_norm(
    implementation: str, dtype: torch.dtype, activation: Activation, weight_is_wide: bool
) -> None:
    generator = torch.Generator().manual_seed(3)
    n_rows, n_heads, d = 7, 3, 37
    x = torch.randn(n_rows, n_heads, d, generator=generator).to(dtype)
    gate = (3 * torch.randn(n_rows, n_heads * d + 9, generator=generator)).to(dtype)[:, 4 : 4 + n_heads * d]
    weight = torch.randn(d, generator=generator).to(dtype)
    if weight_is_wide:
        weight = weight.to(torch.promote_types(dtype, torch.float32))
    wide, opened = x.double(), 1 / (1 + torch.exp(-gate.double()))
    if activation == "silu":
        opened = opened * gate.double()
    meant = wide / (torch.einsum("rhd,rhd->rh", wide, wide)[:, :, None] / d + 1e-5).sqrt() * weight.double()
    got = gated_norm(x, gate, weight, 1e-5, activation)
    assert got.dtype == dtype
    assert_near(got, meant.flatten(1) * opened, torch.float32 if dtype == torch.float32 else dtype)


@each_fast_dtype
def test_gated_norm_does_not_see_width(dtype: torch.dtype, n_threads: int) -> None:
    generator = torch.Generator().manual_seed(4)
    for d in (37, 128):
        x = torch.randn(70, 4, d, generator=generator).to(dtype)
        gate, weight = torch.randn(70, 4 * d, generator=generator).to(dtype), torch.ones(d, dtype=dtype)
        whole = gated_norm(x, gate, weight, 1e-6, "silu")
        for width in (1, 2, 3, 5, 8, 16, 64):
            for rows in (slice(0, width), slice(70 - width, 70)):
                assert torch.equal(gated_norm(x[rows], gate[rows], weight, 1e-6, "silu"), whole[rows])


def test_misfits_are_refused() -> None:
    layer = Layer(SIZES[0], torch.float32).begin(0)
    other = Layer(SIZES[1], torch.float32)
    object.__setattr__(layer.tokens, "raw_decay", other.tokens.raw_decay)
    with pytest.raises(ValueError, match="decays by itself"):
        layer.feed(Span(0, [1], n_settled=1))
    with pytest.raises(ValueError, match="activation"):
        gated_norm(torch.zeros(1, 2, 3), torch.zeros(1, 6), torch.zeros(3), 1e-6, "tanh")  # type: ignore[arg-type]
    object.__setattr__(layer.tokens, "weight", layer.tokens.weight[:, 1:])
    with pytest.raises(ValueError, match="width"):
        layer.feed(Span(0, [1], n_settled=1))
