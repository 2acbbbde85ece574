"""The gated delta rule in CUDA C++, emulated: against the definition, and bit for bit however a sequence is cut."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from slipstream import kernels
from slipstream.kernels.gated_delta import cuda
from slipstream.kernels.gated_delta.op import DeltaGate
from slipstream.kernels.gated_delta.state import DeltaState
from tests.emulator import emulated, needs_compiler
from tests.emulator.resources import resources_of
from tests.emulator.sources import compiled
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
    everything,
    make_rows,
)

pytestmark = [needs_compiler, pytest.mark.sampled(keep=3, together=True)]
ABOUT = ("kernels/cuda/include/*.cuh",)

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ORDERS = (0, 1, 2, 7)
WIDTHS = (1, 2, 3, 5, 8, 16)
SHARED_LEAST = 99 * 1024  # bytes of a block, on compute capability 8.9 and 12.0; others have more
# Columns of one block or three, whole pieces of them or not, keys of both kernels, groups of one to three value heads.
SIZES = [
    Sizes(n_key_heads, n_value_heads, d_key, d_value, per_key)
    for n_key_heads, n_value_heads, d_key, d_value in (
        (1, 3, 5, 3),
        (2, 2, 20, 36),
        (1, 2, 130, 17),
        (1, 1, 128, 32),
    )
    for per_key in (False, True)
]
each_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: str(dtype)[6:])
each_draw = pytest.mark.parametrize("seed", range(24))
each_order = pytest.mark.parametrize("order", ORDERS)
each_size = pytest.mark.parametrize(
    "sizes", [Sizes(1, 1, 5, 3, True), Sizes(1, 2, 20, 36, False)], ids=["per-key", "per-head"]
)


@pytest.fixture(autouse=True)
def _emulated() -> Iterator[None]:
    with emulated(), kernels.use("cuda", "gated_delta"), kernels.use("reference", "short_conv"):
        yield


@each_dtype
@each_draw
def test_passes(seed: int, dtype: torch.dtype) -> None:
    sizes = SIZES[seed % len(SIZES)]
    layers, schedule = [Layer(sizes, dtype).begin(0, 1, 2) for _ in range(2)], Schedule(seed)
    before, spans = schedule.pass_of(), schedule.pass_of()
    outputs = []
    for implementation, layer in zip(("cuda", "reference"), layers, strict=True):
        with kernels.use("reference", "gated_delta"):
            layer.feed(*before)
        with kernels.use(implementation, "gated_delta"), emulated(order=ORDERS[seed % 4]):
            outputs.append(layer.feed(*spans))
    for got, meant in zip(*outputs, strict=True):
        assert_near(got[1], meant[1], share=1e-5)
    for one, other in zip(*map(everything, layers), strict=True):
        assert_near(one, other, share=1e-5)
        other.copy_(one)  # what follows starts from the same bits
    spans = schedule.settling()
    for implementation, layer in zip(("cuda", "reference"), layers, strict=True):
        with kernels.use(implementation, "gated_delta"):
            layer.settle(*spans)
    for one, other in zip(*map(everything, layers), strict=True):
        assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))  # settling gives the same bits everywhere


@each_dtype
@each_size
def test_committing_drafts_is_feeding_them(dtype: torch.dtype, sizes: Sizes) -> None:
    """More updates than shared memory holds at a time, folded to before, at and behind the end of a stage."""
    places, text, after = list(range(39, 19, -1)), list(range(20, 41)), list(range(60, 71))
    for m in (0, 3, 8, 20):
        parked, fed = Layer(sizes, dtype).begin(1), Layer(sizes, dtype).begin(1)
        drafted = parked.feed(Span(1, text, n_settled=1, parks=places))[0]
        meant = fed.feed(Span(1, text[: 1 + m], n_settled=1 + m))[0]
        assert_same(tuple(part[: 1 + m] for part in drafted), meant)
        # The next pass folds what was kept and parks over it; one more settles without rows of its own.
        over = places[10::-1][:10]
        next_drafted = parked.feed(Span(1, after, places[:m], n_settled=m + 1, parks=over))[0]
        assert_same(next_drafted, fed.feed(Span(1, after, n_settled=8))[0])
        parked.settle(Span(1, history=over[:7], n_settled=7))
        assert_same(parked.kept(1), fed.kept(1))


@each_order
@pytest.mark.parametrize("n_settled", [0, 1, 5, 6, 7, 8, 9, 16, 17, 24])
def test_the_state_takes_in_as_many_updates_as_it_is_told(n_settled: int, order: int) -> None:
    """Six folded and eighteen rows: in the history, at its end, in a stage, at the ends of two."""
    sizes, places = Sizes(1, 2, 20, 36, per_key=False), list(range(6))
    parked, fed = Layer(sizes, torch.float32).begin(0), Layer(sizes, torch.float32).begin(0)
    with emulated(order=order):
        parked.feed(Span(0, range(6), n_settled=0, parks=places))
        got = parked.feed(Span(0, range(6, 24), places, n_settled))[0]
    meant = fed.feed(Span(0, range(24), n_settled=n_settled))[0]
    assert_same(got, tuple(part[6:] for part in meant))
    assert_same(parked.kept(0), fed.kept(0))
    with kernels.use("reference", "gated_delta"):
        defined = Layer(sizes, torch.float32).begin(0)
        defined.feed(Span(0, range(24), n_settled=n_settled))
    for one, other in zip(parked.kept(0), defined.kept(0), strict=True):
        assert_near(one, other, share=1e-5)


@each_dtype
@each_size
def test_replayed_chain(dtype: torch.dtype, sizes: Sizes) -> None:
    assert_a_chain_replays(sizes, dtype)


@each_dtype
def test_width_is_not_seen(dtype: torch.dtype) -> None:
    assert_width_is_not_seen(Sizes(1, 1, 5, 3, dtype is torch.float32), dtype, 40, WIDTHS)


@each_order
def test_parking_over_a_history_that_others_read(order: int) -> None:
    """Three blocks of columns, two of heads that share a key: each parks over what all have still to fold."""
    sizes = Sizes(1, 2, 5, 36, per_key=True)
    layers = [Layer(sizes, torch.float32).begin(0, 1) for _ in range(2)]
    first = Span(0, range(5), n_settled=1, parks=[1, 2, 3, 4]), Span(1, range(7, 9), n_settled=1, parks=[8])
    then = Span(0, range(9, 13), [1, 2, 3], 4, parks=[3, 2, 1]), Span(1, [13, 14], [8], 1, parks=[9, 8])
    outputs = []
    for layer in layers:
        with emulated(order=order if layer is layers[0] else 0):
            outputs += [layer.feed(*first), layer.feed(*then)]
    for got, meant in zip(outputs[1], outputs[3], strict=True):
        assert_same(got, meant)
    for one, other in zip(*map(everything, layers), strict=True):
        assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))
    with kernels.use("reference", "gated_delta"):
        layer = Layer(sizes, torch.float32).begin(0, 1)
        layer.feed(*first)
        layer.feed(*then)
    for one, other in zip(everything(layers[0]), everything(layer), strict=True):
        assert_near(one, other, share=1e-5)


@each_dtype
def test_nan_stays_in_its_slot(dtype: torch.dtype) -> None:
    assert_nan_stays_in_its_slot(SIZES[1], dtype)


def test_nan_of_a_value_stays_in_its_column() -> None:
    """Rows of zeros beside a state have no part in it, whatever a delta is."""
    sizes = Sizes(1, 2, 20, 36, per_key=False)
    clean, spoilt = (Layer(sizes, torch.float32).begin(0) for _ in range(2))
    spoilt.tokens.x[1, 2 * 20 + 36 + 17] = torch.nan  # value 17 of head 1
    meant, got = (layer.feed(Span(0, [0, 1, 2], n_settled=3))[0][1] for layer in (clean, spoilt))
    assert torch.equal(got.isnan().nonzero(), torch.tensor([[1, 1, 17], [2, 1, 17]]))
    assert torch.equal(got.nan_to_num(0), meant.masked_fill(got.isnan(), 0))


@pytest.mark.parametrize("sizes", SIZES[:2], ids=["per-head", "per-key"])
def test_extreme_gates(sizes: Sizes) -> None:
    """Decays near 0 and 1, steps far from 0."""
    layers = [Layer(sizes, torch.float32).begin(0) for _ in range(2)]
    for layer in layers:
        for token, (raw, beta) in enumerate([(-60.0, 40.0), (-5.0, -90.0), (80.0, 0.0), (9.0, 3.0)]):
            layer.tokens.raw_decay[token], layer.tokens.raw_beta[token] = raw, beta
    got = layers[0].feed(Span(0, range(4), n_settled=4))[0]
    with kernels.use("reference", "gated_delta"):
        meant = layers[1].feed(Span(0, range(4), n_settled=4))[0]
    assert_near(got[1], meant[1], share=1e-5)
    assert_near(layers[0].delta.state[0], layers[1].delta.state[0], share=1e-5)


def test_gates_of_either_dtype_beside_narrow_rows() -> None:
    layer = Layer(SIZES[0], torch.bfloat16)
    rows, t = make_rows([Span(0, range(3), n_settled=3)]), layer.tokens
    found = []
    for decay_dtype, beta_dtype in (
        (torch.bfloat16,) * 2,
        (torch.float32,) * 2,
        (torch.float32, torch.bfloat16),
    ):
        layer.begin(0)
        raw = t.raw_decay[:3].to(decay_dtype), t.raw_beta[:3].to(beta_dtype)
        found.append(cuda.gated_delta(t.x[:3], *raw, t.gate, layer.delta, rows))
    assert_same((found[0], found[0]), (found[1], found[2]))


def test_padding_of_a_history_is_not_read() -> None:
    """As captured passes have it: room for more parked rows than there are."""
    layers = [Layer(SIZES[3], torch.float32).begin(0) for _ in range(2)]
    found = []
    for layer, padding in zip(layers, ([], [1 << 20, 39, 38]), strict=True):
        layer.feed(Span(0, range(3), n_settled=1, parks=[4, 5]))
        rows, t = make_rows([Span(0, [7], [4, 5], n_settled=2)]), layer.tokens
        padded = torch.cat([rows.history_rows, torch.tensor(padding, dtype=torch.int32)])
        object.__setattr__(rows, "history_rows", padded)
        args = t.x[7:8].contiguous(), t.raw_decay[7:8], t.raw_beta[7:8], t.gate, layer.delta, rows
        found.append((cuda.gated_delta(*args), layer.delta.state[0]))
    assert_same(*found)


def test_no_room_to_park_and_nothing_to_do() -> None:
    layer = Layer(SIZES[0], torch.float32).begin(0)
    kept = layer.delta
    layer.delta = DeltaState(kept.state, kept.parked_keys[:0], kept.parked_deltas[:0], kept.parked_decays[:0])
    (out,) = layer.feed(Span(0, [1, 2], n_settled=2))
    assert not any(part.isnan().any() for part in out)
    before = layer.kept(0)
    assert layer.feed() == []
    layer.settle()
    layer.settle(Span(0))
    assert_same(layer.kept(0), before)


def test_a_block_fits_everywhere() -> None:
    taken = resources_of(compiled(cuda.SOURCE, "sm_89"))
    for d in cuda.KEYS:
        for per_key in (False, True):
            static = taken[f"advance<{str(per_key).lower()}, {d}>"].shared
            assert cuda.shared_memory(d, per_key=per_key) + static <= SHARED_LEAST


def test_what_does_not_fit_is_refused() -> None:
    layer = Layer(SIZES[0], torch.float32).begin(0)
    rows, t = make_rows([Span(0, [1], n_settled=1)]), layer.tokens
    raw = t.raw_decay[:1], t.raw_beta[:1]
    mixed = t.x[:1].contiguous()
    gate = DeltaGate(t.gate.a_log, torch.zeros(2, 5))
    with pytest.raises(ValueError, match="decays by itself"):
        cuda.gated_delta(mixed, *raw, gate, layer.delta, rows)
    with pytest.raises(ValueError, match="weights are float32"):
        cuda.gated_delta(mixed, *raw, DeltaGate(t.gate.a_log.double(), t.gate.dt_bias), layer.delta, rows)
    with pytest.raises(ValueError, match="rows' dtype"):
        cuda.gated_delta(mixed, raw[0].double(), raw[1], t.gate, layer.delta, rows)
    wide = Layer(Sizes(1, 1, 257, 3, per_key=False), torch.float32)
    with pytest.raises(ValueError, match="up to 256"):
        wide.feed(Span(0, [1], n_settled=1))
    object.__setattr__(rows, "slot_ids", rows.slot_ids.long())
    with pytest.raises(ValueError, match="int32"):
        cuda.gated_delta(mixed, *raw, t.gate, layer.delta, rows)
    assert cuda.refuses(torch.device("cuda"), torch.float64) is not None
