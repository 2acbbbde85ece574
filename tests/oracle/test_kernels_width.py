"""A row has the same bits whatever is computed beside it: any number of rows, any place, one or two threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slipstream import kernels
from slipstream.kernels.attention.op import attention
from slipstream.kernels.gated.op import gated_mul, sigmoid_mul, soft_cap
from slipstream.kernels.gated.proof import ACTIVATIONS
from slipstream.kernels.matmul.op import Packed, linear, pack
from slipstream.kernels.norm.op import add_rms_norm, rms_norm
from slipstream.kernels.norm_rope_write.op import HeadNorms, Rope, norm_rope_write
from tests.oracle.test_kernels import FAST, make_spans, random, skip_unless_it_runs

WIDTHS = (1, 2, 3, 5, 8, 16, 17, 64)
each_fast_dtype = pytest.mark.parametrize("dtype", FAST, ids=lambda dtype: str(dtype)[6:])


@pytest.fixture(params=[1, 2], ids=["one-thread", "two-threads"])
def n_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def assert_rows_alone(run: Callable[[Tensor], Tensor], x: Tensor, widths: tuple[int, ...] = WIDTHS) -> Tensor:
    """Compare run(x) with runs over its first and last so many rows; returns run(x)."""
    whole = run(x)
    for width in widths:
        assert torch.equal(run(x[:width]), whole[:width]), width
        assert torch.equal(run(x[-width:]), whole[-width:]), width
    return whole


def bits_across_threads(n_threads: int, name: str, result: Tensor) -> None:
    """The result of this name has the same bits for every number of threads."""
    seen = SEEN.setdefault(name, result.clone())
    assert torch.equal(seen, result), f"{name} differs at {n_threads} threads"


SEEN: dict[str, Tensor] = {}


def check_linear(
    implementation: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    n_threads: int,
    widths: tuple[int, ...] = WIDTHS,
) -> None:
    skip_unless_it_runs(implementation, dtype)
    n_out, n_in = shape
    x = random(max(widths) + 3, n_in, dtype=dtype, seed=n_in)
    with kernels.use(implementation, "matmul"):
        packed: Packed = pack(random(n_out, n_in, dtype=dtype, seed=n_out) / n_in**0.5)
        whole = assert_rows_alone(lambda rows: linear(rows, packed), x, widths)
    bits_across_threads(n_threads, f"{implementation} {shape} {dtype}", whole)


@pytest.mark.sampled(keep=8)
@each_fast_dtype
@pytest.mark.parametrize("implementation", ["panels", "cpu"])
@pytest.mark.parametrize("shape", [(70, 41), (1000, 513), (600, 1024), (300, 2500)], ids=str)
def test_linear(implementation: str, shape: tuple[int, int], dtype: torch.dtype, n_threads: int) -> None:
    check_linear(implementation, shape, dtype, n_threads)


@each_fast_dtype
def test_tiled_linear(dtype: torch.dtype) -> None:
    check_linear("tiled", (130, 600), dtype, 1, (1, 2, 5, 16))


@pytest.mark.slow
@each_fast_dtype
@pytest.mark.parametrize("implementation", ["panels", "cpu"])
@pytest.mark.parametrize("n_in", [64, 80, 256, 896, 1000, 1024, 1536, 2048, 3072, 4864, 8192])
@pytest.mark.parametrize("n_out", [96, 257, 1024, 3072])
def test_linear_sweep(implementation: str, n_out: int, n_in: int, dtype: torch.dtype, n_threads: int) -> None:
    widths = (*range(1, 34), 48, 63, 64, 65, 100, 127, 128, 129, 200, 256)
    check_linear(implementation, (n_out, n_in), dtype, n_threads, widths)


@each_fast_dtype
def test_norms_and_gates(dtype: torch.dtype, n_threads: int) -> None:
    for d in (24, 1000):
        x, scales = random(70, d, dtype=dtype), random(d, dtype=dtype, seed=1)
        with kernels.use("cpu", "norm", "gated"):
            for scale in (scales, scales.float()):
                assert_rows_alone(lambda rows, scale=scale: rms_norm(rows, scale, 1e-6), x)
                assert_rows_alone(lambda rows, scale=scale: add_rms_norm(rows, rows, scale, 1e-6)[0], x)
            for activation in ACTIVATIONS:
                assert_rows_alone(lambda rows, form=activation: gated_mul(rows, form), x)
            assert_rows_alone(lambda rows: soft_cap(rows, 2.0), x)
            assert_rows_alone(lambda rows: sigmoid_mul(rows, rows), x)
            whole = assert_rows_alone(lambda rows: sigmoid_mul(rows, rows[:, :1]), x)
            assert torch.equal(whole, sigmoid_mul(x, x[:, :1].expand(70, d)))
            # One gate a head: rows of heads, of which a pass has n_heads times as many as tokens.
            gates = random(70, 6, dtype=dtype, seed=2)
            joint = torch.cat((x[:, :24], gates), 1)  # [70, 30]
            assert_rows_alone(
                lambda rows: sigmoid_mul(rows[:, :24].reshape(-1, 4), rows[:, 24:].reshape(-1, 1)).view(
                    -1, 24
                ),
                joint,
            )
        bits_across_threads(n_threads, f"gates {d} {dtype}", whole)


@each_fast_dtype
@pytest.mark.parametrize("wide_norms", [False, True])
@pytest.mark.parametrize("d_value", [40, 24])
def test_norm_rope_write(dtype: torch.dtype, wide_norms: bool, d_value: int) -> None:
    spans = make_spans([70], [11], 16)
    qkv, rope = (
        random(70, 5 * 40 + d_value, dtype=dtype),
        Rope(random(100, 9).float(), random(100, 9, seed=1).float()),
    )
    norm_dtype = torch.float32 if wide_norms else dtype
    norms = HeadNorms(random(40, dtype=norm_dtype, seed=2), random(40, dtype=norm_dtype, seed=3), 1e-6)

    def run(first: int, last: int) -> tuple[Tensor, Tensor]:  # q; keys and values that were written
        rows = replace(
            spans,
            **{name: getattr(spans, name)[first:last] for name in ("positions", "row_pages", "row_offsets")},
        )
        stores = [torch.zeros(spans.n_pages, 1, 16, width, dtype=dtype) for width in (40, d_value)]
        with kernels.use("cpu", "norm_rope_write"):
            q = norm_rope_write(qkv[first:last], norms, rope, rows, *stores)
        return q, torch.cat([store[rows.row_pages, 0, rows.row_offsets] for store in stores], 1)

    q, written = run(0, 70)
    for width in WIDTHS:
        for first in (0, 70 - width):
            some, cells = run(first, first + width)
            assert torch.equal(some, q[first : first + width])
            assert torch.equal(cells, written[first : first + width])


def attend(
    lengths: list[int],
    past: list[int],
    tensors: tuple[Tensor, Tensor, Tensor],
    tables: list[int],
    page_size: int,
    window: int | None = None,
    sinks: Tensor | None = None,  # [n_heads]
) -> Tensor:
    """Attention of spans whose page tables are rows `tables` of one made for all."""
    q, keys, values = tensors
    whole = make_spans([1, 1, 1], [199, 299, 90], page_size)
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    spans = replace(
        whole,
        span_starts=starts,
        n_past=torch.tensor(past, dtype=torch.int32),
        page_table=whole.page_table[tables].contiguous(),
    )
    with kernels.use("cpu", "attention"):
        return attention(q, keys, values, spans, 0.2, window, sinks)


@pytest.mark.sampled(keep=24)
@each_fast_dtype
@pytest.mark.parametrize(
    "shape",
    [(4, 2, 64, 16, 64), (3, 3, 40, 8, 40), (5, 1, 16, 64, 16), (6, 2, 48, 16, 32), (6, 2, 64, 64, 64)],
    ids=str,
)
@pytest.mark.parametrize("window", [None, 1, 37, 64, 100])
@pytest.mark.parametrize("sunk", [False, True], ids=["no-sinks", "sinks"])
def test_attention(
    shape: tuple[int, ...], window: int | None, sunk: bool, dtype: torch.dtype, n_threads: int
) -> None:
    n_heads, n_kv, d_head, page_size, d_value = shape
    sinks = random(n_heads, dtype=torch.float32, seed=5) * 3 if sunk else None
    n_pages = make_spans([1, 1, 1], [199, 299, 90], page_size).n_pages
    keys, values = (
        random(n_pages, n_kv, page_size, width, dtype=dtype, seed=seed)
        for seed, width in enumerate((d_head, d_value), 1)
    )
    q = random(200, n_heads, d_head, dtype=dtype)

    def run(lengths: list[int], past: list[int], first: int, tables: list[int]) -> Tensor:
        rows = q[first : first + sum(lengths)]
        return attend(lengths, past, (rows, keys, values), tables, page_size, window, sinks)

    whole = run([200], [0], 0, [0])  # a whole prompt at once
    bits_across_threads(n_threads, f"attention {shape} {window} {sunk} {dtype}", whole)
    for width in WIDTHS:
        for first in (0, 61, 200 - width):
            assert torch.equal(run([width], [first], first, [0]), whole[first : first + width]), (
                width,
                first,
            )
    beside = run([1, 130, 9, 60], [7, 0, 191, 17], 0, [1, 1, 0, 2])
    assert torch.equal(run([9], [191], 131, [0]), beside[131:140])
    assert torch.equal(run([1], [7], 0, [1]), beside[:1])
    assert torch.equal(run([60], [17], 140, [2]), beside[140:])


@each_fast_dtype
@pytest.mark.parametrize("window", [None, 50])
def test_many_rows_are_spread_over_threads(dtype: torch.dtype, n_threads: int, window: int | None) -> None:
    spans = make_spans([150, 3, 70], [40, 260, 0], 16)
    keys, values = (random(spans.n_pages, 4, 16, 64, dtype=dtype, seed=seed) for seed in (1, 2))
    with kernels.use("cpu", "attention"):
        got = attention(random(223, 8, 64, dtype=dtype), keys, values, spans, 0.1, window)
    bits_across_threads(n_threads, f"many rows {window} {dtype}", got)
