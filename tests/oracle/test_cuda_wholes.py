"""CUDA's `attention` in the emulator where the rows of an image see all of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slipstream.kernels.attention import cuda
from tests.emulator import emulated, needs_compiler, same
from tests.oracle.pictured import Pictured, Stores, alone, stores_of
from tests.oracle.test_cuda_attention import assert_near, make_sinks
from tests.oracle.test_kernels import Spans, random

pytestmark = [needs_compiler, pytest.mark.sampled(keep=2, together=True)]
ABOUT = ("kernels/cuda/include/*.cuh",)
# Images within a step of positions, over the end of a chunk of 512, begun before the span, longer than a block's rows.
PASSES = (
    Pictured([40, 1], [0, 30], [[(3, 17), (17, 33), (34, 38)], []]),
    Pictured([30, 90], [500, 440], [[(495, 520), (521, 529)], [(450, 530)]]),
    Pictured([20, 3], [1030, 0], [[(500, 1047)], [(0, 3)]]),
    Pictured([30, 90], [500, 440], [[(495, 520), (521, 529)], [(450, 530)]], ahead=True),
)
# n_heads, n_kv_heads, page_size, d_head, d_value
SHAPES = [(4, 2, 16, 64, 64), (3, 1, 7, 128, 40), (2, 1, 16, 256, 256), (2, 1, 48, 512, 512)]
each_pass = pytest.mark.parametrize("case", PASSES, ids=["short", "chunks", "begun", "ahead"])
each_window = pytest.mark.parametrize("window", [None, 9, 70])
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def run(
    q: Tensor, stores: Stores, spans: Spans, window: int | None, sinks: Tensor | None = None, order: int = 0
) -> Tensor:
    with emulated(order=order):
        return cuda.attention(q, *stores, spans, 0.3, window, sinks)


def prepared(case: Pictured, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Stores, Spans]:
    n_heads, n_kv, page_size, d_head, d_value = shape
    spans = case.spans(page_size)
    q = random(sum(case.lengths), n_heads, d_head, dtype=dtype)
    return q, stores_of(spans, (n_kv, page_size, d_head, d_value), dtype), spans


@each_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@each_window
@each_pass
def test_is_near_float64(
    dtype: torch.dtype, case: Pictured, shape: tuple[int, ...], window: int | None
) -> None:
    q, stores, spans = prepared(case, shape, dtype)
    poisoned, known = case.poisoned(stores, spans, window)
    sinks = make_sinks(shape[0]) if window else None
    assert_near(run(q, poisoned, known, window, sinks, order=3), q, stores, spans, window, sinks)


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
@each_window
@each_pass
def test_float8_keys_and_values_are_read_as_those_of_the_queries_dtype(
    case: Pictured, shape: tuple[int, ...], window: int | None
) -> None:
    shape = (*shape[:3], 64, 16)
    q, stores, spans = prepared(case, shape, torch.bfloat16)
    poisoned, known = case.poisoned(stores, spans, window)
    coded = [store.float().to(torch.float8_e4m3fn) for store in poisoned]
    found = run(q, (coded[0], coded[1]), known, window)
    assert same(found, run(q, (coded[0].to(q.dtype), coded[1].to(q.dtype)), known, window))
    assert not found.isnan().any()


@each_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@each_window
@each_pass
def test_a_row_has_the_bits_of_a_plain_row_that_sees_as_much(
    dtype: torch.dtype, case: Pictured, shape: tuple[int, ...], window: int | None
) -> None:
    """So neither what is computed beside it matters, nor where its span was cut, nor that others have images."""
    q, stores, spans = prepared(case, shape, dtype)
    whole = run(q, stores, spans, window)
    for row in range(0, len(q), 5):
        one, reach = alone(case, row, window, spans)
        assert same(run(q[row : row + 1], stores, one, reach)[0], whole[row]), row


@each_window
@each_pass
def test_rows_that_belong_to_no_image_have_the_bits_of_a_plain_pass(
    case: Pictured, window: int | None
) -> None:
    q, stores, spans = prepared(case, SHAPES[0], torch.bfloat16)
    plain, mixed = run(q, stores, replace(spans, wholes=None), window), run(q, stores, spans, window)
    none = replace(case, images=[[] for _ in case.images]).spans(16)
    assert same(run(q, stores, none, window), plain)
    belongs = torch.tensor([any(b <= p < e for b, e in case.images[i]) for i, p in case.places()])
    assert same(mixed[~belongs], plain[~belongs])
    assert not same(mixed[belongs], plain[belongs])


@pytest.mark.parametrize("window", [None, 30])
def test_chunks_joined_by_their_block_and_by_a_second_launch_agree(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where an image begins chunks before the window."""
    case = Pictured([9, 20], [1600, 1020], [[(3, 1605)], [(500, 1030)]])
    q, stores, spans = prepared(case, SHAPES[0], torch.float16)
    sinks = make_sinks(4)
    spread = run(q, stores, spans, window, sinks)
    for name, value in (("MOST_BLOCKS", 20), ("MOST_BLOCKS", 1), ("ENOUGH_BLOCKS", 0)):
        monkeypatch.setattr(cuda, name, value)
        assert same(run(q, stores, spans, window, sinks), spread)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("window", [None, 6])
def test_what_is_not_finite_reaches_exactly_the_rows_that_see_it(value: float, window: int | None) -> None:
    case = Pictured([50], [10], [[(8, 15), (20, 31), (31, 47)]])
    q, (keys, values), spans = prepared(case, (4, 1, 64, 64, 64), torch.bfloat16)
    meant = run(q, (keys, values), spans, window).view(50, 4, 64)
    for place in (9, 14, 20, 30, 31, 40, 50):
        spoilt = values.clone()
        spoilt[spans.page_table[0, 0], 0, place, 7] = value
        found = run(q, (keys, spoilt), spans, window).view(50, 4, 64)
        sees = torch.tensor([bool(mask[place]) for mask in case.seen(window)])
        assert not found[sees][..., 7].isfinite().any()
        assert same(found[~sees], meant[~sees])


def test_wholes_are_a_begin_and_an_end_for_each_row() -> None:
    q, stores, spans = prepared(Pictured([3], [0], [[]]), SHAPES[0], torch.bfloat16)
    with pytest.raises(ValueError, match=r"wholes are \[3, 2\] int32"):
        cuda.attention(q, *stores, replace(spans, wholes=torch.zeros(3, 2)), 0.3)
