"""Every op: its reference against an independent float64 formula, its CPU version against the reference."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from slipstream import kernels
from slipstream.kernels import dispatch
from slipstream.kernels.attention.op import attention
from slipstream.kernels.gated.activation import GELU, SILU, Activation
from slipstream.kernels.gated.op import gated_mul, sigmoid_mul, soft_cap
from slipstream.kernels.matmul import cpu, panels
from slipstream.kernels.matmul.op import linear, pack
from slipstream.kernels.norm.op import add_rms_norm, rms_norm
from slipstream.kernels.norm_rope_write.op import HeadNorms, Rope, norm_rope_write

pytestmark = pytest.mark.sampled(keep=16)

FAST = (torch.float32, torch.bfloat16)
# Largest difference allowed, as a share of the largest value: rounding of the result, and of a chain of sums.
SHARE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 8e-3}


@dataclass(frozen=True)
class Spans:
    """A ragged batch as the ops see it."""

    span_starts: Tensor  # [n_spans + 1] int32
    n_past: Tensor  # [n_spans] int32
    page_table: Tensor  # [n_spans, n_pages_max] int32
    positions: Tensor  # [n_rows] int64
    row_pages: Tensor  # [n_rows] int64
    row_offsets: Tensor  # [n_rows] int64
    n_pages: int
    wholes: Tensor | None = None  # [n_rows, 2] int32


def make_spans(lengths: list[int], past: list[int], page_size: int) -> Spans:
    """Spans on pages in no order; table entries beyond a span's last position name a page that does not exist."""
    needed = [-(-(p + n) // page_size) for p, n in zip(past, lengths, strict=True)]
    shuffled = torch.randperm(sum(needed) + 2, generator=torch.Generator().manual_seed(5)).int()
    table = torch.full((len(lengths), max(needed) + 1), 10**6, dtype=torch.int32)
    for i, start in enumerate(itertools.accumulate(needed, initial=0)):
        if i < len(needed):
            table[i, : needed[i]] = shuffled[start : start + needed[i]]
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    positions = torch.cat([torch.arange(p, p + n) for p, n in zip(past, lengths, strict=True)])
    return Spans(
        span_starts=torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
        n_past=torch.tensor(past, dtype=torch.int32),
        page_table=table,
        positions=positions,
        row_pages=table[owner, positions // page_size].long(),
        row_offsets=positions % page_size,
        n_pages=sum(needed) + 2,
    )


def random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def assert_near(got: Tensor, meant: Tensor, dtype: torch.dtype) -> None:
    worst = (got.double() - meant.double()).abs().max().item()
    assert got.shape == meant.shape
    assert worst <= SHARE[dtype] * max(1.0, meant.abs().max().item()), worst


@pytest.fixture
def chosen(implementation: str) -> Iterator[None]:
    """Runs the test with one implementation of the ops that have it."""
    folders = [name for name in kernels.OPS if name not in ("matmul", "ngram", "verify")]
    with kernels.use(implementation, *folders):
        yield


def skip_unless_it_runs(implementation: str, dtype: torch.dtype) -> None:
    if implementation == "panels" and (reason := panels.refuses(torch.device("cpu"), dtype)):
        pytest.skip(reason)


@pytest.fixture
def chosen_matmul(implementation: str, dtype: torch.dtype) -> Iterator[None]:
    skip_unless_it_runs(implementation, dtype)
    with kernels.use(implementation, "matmul"):
        yield


def cases(*implementations: str) -> pytest.MarkDecorator:
    """The reference in all three dtypes, others in the two they take."""
    pairs = [("reference", torch.float64), *itertools.product(("reference", *implementations), FAST)]
    return pytest.mark.parametrize(
        ("implementation", "dtype"), pairs, ids=lambda one: str(one).split(".")[-1]
    )


each_case = cases("cpu")


@cases("panels", "cpu", "tiled")
@pytest.mark.parametrize("n_in", [3, 64, 1000, 2500])
def test_linear(chosen_matmul: None, dtype: torch.dtype, n_in: int) -> None:
    weight, bias, x = (
        random(70, n_in, dtype=dtype, seed=1) / n_in**0.5,
        random(70, dtype=dtype, seed=2),
        random(5, n_in, dtype=dtype, seed=3),
    )
    packed = pack(weight, bias)
    assert (packed.in_features, packed.out_features) == (n_in, 70)
    meant = torch.einsum("ri,oi->ro", x.double(), weight.double())
    assert_near(linear(x, packed), meant + bias.double(), dtype)
    assert_near(linear(x, pack(weight)), meant, dtype)
    wide = linear(x, packed, out_dtype=torch.float64)
    assert wide.dtype == torch.float64
    assert_near(wide, meant + bias.double(), dtype)


@pytest.mark.parametrize("n_in", [64, 2500])
def test_a_cpu_without_products_in_bfloat16_takes_float32(monkeypatch: pytest.MonkeyPatch, n_in: int) -> None:
    monkeypatch.setattr(cpu, "_computed_in", lambda dtype: torch.float32)
    weight, bias, x = (
        random(70, n_in, dtype=torch.bfloat16, seed=1) / n_in**0.5,
        random(70, dtype=torch.bfloat16, seed=2),
        random(5, n_in, dtype=torch.bfloat16, seed=3),
    )
    packed = cpu.pack(weight, bias)
    made = cpu.linear(x, packed)
    assert made.dtype == torch.bfloat16
    assert_near(made, torch.einsum("ri,oi->ro", x.double(), weight.double()) + bias.double(), torch.bfloat16)
    assert torch.equal(torch.cat([cpu.linear(row[None], packed) for row in x]), made)
    assert cpu.linear(x, packed, torch.float32).dtype == torch.float32


def test_a_weight_packed_elsewhere_is_refused() -> None:
    with kernels.use("reference"):
        packed = pack(random(4, 8, dtype=torch.float32))
    for name in ("cpu", *([] if panels.refuses(torch.device("cpu"), torch.float32) else ["panels"])):
        with kernels.use(name, "matmul"), pytest.raises(TypeError, match=f"pack the weight with {name}"):
            linear(random(2, 8, dtype=torch.float32), packed)


@each_case
@pytest.mark.parametrize("d_model", [1, 24, 128, 1000])
def test_rms_norm(chosen: None, dtype: torch.dtype, d_model: int) -> None:
    x, residual, weight = (random(7, d_model, dtype=dtype, seed=i) for i in range(3))
    weight = weight[0]
    meant = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double()
    assert_near(rms_norm(x, weight, 1e-3), meant, dtype)
    normed, total = add_rms_norm(x, residual, weight, 1e-3)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(total, weight, 1e-3))


def test_rms_norm_rounds_before_the_weight() -> None:
    """As in transformers; rounding once at the end instead would change one element in five."""
    x, weight = random(50, 640, dtype=torch.bfloat16), random(640, dtype=torch.bfloat16, seed=1)
    with kernels.use("reference", "norm"):
        meant = rms_norm(x, weight, 1e-6)
    with kernels.use("cpu", "norm"):
        assert float((rms_norm(x, weight, 1e-6) == meant).double().mean()) > 0.999


@pytest.mark.parametrize("implementation", ["reference", "cpu"])
def test_a_float32_scale_multiplies_before_rounding(chosen: None) -> None:
    """Gemma's and Qwen3-Next's order, whichever op norms. bfloat16 rows; the other order changes one in five."""
    x, scale = random(50, 640, dtype=torch.bfloat16), 1 + random(640, dtype=torch.float32, seed=1)
    total = x + x.flip(0)
    for got, rows in ((rms_norm(x, scale, 1e-6), x), (add_rms_norm(x, x.flip(0), scale, 1e-6)[0], total)):
        normed = rows.double() / (rows.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
        meant = (normed * scale).bfloat16()
        assert got.dtype == torch.bfloat16
        assert float((got == meant).double().mean()) > 0.999
        other_order = normed.bfloat16() * scale.bfloat16()
        assert float((got == other_order).double().mean()) < 0.9

    spans, d_head = make_spans([50], [0], 16), 64
    qkv = x[:, : 4 * d_head].contiguous()
    rope = Rope(torch.ones(50, d_head // 2), torch.zeros(50, d_head // 2))
    norms = HeadNorms(scale[:d_head].contiguous(), scale[d_head : 2 * d_head].contiguous(), 1e-6)
    keys, values = (random(spans.n_pages, 1, 16, d_head, dtype=torch.bfloat16) for _ in range(2))
    q = norm_rope_write(qkv, norms, rope, spans, keys, values)
    heads = qkv.view(50, 4, d_head)
    assert torch.equal(q, rms_norm(heads[:, :2], norms.q, 1e-6))
    assert torch.equal(keys[spans.row_pages, :, spans.row_offsets], rms_norm(heads[:, 2:3], norms.k, 1e-6))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotary embedding as complex numbers. x: [n_rows, n_heads, d_head]; cos, sin: [n_rows, half]."""
    half = cos.shape[1]
    turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.complex(cos, sin)[:, None]
    return torch.cat((turned.real, turned.imag, x[..., 2 * half :]), -1)


@each_case
@pytest.mark.parametrize(
    ("d_head", "half", "page_size"), [(8, 4, 8), (20, 3, 16), (64, 32, 64), (128, 16, 16)]
)
@pytest.mark.parametrize("normed", [False, True])
def test_norm_rope_write(
    chosen: None, dtype: torch.dtype, d_head: int, half: int, page_size: int, normed: bool
) -> None:
    spans = make_spans([3, 1, 20], [0, 61, 5], page_size)
    n_heads, n_kv, n_rows = 6, 2, 24
    qkv = random(n_rows, (n_heads + 2 * n_kv) * d_head, dtype=dtype)
    norms = HeadNorms(random(d_head, dtype=dtype, seed=1), random(d_head, dtype=dtype, seed=2), 1e-3)
    angles = torch.arange(80)[:, None] * 0.1 ** (torch.arange(half) / half)
    rope = Rope(angles.cos(), angles.sin())
    stores = [random(spans.n_pages, n_kv, page_size, d_head, dtype=dtype, seed=seed) for seed in (3, 4)]
    keys, values = (store.clone() for store in stores)
    got = norm_rope_write(qkv, norms if normed else None, rope, spans, keys, values)

    q, k, v = torch.split(qkv.double().view(n_rows, -1, d_head), [n_heads, n_kv, n_kv], dim=1)
    if normed:
        q, k = (
            x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double()
            for x, weight in ((q, norms.q), (k, norms.k))
        )
    cos, sin = rope.cos[spans.positions].double(), rope.sin[spans.positions].double()
    assert_near(got, rotated(q, cos, sin), dtype)
    for store, before, meant in ((keys, stores[0], rotated(k, cos, sin)), (values, stores[1], v)):
        for r in range(n_rows):
            before[spans.row_pages[r], :, spans.row_offsets[r]] = meant[r].to(dtype)
        assert_near(store, before.double(), dtype)


@each_case
@pytest.mark.parametrize(("d_head", "d_value"), [(8, 2), (24, 16), (64, 40), (192, 128)])
@pytest.mark.parametrize("norms_values", [None, False, True], ids=["no-norms", "norms", "norms-of-values"])
def test_norm_rope_write_of_values_narrower_than_keys(
    chosen: None, dtype: torch.dtype, d_head: int, d_value: int, norms_values: bool | None
) -> None:
    """Queries and keys are what values of the same width leave beside them; values are copied, or normed alone."""
    spans, n_heads, n_kv, page_size = make_spans([3, 1, 20], [0, 61, 5], 16), 6, 2, 16
    qk, v = random(24, 8 * d_head, dtype=dtype), random(24, n_kv, d_value, dtype=dtype, seed=1)
    norms = None
    if norms_values is not None:
        weights = (random(d_head, dtype=dtype, seed=seed) for seed in (2, 3))
        norms = HeadNorms(*weights, 1e-3, values=norms_values)
    angles = torch.arange(80)[:, None] * 0.1 ** torch.arange(d_head // 4)
    rope = Rope(angles.cos(), angles.sin())
    keys, wide = (random(spans.n_pages, n_kv, page_size, d_head, dtype=dtype, seed=4) for _ in range(2))
    plain, values = keys.clone(), random(spans.n_pages, n_kv, page_size, d_value, dtype=dtype, seed=5)
    before = values.double()
    got = norm_rope_write(torch.cat((qk, v.flatten(1)), 1), norms, rope, spans, keys, values)
    meant = norm_rope_write(torch.cat((qk, qk[:, : n_kv * d_head]), 1), norms, rope, spans, plain, wide)
    assert torch.equal(got, meant)
    assert torch.equal(keys, plain)
    written = v.double()
    if norms_values:
        written = written / (written.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    for r in range(24):
        before[spans.row_pages[r], :, spans.row_offsets[r]] = written[r].to(dtype).double()
    assert_near(values, before, dtype)
    assert got.shape == (24, n_heads, d_head)


@each_case
@pytest.mark.parametrize(
    ("d_head", "n_heads", "n_kv", "page_size"),
    [
        (2, 1, 1, 8),
        (16, 4, 2, 8),
        (24, 3, 3, 16),
        (64, 4, 1, 64),
        (64, 21, 3, 64),
        (80, 6, 2, 16),
        (256, 2, 2, 128),
    ],
)
def test_attention(
    chosen: None, dtype: torch.dtype, d_head: int, n_heads: int, n_kv: int, page_size: int
) -> None:
    check_attention(dtype, (d_head, n_heads, n_kv, page_size), None)


@each_case
@pytest.mark.parametrize("window", [1, 2, 16, 63, 64, 65, 130])
@pytest.mark.parametrize("shape", [(16, 4, 2, 8), (24, 3, 3, 16), (40, 3, 1, 64), (64, 3, 1, 64)], ids=str)
def test_attention_in_a_window(
    chosen: None, dtype: torch.dtype, shape: tuple[int, int, int, int], window: int
) -> None:
    check_attention(dtype, shape, window)


@each_case
@pytest.mark.parametrize("window", [None, 1, 65])
@pytest.mark.parametrize("shape", [(16, 4, 2, 8), (80, 6, 2, 16), (64, 6, 2, 64)], ids=str)
def test_attention_with_sinks(
    chosen: None, dtype: torch.dtype, shape: tuple[int, int, int, int], window: int | None
) -> None:
    n_heads = shape[1]
    check_attention(dtype, shape, window, sinks=random(n_heads, dtype=torch.float32, seed=8) * 2)
    check_attention(dtype, shape, window, sinks=torch.tensor([-200.0, 12.0, 200.0, 0.0, 3.0, 5.0])[:n_heads])


@each_case
@pytest.mark.parametrize("window", [None, 1, 65])
@pytest.mark.parametrize(
    ("shape", "d_value"),
    [
        ((16, 4, 2, 8), 2),
        ((24, 3, 3, 16), 16),
        ((80, 6, 2, 16), 64),
        ((96, 4, 1, 64), 70),
        ((192, 4, 2, 64), 128),
    ],
    ids=str,
)
def test_attention_to_values_narrower_than_keys(
    chosen: None, dtype: torch.dtype, shape: tuple[int, int, int, int], d_value: int, window: int | None
) -> None:
    sinks = None if window is None else random(shape[1], dtype=torch.float32, seed=8) * 2
    check_attention(dtype, shape, window, sinks, d_value)


def check_attention(
    dtype: torch.dtype,
    shape: tuple[int, int, int, int],
    window: int | None,
    sinks: Tensor | None = None,  # [n_heads]
    d_value: int | None = None,
) -> None:
    """Against a softmax per row and head, with NaN in whatever no row may see.

    shape: d_head … page_size. d_value: None for d_head.
    """
    d_head, n_heads, n_kv, page_size = shape
    widths = d_head, d_value or d_head
    lengths, past = [1, 5, 1, 70, 2, 3], [0, 0, 130, 3, 63, 191]
    spans = make_spans(lengths, past, page_size)
    q = random(sum(lengths), n_heads, d_head, dtype=dtype)
    keys, values = (
        random(spans.n_pages, n_kv, page_size, width, dtype=dtype, seed=seed)
        for seed, width in enumerate(widths, 1)
    )
    meant = torch.empty(sum(lengths), n_heads, widths[1], dtype=torch.float64)
    for i, (start, n) in enumerate(zip(spans.span_starts.tolist(), lengths, strict=False)):
        pages = spans.page_table[i, : -(-(past[i] + n) // page_size)].long()
        k, v = (store[pages].double().permute(1, 0, 2, 3).flatten(1, 2) for store in (keys, values))
        for row, head in itertools.product(range(n), range(n_heads)):
            end, h = past[i] + row + 1, head // (n_heads // n_kv)
            seen = slice(0 if window is None else max(0, end - window), end)
            odds = (k[h, seen] @ q[start + row, head].double() * 0.3).exp()
            sink = 0.0 if sinks is None else math.exp(sinks[head])
            meant[start + row, head] = odds @ v[h, seen] / (odds.sum() + sink)
    # What lies behind a row's position may be anything: stale rows of another request, a draft gone wrong. So may
    # what lies before its window: pages freed and written by another slot, entries that name none.
    firsts = [0 if window is None else max(0, p - window + 1) for p in past]
    for store in (keys, values):
        poison(store, spans, lengths, past, firsts)
    for i, first in enumerate(firsts):
        spans.page_table[i, : first // page_size] = 10**6
    assert_near(attention(q, keys, values, spans, 0.3, window, sinks), meant.flatten(1), dtype)


@each_case
@pytest.mark.parametrize(("page_size", "d_head"), [(16, 32), (64, 64)])
def test_attention_to_scores_that_rise(
    chosen: None, implementation: str, dtype: torch.dtype, page_size: int, d_head: int
) -> None:
    """Every block of positions outweighs all before it, for every second row; the others look for something else."""
    n_rows, n_past, n_heads = 20, 310, 2
    spans = make_spans([n_rows], [n_past], page_size)
    q = random(n_rows, n_heads, d_head, dtype=dtype)
    keys, values = (random(spans.n_pages, 1, page_size, d_head, dtype=dtype, seed=seed) for seed in (1, 2))
    places = torch.arange(n_past + n_rows)
    pages, offsets = spans.page_table[0, places // page_size].long(), places % page_size
    keys[pages, 0, offsets, 0] = (places * 0.0625).to(dtype)
    q[:, :, 0] = torch.tensor([0.0, 2.0]).repeat(n_rows // 2)[:, None].to(dtype)
    k, v = (store[pages, 0, offsets].double() for store in (keys, values))
    meant = torch.empty(n_rows, n_heads, d_head, dtype=torch.float64)
    for row, head in itertools.product(range(n_rows), range(n_heads)):
        end = n_past + row + 1
        meant[row, head] = (k[:end] @ q[row, head].double() * 0.3).softmax(0) @ v[:end]
    found = attention(q, keys, values, spans, 0.3)
    assert_near(found, meant.flatten(1), dtype)
    for row in range(n_rows if implementation == "cpu" else 0):
        alone = replace(
            spans, span_starts=torch.tensor([0, 1]).int(), n_past=torch.tensor([n_past + row]).int()
        )
        assert torch.equal(attention(q[row : row + 1], keys, values, alone, 0.3)[0], found[row])


@pytest.mark.parametrize("implementation", ["reference", "cpu"])
def test_a_window_has_at_least_one_position(chosen: None) -> None:
    spans, one = make_spans([1], [0], 8), torch.zeros(3, 1, 8, 4)
    with pytest.raises(ValueError, match="at least one position"):
        attention(torch.zeros(1, 1, 4), one, one, spans, 1.0, 0)


@pytest.mark.parametrize("implementation", ["reference", "cpu"])
def test_values_are_at_most_as_wide_as_keys(chosen: None) -> None:
    spans, keys, values = make_spans([1], [0], 8), torch.zeros(3, 1, 8, 4), torch.zeros(3, 1, 8, 6)
    with pytest.raises(ValueError, match="at most as wide as key heads, 4, not 6"):
        attention(torch.zeros(1, 1, 4), keys, values, spans, 1.0)
    rope = Rope(torch.ones(1, 2), torch.zeros(1, 2))
    with pytest.raises(ValueError, match="at most as wide as key heads, 4, not 6"):
        norm_rope_write(torch.zeros(1, 14), None, rope, spans, keys, values)
    for width in (13, 4):  # not of whole heads; fewer than the stores ask for
        with pytest.raises(ValueError, match=f"rows of {width} values hold no whole heads of 4 and 2"):
            norm_rope_write(torch.zeros(1, width), None, rope, spans, keys, values[..., :2].contiguous())


@pytest.mark.parametrize("implementation", ["reference", "cpu"])
def test_sinks_are_one_float32_for_each_query_head(chosen: None) -> None:
    spans, one = make_spans([1], [0], 8), torch.zeros(3, 1, 8, 4)
    for sinks in (torch.zeros(1), torch.zeros(2, 1), torch.zeros(2, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match=r"sinks are \[2\] float32"):
            attention(torch.zeros(1, 2, 4), one, one, spans, 1.0, sinks=sinks)


def test_compiled_attention_refuses_a_batch_that_it_would_misread() -> None:
    spans, one = make_spans([2, 2], [9, 3], 8), torch.zeros(9, 1, 8, 4)
    wide = torch.stack((spans.page_table, spans.page_table + 1), 2).flatten(
        1
    )  # every second entry is the table's
    with kernels.use("cpu", "attention"), pytest.raises(ValueError, match="contiguous"):
        attention(torch.zeros(4, 1, 4), one, one, replace(spans, page_table=wide[:, ::2]), 1.0)


@pytest.mark.parametrize("implementation", ["cpu"])
def test_places_of_rows_may_be_every_second_of_a_column(chosen: None) -> None:
    spans, rope = make_spans([6], [3], 8), Rope(torch.rand(9, 2), torch.rand(9, 2))
    names = ("positions", "row_pages", "row_offsets")
    apart = replace(spans, **{name: getattr(spans, name).repeat_interleave(2)[::2] for name in names})
    qkv, stores = random(6, 12, dtype=torch.float32), [torch.zeros(spans.n_pages, 1, 8, 4) for _ in range(4)]
    meant = norm_rope_write(qkv, None, rope, spans, *stores[:2])
    assert torch.equal(norm_rope_write(qkv, None, rope, apart, *stores[2:]), meant)
    assert all(torch.equal(one, other) for one, other in zip(stores[:2], stores[2:], strict=True))


def poison(store: Tensor, spans: Spans, lengths: list[int], past: list[int], firsts: list[int]) -> None:
    """NaN in all cells that no row may see. firsts: the first position that a row of each span sees."""
    page_size = store.shape[2]
    clean = torch.zeros(store.shape[0], store.shape[2], dtype=torch.bool)
    for i, n in enumerate(lengths):
        for position in range(firsts[i], past[i] + n):
            clean[spans.page_table[i, position // page_size], position % page_size] = True
    store.masked_fill_(~clean[:, None, :, None], float("nan"))


@pytest.mark.parametrize("dtype", FAST, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize(("n_heads", "window"), [(2, None), (2, 2), (1, 1), (1, 3), (3, None), (3, 4)])
@pytest.mark.parametrize(("page_size", "d_head"), [(16, 32), (64, 64)])
def test_a_nan_reaches_the_rows_that_see_it_and_no_other(
    dtype: torch.dtype, n_heads: int, window: int | None, page_size: int, d_head: int
) -> None:
    """One among values reaches its column, and perhaps that which shares a word with it; all else keeps its bits."""
    last = 6 if window is None else min(6, 2 + window)
    spans, nan = make_spans([6, 2], [62, 3], page_size), float("nan")
    shape = spans.n_pages, 1, page_size, d_head
    q = random(8, n_heads, d_head, dtype=dtype)
    keys, values = (random(*shape, dtype=dtype, seed=seed) for seed in (1, 2))
    with kernels.use("cpu", "attention"):
        clean = attention(q, keys, values, spans, 1.0, window)
        for name in ("q", "keys", "values"):
            tensors = {"q": q.clone(), "keys": keys.clone(), "values": values.clone()}
            place = (2, 0, 5) if name == "q" else (spans.row_pages[2], 0, spans.row_offsets[2], 5)
            tensors[name][place] = nan
            found = attention(*tensors.values(), spans, 1.0, window)
            meant = clean.clone().view(8, n_heads, d_head)
            reached = meant[2, :1] if name == "q" else meant[2:last]
            if name == "values":
                reached[..., 5] = nan
                reached[..., 4] = found.view_as(meant)[2:last, :, 4]
            else:
                reached[:] = nan
            torch.testing.assert_close(found, meant.flatten(1), rtol=0, atol=0, equal_nan=True)


@each_case
@pytest.mark.parametrize("d_inner", [1, 17, 64, 300])
def test_silu(chosen: None, dtype: torch.dtype, d_inner: int) -> None:
    gate_up = random(5, 2 * d_inner, dtype=dtype) * 5
    gate_up[0, 0] = -200.0
    gate, up = gate_up.double().chunk(2, -1)
    assert_near(gated_mul(gate_up, SILU), gate / (1 + torch.exp(-gate)) * up, dtype)


@each_case
@pytest.mark.parametrize("d_inner", [1, 17, 64, 300])
def test_gelu(chosen: None, dtype: torch.dtype, d_inner: int) -> None:
    gate_up = random(5, 2 * d_inner, dtype=dtype) * 5
    gate_up[0, 0], gate_up[1, 0] = -200.0, 200.0
    gate, up = gate_up.double().chunk(2, -1)
    tanh = torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))
    assert_near(gated_mul(gate_up, GELU), gate * (1 + tanh) / 2 * up, dtype)
    if dtype != torch.bfloat16 and d_inner > 1:
        by_erf = gate * torch.special.ndtr(gate) * up  # close, but another function
        assert (by_erf - gated_mul(gate_up, GELU).double()).abs().max() > 1e-4


@each_case
@pytest.mark.parametrize("d", [1, 17, 300])
def test_soft_cap(chosen: None, dtype: torch.dtype, d: int) -> None:
    x = random(5, d, dtype=dtype) * 5
    x[0, 0], x[1, 0], x[2, 0], x[3, 0] = -1e4, 1e4, 0.0, float("nan")
    assert_near(soft_cap(x[:3], 4.0), 4 * torch.tanh(x[:3].double() / 4), dtype)
    assert bool(soft_cap(x, 4.0)[3, 0].isnan())
    ordered = soft_cap(torch.linspace(-40, 40, 801, dtype=dtype).view(1, -1), 30.0)
    assert bool((ordered.diff() >= 0).all())


@each_case
@pytest.mark.parametrize("d_inner", [1, 17, 64, 300])
def test_clamped(chosen: None, dtype: torch.dtype, d_inner: int) -> None:
    clamped, gate_up = Activation("clamped", 6.0, 1.7), random(5, 2 * d_inner, dtype=dtype) * 5
    gate_up[0, 0], gate_up[1, 0], gate_up[2, d_inner], gate_up[3, d_inner] = -200.0, 200.0, 200.0, -200.0
    gate, up = gate_up.double().chunk(2, -1)
    gate, up = gate.where(gate < 6, 6), up.where(up.abs() < 6, 6 * up.sign())
    assert_near(gated_mul(gate_up, clamped), (up + 1) * gate / (1 + torch.exp(-1.7 * gate)), dtype)
    for place in (0, d_inner):  # clamping does not hide a NaN
        broken = gate_up.clone()
        broken[4, place] = float("nan")
        found = gated_mul(broken, clamped).isnan()
        assert bool(found[4, 0])
        assert int(found.sum()) == 1


@each_case
@pytest.mark.parametrize("d_inner", [1, 17, 64, 300])
def test_limited(chosen: None, dtype: torch.dtype, d_inner: int) -> None:
    limited, gate_up = Activation("limited", 3.0), random(5, 2 * d_inner, dtype=dtype) * 5
    gate_up[0, 0], gate_up[1, 0], gate_up[2, d_inner], gate_up[3, d_inner] = -200.0, 200.0, 200.0, -200.0
    gate, up = gate_up.double().chunk(2, -1)
    swish, up = gate / (1 + torch.exp(-gate)), up.where(up.abs() < 3, 3 * up.sign())
    assert_near(gated_mul(gate_up, limited), swish.where(swish < 3, 3) * up, dtype)
    near = torch.full((1, 2), 3.1, dtype=dtype)  # cut behind silu, which gives 2.966, and not before it
    assert float(gated_mul(near, limited)) == pytest.approx(2.966 * 3, rel=5e-3)
    for place in (0, d_inner):  # clamping does not hide a NaN
        broken = gate_up.clone()
        broken[4, place] = float("nan")
        found = gated_mul(broken, limited).isnan()
        assert bool(found[4, 0])
        assert int(found.sum()) == 1


@each_case
@pytest.mark.parametrize("d", [1, 17, 64, 300])
def test_sigmoid_mul(chosen: None, dtype: torch.dtype, d: int) -> None:
    x, gate = random(5, d, dtype=dtype), random(5, d, dtype=dtype, seed=1) * 5
    gate[0, 0], gate[1, 0] = -200.0, 200.0
    meant = x.double() / (1 + torch.exp(-gate.double()))
    assert_near(sigmoid_mul(x, gate), meant, dtype)
    one = gate[:, :1].contiguous()
    assert_near(sigmoid_mul(x, one), x.double() / (1 + torch.exp(-one.double())), dtype)
    for wrong in (random(5, d + 1, dtype=dtype), random(1, 1, dtype=dtype), gate.half()):
        with pytest.raises(ValueError, match="does not fit"):
            sigmoid_mul(x, wrong)


def test_nothing_runs_unselected() -> None:
    selected = gated_mul.swap_table({})
    with pytest.raises(dispatch.CannotRunError, match=r"call kernels\.select"):
        gated_mul(torch.zeros(1, 2), SILU)
    gated_mul.swap_table(selected)


def test_select_says_what_runs_and_refuses_what_cannot() -> None:
    table = {line.op: line for line in kernels.select("cpu", torch.float64)}
    assert set(table) == set(kernels.OPS)
    assert table["attention"].implementation == "reference"
    assert "cpu refused" in table["attention"].reason
    with pytest.raises(dispatch.CannotRunError, match="float32 and bfloat16"):
        kernels.select("cpu", torch.float64, {"attention": "cpu"})
    with pytest.raises(dispatch.CannotRunError, match="no such op"):
        kernels.select("cpu", torch.float32, {"attetnion": "cpu"})
    with pytest.raises(dispatch.CannotRunError, match="does not import"):
        kernels.select("cpu", torch.float32, {"attention": "fpga"})
    asked = {line.op: line for line in kernels.select("cpu", torch.float32, {"attention": "reference"})}
    assert asked["attention"].implementation == "reference"
    assert kernels.select("cpu", torch.float32)[0].op == "matmul"  # leave the fast ones behind


def test_the_table_says_why_a_slower_product_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Tensor:
        raise RuntimeError("no such operator")

    def selected() -> dispatch.Selected:
        panels.refuses.cache_clear()
        cpu.refuses.cache_clear()
        return next(line for line in kernels.select("cpu", torch.float32) if line.op == "matmul")

    monkeypatch.setattr(panels, "FEATURE", "sixteen hands")
    line = selected()
    assert line.implementation == "cpu"
    assert "this CPU has no sixteen hands" in line.reason
    monkeypatch.setattr(cpu, "pack", broken)
    line = selected()
    assert line.implementation == "tiled"
    assert "no such operator" in line.reason
    monkeypatch.undo()
    selected()


def test_cached_machine_code_is_bound_to_all_sources() -> None:
    """numba's own stamp sees one file; a kernel must not outlive a change of what it is made of."""
    from slipstream.kernels.compiled import SOURCES
    from slipstream.kernels.norm import cpu

    with kernels.use("cpu", "norm"):
        rms_norm(torch.ones(1, 8), torch.ones(8), 1e-6)
    compiled = cpu._rows[torch.float32, torch.float32].dispatcher
    assert compiled._cache._cache_file._source_stamp == SOURCES
    assert compiled.stats.cache_path
