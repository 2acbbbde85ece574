"""Attention in which the rows of an image see all of it: the reference against a mask, the CPU's bits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slipstream import kernels
from slipstream.kernels.attention.op import attention
from tests.oracle.pictured import PASSES, Pictured, Stores, alone, stores_of
from tests.oracle.test_kernels import SHARE, Spans, random

FP8 = torch.float8_e4m3fn
NEAR = SHARE | {torch.float16: 1e-3}
# n_heads, n_kv_heads, page_size, d_head, d_value
SHAPES = [(4, 2, 16, 32, 32), (3, 3, 8, 40, 40), (5, 1, 64, 70, 16), (6, 2, 64, 64, 64)]
WINDOWS = [None, 1, 5, 37, 64, 100]
each_pass = pytest.mark.parametrize("case", PASSES, ids=["short", "long", "begun", "ahead"])
each_page_size = pytest.mark.parametrize("page_size", [16, 64])
each_window = pytest.mark.parametrize("window", WINDOWS)
pytestmark = pytest.mark.sampled(keep=8)
each_fast_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture
def chosen(implementation: str) -> Iterator[None]:
    with kernels.use(implementation, "attention"):
        yield


def run(q: Tensor, stores: Stores, spans: Spans, window: int | None, sinks: Tensor | None = None) -> Tensor:
    return attention(q, *stores, spans, 0.3, window, sinks).view(*q.shape[:2], -1)


def check(
    dtype: torch.dtype, stored: torch.dtype, case: Pictured, shape: tuple[int, ...], window: int | None
) -> None:
    """Against a softmax over what each row sees, with NaN in whatever no row may see, with and without sinks."""
    n_heads, n_kv, page_size, d_head, d_value = shape
    spans = case.spans(page_size)
    stores = stores_of(spans, (n_kv, page_size, d_head, d_value), stored)
    q = random(sum(case.lengths), n_heads, d_head, dtype=dtype)
    poisoned, known = case.poisoned(stores, spans, window)
    for sinks in (None, random(n_heads, dtype=torch.float32, seed=8) * 2):
        meant = case.meant(q, stores, spans, window, sinks)
        got = run(q, poisoned, known, window, sinks)
        assert got.dtype == dtype
        worst = (got.double() - meant).abs().max().item()
        assert worst <= NEAR[dtype] * max(1.0, meant.abs().max().item()), worst


@pytest.mark.parametrize("implementation", ["reference"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@each_window
@each_pass
def test_the_reference(
    chosen: None, dtype: torch.dtype, case: Pictured, shape: tuple[int, ...], window: int | None
) -> None:
    check(dtype, dtype, case, shape, window)
    check(dtype, FP8, case, shape, window)


@pytest.mark.parametrize("implementation", ["cpu"])
@each_fast_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@each_window
@each_pass
def test_the_cpu(
    chosen: None, dtype: torch.dtype, case: Pictured, shape: tuple[int, ...], window: int | None
) -> None:
    check(dtype, dtype, case, shape, window)
    check(dtype, FP8, case, shape, window)


def prepared(case: Pictured, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Stores, Spans]:
    n_heads, n_kv, page_size, d_head, d_value = shape
    spans = case.spans(page_size)
    q = random(sum(case.lengths), n_heads, d_head, dtype=dtype)
    return q, stores_of(spans, (n_kv, page_size, d_head, d_value), dtype), spans


@pytest.mark.parametrize("implementation", ["cpu"])
@each_fast_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@each_window
@each_pass
def test_a_row_has_the_bits_of_a_plain_row_that_sees_as_much(
    chosen: None, dtype: torch.dtype, case: Pictured, shape: tuple[int, ...], window: int | None
) -> None:
    """So neither what is computed beside it matters, nor where its span was cut, nor that others have images."""
    q, stores, spans = prepared(case, shape, dtype)
    whole = run(q, stores, spans, window)
    for row in range(len(q)):
        one, reach = alone(case, row, window, spans)
        assert torch.equal(run(q[row : row + 1], stores, one, reach)[0], whole[row]), row


@pytest.mark.parametrize("implementation", ["cpu"])
@each_fast_dtype
@each_window
@each_page_size
@each_pass
def test_rows_that_belong_to_no_image_have_the_bits_of_a_plain_pass(
    chosen: None, dtype: torch.dtype, case: Pictured, page_size: int, window: int | None
) -> None:
    q, stores, spans = prepared(case, (4, 2, page_size, 64, 64), dtype)
    mixed = run(q, stores, spans, window)
    plain = run(q, stores, replace(spans, wholes=None), window)
    none = replace(case, images=[[] for _ in case.images]).spans(page_size)
    assert torch.equal(run(q, stores, none, window), plain)
    belongs = torch.tensor([any(b <= p < e for b, e in case.images[i]) for i, p in case.places()])
    sees_more = torch.tensor(
        [
            not torch.equal(a, b)
            for a, b in zip(case.seen(window), replace(case, images=[[]] * 3).seen(window), strict=True)
        ]
    )
    assert torch.equal(mixed[~belongs], plain[~belongs])
    assert (mixed[sees_more] != plain[sees_more]).flatten(1).any(1).all()


@pytest.mark.parametrize("implementation", ["cpu"])
@each_fast_dtype
@pytest.mark.parametrize("window", [None, 3])
def test_a_nan_of_an_image_reaches_no_row_outside(
    chosen: None, dtype: torch.dtype, window: int | None
) -> None:
    """Its rows see a block of 64 positions whole, those before it nothing of it."""
    case = Pictured([80], [60], [[(64, 128)]])
    q, (keys, values), spans = prepared(case, (2, 1, 64, 64, 64), dtype)
    values[spans.row_pages[40], 0, spans.row_offsets[40]] = float("nan")
    reached = run(q, (keys, values), spans, window).isnan().flatten(1).any(1)
    sees = [bool(mask[100]) for mask in case.seen(window)]
    assert reached.tolist() == sees


@pytest.mark.parametrize("implementation", ["cpu"])
@each_fast_dtype
@each_window
@each_page_size
def test_no_cut_changes_a_bit(chosen: None, dtype: torch.dtype, page_size: int, window: int | None) -> None:
    """A prompt with two images cut before, within and behind them, all of it in the pages."""
    images = [(20, 110), (111, 130)]
    prompt = Pictured([150], [0], [images])
    q, stores, spans = prepared(prompt, (4, 2, page_size, 64, 64), dtype)
    whole = run(q, stores, spans, window)
    for first, end in itertools.combinations((0, 3, 20, 50, 64, 109, 110, 111, 129, 130, 150), 2):
        seen = [image for image in images if image[1] > first and image[0] < end]
        part = Pictured([end - first], [first], [seen]).spans(page_size)
        part = replace(part, page_table=spans.page_table)
        assert torch.equal(run(q[first:end], stores, part, window), whole[first:end]), (first, end)


@pytest.mark.parametrize("implementation", ["cpu"])
@each_fast_dtype
@pytest.mark.parametrize("name", ["keys", "values"])
@pytest.mark.parametrize(("n_heads", "window"), [(2, None), (1, 4), (3, 9)])
def test_a_nan_reaches_the_rows_that_see_it_and_no_other(
    chosen: None, dtype: torch.dtype, name: str, n_heads: int, window: int | None
) -> None:
    case = Pictured([30, 9], [50, 3], [[(55, 63), (63, 70)], [(1, 8)]])
    spans = case.spans(16)
    q = random(39, n_heads, 32, dtype=dtype)
    for place in range(44, 80):
        stores = stores_of(spans, (1, 16, 32, 32), dtype)
        stores[name == "values"][spans.page_table[0, place // 16], 0, place % 16, 5] = float("nan")
        found = run(q, stores, spans, window).isnan().flatten(1).any(1).tolist()
        assert found == [
            i == 0 and bool(mask[place])
            for (i, _), mask in zip(case.places(), case.seen(window), strict=True)
        ]


@pytest.mark.parametrize("implementation", ["cpu"])
@each_fast_dtype
def test_threads_share_the_work_of_images(chosen: None, dtype: torch.dtype) -> None:
    case = Pictured([260, 3], [40, 260], [[(30, 290)], [(250, 262)]])
    q, stores, spans = prepared(case, (8, 4, 16, 64, 64), dtype)
    before = torch.get_num_threads()
    try:
        bits = []
        for n in (1, 2, 5):
            torch.set_num_threads(n)
            bits.append(run(q, stores, spans, 50))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(bits[0], bits[1])
    assert torch.equal(bits[0], bits[2])


@pytest.mark.parametrize("implementation", ["reference", "cpu"])
def test_wholes_are_a_begin_and_an_end_for_each_row(chosen: None) -> None:
    spans, one = Pictured([3], [0], [[]]).spans(8), torch.zeros(3, 1, 8, 4)
    for wholes in (
        torch.zeros(2, 2).int(),
        torch.zeros(3).int(),
        torch.zeros(3, 2),
        torch.zeros(2, 3).int().T,
    ):
        with pytest.raises(ValueError, match=r"wholes are \[3, 2\] int32"):
            attention(torch.zeros(3, 1, 4), one, one, replace(spans, wholes=wholes), 1.0)
