"""Short convolutions in Triton's interpreter: against the definition, and bit for bit however a sequence is cut."""

from __future__ import annotations

import random as randoms
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from slipstream import kernels
from slipstream.kernels.short_conv import reference as plain_conv
from slipstream.kernels.short_conv.state import ConvState
from tests.oracle.interpreted import assert_near
from tests.oracle.recurrent import (
    Layer,
    Schedule,
    Sizes,
    Span,
    assert_a_chain_replays,
    assert_nan_stays_in_its_slot,
    assert_same,
    assert_width_is_not_seen,
    make_rows,
)

# isort: split
from slipstream.kernels.short_conv import triton as conv

pytestmark = pytest.mark.sampled(keep=3, together=True)
ABOUT = ("kernels/triton_launch.py",)

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
WIDTHS = (1, 2, 3, 5, 8, 16)
SIZES = [
    Sizes(n_key_heads, n_value_heads, d_key, d_value, per_key)
    for n_key_heads, n_value_heads, d_key, d_value in ((1, 3, 5, 3), (2, 2, 20, 3), (1, 1, 16, 9))
    for per_key in (False, True)
]
each_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: str(dtype)[6:])
each_draw = pytest.mark.parametrize("seed", range(20))
each_size = pytest.mark.parametrize(
    "sizes", [Sizes(1, 1, 5, 3, True), Sizes(1, 2, 20, 3, False)], ids=["per-key", "per-head"]
)


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    with kernels.use("triton", "short_conv"), kernels.use("reference", "gated_delta"):
        yield


@each_dtype
@each_draw
def test_passes(seed: int, dtype: torch.dtype) -> None:
    layers, schedule = (
        [Layer(SIZES[seed % len(SIZES)], dtype).begin(0, 1, 2) for _ in range(2)],
        Schedule(seed),
    )
    passes = schedule.pass_of(), schedule.pass_of(), schedule.settling()
    outputs = []
    for implementation, layer in zip(("triton", "reference"), layers, strict=True):
        with kernels.use(implementation, "short_conv"):
            outputs.append([one[0] for spans in passes[:2] for one in layer.feed(*spans)])
            layer.settle(*passes[2])
    for got, meant in zip(*outputs, strict=True):
        assert_near(got, meant)
    for one, other in zip(*((layer.conv.window, layer.conv.parked) for layer in layers), strict=True):
        assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))


@each_dtype
@each_draw
def test_convolutions_of_any_width(seed: int, dtype: torch.dtype) -> None:
    random, generator = randoms.Random(seed), torch.Generator().manual_seed(seed)
    n_channels, width = random.choice([random.randint(1, 40), 600]), random.randint(2, 6)
    n_first = random.randint(0, 7)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    rows = make_rows(
        [
            Span(2, range(n_first), n_settled=random.randint(0, n_first)),
            Span(1, history=[3, 8, 1][: random.randint(0, 3)]),
            Span(0, range(4), [9, 5], n_settled=random.randint(0, 6), parks=[5, 9, 2]),
        ]
    )
    x, weight = normal(len(rows.park_rows) + 2, n_channels + 1)[:, 1:], normal(n_channels, width)
    weight = weight if random.random() < 0.5 else weight.T.contiguous().T
    before = normal(3, width - 1, n_channels), normal(10, n_channels)
    results = []
    for each in (conv, plain_conv):
        state = ConvState(*(part.clone() for part in before))
        out = each.short_conv(x, weight, state, rows)
        assert out[-2:].isnan().all()  # rows of no span
        results.append((out[:-2], state.window, state.parked))
    assert_near(results[0][0], results[1][0])
    assert_same(results[0][1:], results[1][1:])


@each_dtype
@each_size
def test_committing_drafts_is_feeding_them(dtype: torch.dtype, sizes: Sizes) -> None:
    places, text, after = [8, 3, 30], list(range(20, 24)), [40, 41, 42]
    for m in (0, 3):
        parked, fed = Layer(sizes, dtype).begin(1), Layer(sizes, dtype).begin(1)
        drafted = parked.feed(Span(1, text, n_settled=1, parks=places))[0]
        assert_same(
            tuple(part[: 1 + m] for part in drafted), fed.feed(Span(1, text[: 1 + m], n_settled=1 + m))[0]
        )
        # The next pass folds what was kept and parks over it; one more settles without rows of its own.
        next_drafted = parked.feed(
            Span(1, after, history=places[:m], n_settled=m + 1, parks=[places[2], places[0]])
        )[0]
        assert_same(next_drafted, fed.feed(Span(1, after, n_settled=3))[0])
        parked.settle(Span(1, history=[places[2], places[0]], n_settled=2))
        assert_same(parked.kept(1), fed.kept(1))


@each_dtype
@each_size
def test_replayed_chain(dtype: torch.dtype, sizes: Sizes) -> None:
    assert_a_chain_replays(sizes, dtype)


@each_dtype
def test_width_is_not_seen(dtype: torch.dtype) -> None:
    assert_width_is_not_seen(Sizes(1, 1, 5, 3, dtype is torch.float32), dtype, 16, WIDTHS)


@each_dtype
def test_nan_stays_in_its_slot(dtype: torch.dtype) -> None:
    assert_nan_stays_in_its_slot(SIZES[1], dtype)


def test_no_room_to_park_and_nothing_to_do() -> None:
    layer = Layer(SIZES[0], torch.float32).begin(0)
    layer.conv = ConvState(layer.conv.window, layer.conv.parked[:0])
    (out,) = layer.feed(Span(0, [1, 2], n_settled=2))
    assert not out[0].isnan().any()
    before = layer.kept(0)
    assert layer.feed() == []
    layer.settle()
    layer.settle(Span(0))
    assert_same(layer.kept(0), before)


def test_what_does_not_fit_is_refused() -> None:
    layer = Layer(SIZES[0], torch.float32).begin(0)
    rows, t = make_rows([Span(0, [1], n_settled=1)]), layer.tokens
    mixed = t.x[:1].contiguous()
    with pytest.raises(ValueError, match="width"):
        conv.short_conv(mixed, t.weight[:, 1:], layer.conv, rows)
    object.__setattr__(rows, "slot_ids", rows.slot_ids.long())
    with pytest.raises(ValueError, match="int32"):
        conv.short_conv(mixed, t.weight, layer.conv, rows)
