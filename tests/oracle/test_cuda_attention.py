"""CUDA's `attention` in the emulator: against float64, and rows bit for bit at every width and in any batch."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slipstream.kernels.attention import cuda, op, reference
from slipstream.kernels.cuda.launcher import launched_by
from slipstream.kernels.cuda.source import Grid
from tests.emulator import emulated, needs_compiler, same
from tests.oracle.test_kernels import Spans, make_spans, random

pytestmark = [needs_compiler, pytest.mark.sampled(keep=1, together=True)]
WIDTHS = (1, 2, 3, 5, 8, 16, 64)
HALF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # largest relative error of one rounding
each_dtype = pytest.mark.parametrize("dtype", HALF, ids=lambda dtype: str(dtype)[6:])


def make_stores(
    spans: Spans, shape: tuple[int, int, int], dtype: torch.dtype, d_value: int | None = None
) -> tuple[Tensor, Tensor]:
    """Keys and values; shape: K/V heads, page size, d_head. d_value: None for d_head."""
    *outer, d_head = shape
    keys = random(spans.n_pages, *outer, d_head, dtype=dtype, seed=1)
    return keys, random(spans.n_pages, *outer, d_value or d_head, dtype=dtype, seed=2)


def poison_unseen(
    stores: tuple[Tensor, Tensor], spans: Spans, window: int | None
) -> tuple[tuple[Tensor, Tensor], Spans]:
    """NaN wherever nobody looks, and page ids that do not exist where nobody looks them up."""
    keys, values = stores
    page_size, table = keys.shape[2], torch.full_like(spans.page_table, -(10**6))
    seen = torch.zeros(keys.shape[0], page_size, dtype=torch.bool)
    starts = spans.span_starts.tolist()
    for i, past in enumerate(spans.n_past.tolist()):
        n_rows = starts[i + 1] - starts[i]
        for position in range(max(0, past - (window or 10**6) + 1), past + n_rows if n_rows else 0):
            page = spans.page_table[i, position // page_size]
            seen[page, position % page_size] = True
            table[i, position // page_size] = page
    hidden = ~seen[:, None, :, None]
    poisoned = keys.masked_fill(hidden, float("nan")), values.masked_fill(hidden, float("nan"))
    return poisoned, replace(spans, page_table=table)


def make_sinks(n_heads: int) -> Tensor:
    """Some of about the size of a score, one that leaves hardly anything of a row, one that is not felt."""
    sinks = random(n_heads, dtype=torch.float32, seed=4) * 3
    sinks[2::6], sinks[3::6] = 60.0, -300.0
    return sinks


def assert_near(
    found: Tensor,
    q: Tensor,
    stores: tuple[Tensor, Tensor],
    spans: Spans,
    window: int | None,
    sinks: Tensor | None,  # [n_heads]
) -> None:
    """A weight is rounded once, above and below the line; the result once; a weight below 2^-14 loses 2^-25 at most."""
    keys, values = (store.double() for store in stores)
    meant = reference.attention(q.double(), keys, values, spans, 0.3, window, sinks)
    magnitude = reference.attention(q.double(), keys, values.abs(), spans, 0.3, window, sinks)
    half, n_seen = HALF[q.dtype], int(spans.n_past.max()) + q.shape[0]
    allowed = 2 * half * magnitude + half * meant.abs() + n_seen * 2.0**-25 * values.abs().max() + 1e-5
    assert found.shape == meant.shape
    assert not found.isnan().any()
    assert ((found.double() - meant).abs() - allowed).max() <= 0


@each_dtype
@pytest.mark.parametrize("seed", range(20))
def test_is_near_float64(dtype: torch.dtype, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)

    def pick(*options: int) -> int:
        return options[int(torch.randint(len(options), (), generator=draw))]

    n_kv, share = pick(1, 2), pick(1, 2, 3, 4, 5, 8)
    page_size, d_head = pick(7, 16, 48, 64), pick(8, 40, 64, 64, 96, 128, 192, 256)
    lengths = [pick(1, 1, 2, 5, 9, 17) for _ in range(pick(1, 2, 4))]
    past = [pick(0, 3, 31, 32, 100, 500, 511, 512, 700) for _ in lengths]
    if seed % 5 == 0:
        lengths, past = [*lengths, 0, 2], [*past, 40, 30]  # an empty span has no items
    window = pick(1, 30, 64, 530) if seed % 2 else None
    sinks = make_sinks(n_kv * share) if seed % 4 > 1 else None
    spans = make_spans(lengths, past, page_size)
    stores = make_stores(spans, (n_kv, page_size, d_head), dtype)
    q = random(sum(lengths), n_kv * share, d_head, dtype=dtype)
    poisoned, known = poison_unseen(stores, spans, window)
    with emulated(order=seed):
        found = cuda.attention(q, *poisoned, known, 0.3, window, sinks)
    assert_near(found, q, stores, spans, window, sinks)


WIDTHS_OF_TWO = [
    (8, 8),
    (24, 16),
    (64, 40),
    (96, 64),
    (136, 128),
    (192, 128),
    (256, 16),
    (264, 264),
    (512, 64),
    (512, 320),
    (512, 512),
]


@each_dtype
@pytest.mark.parametrize(("d_head", "d_value"), WIDTHS_OF_TWO)
@pytest.mark.parametrize("window", [None, 37])
def test_values_narrower_than_keys_are_near_float64(
    dtype: torch.dtype, d_head: int, d_value: int, window: int | None
) -> None:
    """Also where a window's edge takes values that are not finite out of the products."""
    lengths, past = [1, 9, 17], [600, 0, 500]
    spans = make_spans(lengths, past, 16)
    stores = make_stores(spans, (2, 16, d_head), dtype, d_value)
    q = random(sum(lengths), 6, d_head, dtype=dtype)
    poisoned, known = poison_unseen(stores, spans, window)
    sinks = make_sinks(6) if window else None
    with emulated(order=3):
        found = cuda.attention(q, *poisoned, known, 0.3, window, sinks)
    assert found.shape == (27, 6 * d_value)
    assert_near(found, q, stores, spans, window, sinks)


@each_dtype
@pytest.mark.parametrize(
    ("heads", "page_size", "lengths", "past", "window"),
    [
        ((8, 2, 64), 16, [1, 5, 40], [500, 0, 30], None),
        ((3, 1, 80), 48, [17], [511], 37),
        ((4, 4, 16), 7, [1, 0, 2], [70, 3, 512], None),
        ((6, 2, 128), 64, [9, 1], [31, 600], 530),
        ((5, 1, 256), 16, [2, 13], [32, 5], None),
        ((4, 2, 192, 128), 16, [3, 9], [520, 40], 37),
        ((4, 2, 512), 16, [3, 9], [520, 40], None),
        ((5, 1, 304, 272), 48, [9, 1], [31, 500], 37),
    ],
    ids=str,
)
def test_float8_keys_and_values_are_read_as_those_of_the_queries_dtype(
    dtype: torch.dtype,
    heads: tuple[int, ...],
    page_size: int,
    lengths: list[int],
    past: list[int],
    window: int | None,
) -> None:
    n_heads, n_kv, d_head, d_value = (*heads, heads[2])[:4]
    spans = make_spans(lengths, past, page_size)
    q = random(sum(lengths), n_heads, d_head, dtype=dtype)
    wide = make_stores(spans, (n_kv, page_size, d_head), torch.float32, d_value)
    poisoned, known = poison_unseen((wide[0] * 3, wide[1] * 100), spans, window)
    keys, values = (store.to(torch.float8_e4m3fn) for store in poisoned)
    sinks = make_sinks(n_heads) if n_kv > 1 else None
    with emulated(order=2):
        found = cuda.attention(q, keys, values, known, 0.3, window, sinks)
    with emulated(order=1):
        meant = cuda.attention(q, keys.to(dtype), values.to(dtype), known, 0.3, window, sinks)
    assert not found.isnan().any()
    assert same(found, meant)


@each_dtype
def test_every_float8_value_comes_out_to_the_bit(dtype: torch.dtype) -> None:
    """A row that sees one position has its values for a result."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    spans, store = make_spans([1], [0], 16), torch.zeros(3, 1, 16, 256).to(torch.float8_e4m3fn)
    values = store.clone()
    values[spans.page_table[0, 0], 0, 0] = codes
    q = random(1, 2, 256, dtype=dtype)
    with emulated():
        found = cuda.attention(q, store, values, spans, 0.3).view(2, 256)
    for row in found:
        torch.testing.assert_close(row, codes.to(dtype), rtol=0, atol=0, equal_nan=True)


class Prompt:
    """One sequence in pages, and its attention however it is cut into spans."""

    def __init__(self, n: int, shape: tuple[int, ...], dtype: torch.dtype, page_size: int = 16) -> None:
        n_heads, n_kv, d_head, d_value = (*shape, shape[2])[:4]
        self.spans = make_spans([n], [0], page_size)
        self.stores = make_stores(self.spans, (n_kv, page_size, d_head), dtype, d_value)
        self.q = random(n, n_heads, d_head, dtype=dtype)
        self.sinks: Tensor | None = None  # [n_heads]

    def rows(self, pieces: list[tuple[int, int]], window: int | None = None, order: int = 0) -> Tensor:
        """Rows of spans (first row, rows), each a slot of its own with the same keys and values."""
        lengths = torch.tensor([0, *(n for _, n in pieces)])
        spans = replace(
            self.spans,
            span_starts=lengths.cumsum(0).int(),
            n_past=torch.tensor([first for first, _ in pieces], dtype=torch.int32),
            page_table=self.spans.page_table.expand(len(pieces), -1).contiguous(),
        )
        q = torch.cat([self.q[first : first + n] for first, n in pieces])
        with emulated(order=order):
            return cuda.attention(q, *self.stores, spans, 0.2, window, self.sinks)


@each_dtype
@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize("sunk", [False, True], ids=["no-sinks", "sinks"])
def test_a_row_has_the_same_bits_at_every_width_and_in_any_batch(
    dtype: torch.dtype, window: int | None, sunk: bool
) -> None:
    prompt = Prompt(600, (3, 1, 64), dtype)
    prompt.sinks = make_sinks(3) if sunk else None
    first = 500  # the rows from 512 on see two chunks
    whole = prompt.rows([(first, 100)], window)
    for width in WIDTHS:
        for start in (500, 507, 600 - width):
            found = prompt.rows([(start, width)], window)
            assert same(found, whole[start - first : start - first + width]), (width, start)
    beside = prompt.rows([(590, 10), (0, 33), (511, 2), (20, 1)], window)
    assert same(beside[:10], whole[90:])
    assert same(beside[43:45], whole[11:13])
    assert same(beside[10:43], prompt.rows([(0, 33)], window))
    assert same(beside[45:], prompt.rows([(20, 1)], window))


@pytest.mark.parametrize(
    "shape", [(4, 2, 128), (5, 1, 256), (2, 2, 40), (4, 2, 192, 128), (5, 1, 512)], ids=str
)
def test_other_heads_have_the_same_bits_at_every_width(shape: tuple[int, ...]) -> None:
    prompt = Prompt(550, shape, torch.bfloat16)
    whole = prompt.rows([(530, 20)])
    for width in (1, 2, 3, 5, 8, 16):
        assert same(prompt.rows([(530, width)]), whole[:width])
        assert same(prompt.rows([(3, 5), (550 - width, width)])[5:], whole[-width:])


def cancelling(n: int, shape: tuple[int, ...]) -> Prompt:
    """Chunks whose results nearly cancel, so that float32's last bits are among those that float16 keeps."""
    prompt = Prompt(n, shape, torch.float16)
    prompt.q *= 0.1
    for position in range(n):
        page = prompt.spans.page_table[0, position // 16]
        values = prompt.stores[1][page, :, position % 16]  # [n_kv, d_value]
        sign = 1 - cuda._chunk_of(position) % 2 * 2
        values[:] = values.new_tensor(sign) * torch.linspace(1, 2, values.shape[1])
    return prompt


def test_no_width_shows_where_results_nearly_cancel() -> None:
    prompt = cancelling(1024, (4, 2, 64))
    whole = prompt.rows([(1004, 20)])
    assert whole.abs().mean() < 0.05
    for width in (1, 3, 8, 16):
        assert same(prompt.rows([(1004, width)]), whole[:width])
        assert same(prompt.rows([(1, 2), (1024 - width, width)])[2:], whole[-width:])


@pytest.mark.parametrize("window", [None, 1000])
@pytest.mark.parametrize("sunk", [False, True], ids=["no-sinks", "sinks"])
@pytest.mark.parametrize("shape", [(4, 2, 64), (4, 2, 40, 24), (4, 2, 272)], ids=str)
def test_chunks_joined_by_their_block_and_by_a_second_launch_agree(
    window: int | None, sunk: bool, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = cancelling(2200, shape)  # chunks of all lengths
    prompt.sinks = torch.tensor([7.0, 1.0, 8.0, 6.5]) if sunk else None  # of about what 2,200 scores are
    pieces = [(2195, 5), (0, 1), (1014, 10), (2044, 9)]
    spread = prompt.rows(pieces, window)
    monkeypatch.setattr(cuda, "MOST_BLOCKS", 20)  # two blocks go through the chunks of an item
    assert same(prompt.rows(pieces, window), spread)
    monkeypatch.setattr(cuda, "MOST_BLOCKS", 1)  # one
    assert same(prompt.rows(pieces, window), spread)
    monkeypatch.setattr(cuda, "ENOUGH_BLOCKS", 0)
    assert same(prompt.rows(pieces, window), spread)


def test_no_order_of_threads_and_blocks_and_no_page_size_changes_a_bit() -> None:
    prompt = Prompt(540, (4, 1, 64), torch.bfloat16)
    meant = prompt.rows([(510, 30), (3, 2)])
    for order in (1, 7, 8):
        assert same(prompt.rows([(510, 30), (3, 2)], order=order), meant)
    for page_size in (7, 64, 600):
        other = Prompt(540, (4, 1, 64), torch.bfloat16, page_size)
        for mine, theirs in zip(prompt.stores, other.stores, strict=True):
            rows = [prompt.spans.page_table[0, p // 16] * 16 + p % 16 for p in range(540)]
            places = [
                other.spans.page_table[0, p // page_size] * page_size + p % page_size for p in range(540)
            ]
            theirs.flatten(0, 2)[torch.stack(places)] = mine.flatten(0, 2)[torch.stack(rows)]
        assert same(other.rows([(510, 30), (3, 2)]), meant)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("window", [None, 20])
def test_what_is_not_finite_reaches_exactly_the_rows_that_see_it(value: float, window: int | None) -> None:
    prompt = Prompt(60, (4, 1, 64), torch.bfloat16, page_size=64)
    keys, values = (
        store[prompt.spans.page_table[0, 0]] for store in prompt.stores
    )  # [n_kv, page_size, d_head]
    pieces = [(10, 50)]
    meant = prompt.rows(pieces, window).view(50, 4, 64)
    sees = torch.tensor([p >= 25 and p < 25 + (window or 60) for p in range(10, 60)])
    values[0, 25, 7] = value
    found = prompt.rows(pieces, window).view(50, 4, 64)
    assert not found[sees][..., 7].isfinite().any()
    assert same(found[~sees], meant[~sees])
    columns = [c for c in range(64) if c != 7]
    assert same(found[..., columns], meant[..., columns])
    values[0, 25, 7], keys[0, 25, 7] = 0.0, float("nan")
    clean = prompt.rows(pieces, window).view(50, 4, 64)
    assert clean[sees].isnan().all()
    assert same(clean[~sees][..., columns], meant[~sees][..., columns])


def test_a_row_of_padding_is_not_touched() -> None:
    prompt = Prompt(40, (4, 2, 64), torch.bfloat16)
    spans = replace(
        prompt.spans,
        span_starts=torch.tensor([0, 2], dtype=torch.int32),
        n_past=torch.tensor([5], dtype=torch.int32),
    )
    with emulated():
        found = cuda.attention(prompt.q[5:10].contiguous(), *prompt.stores, spans, 0.2)
        assert cuda.attention(prompt.q[:0], *prompt.stores, spans, 0.2).shape == (0, 256)
    assert same(found[:2], prompt.rows([(5, 2)]))
    assert found[2:].isnan().all()  # torch.empty is NaN in tests


def test_a_table_much_wider_than_the_text() -> None:
    """As in a captured graph: the grid follows the table, blocks without work end."""
    prompt = Prompt(64, (4, 2, 64), torch.bfloat16)
    meant = prompt.rows([(54, 10)])  # the last position is the last of its page
    wide = torch.full((1, 400), -(10**6), dtype=torch.int32)
    wide[:, :4] = prompt.spans.page_table[:, :4]
    prompt.spans = replace(prompt.spans, page_table=wide)
    assert same(prompt.rows([(54, 10)]), meant)


def test_what_does_not_fit_is_refused() -> None:
    prompt = Prompt(10, (2, 1, 64), torch.bfloat16)
    q, (keys, values), spans = prompt.q, prompt.stores, prompt.spans
    with pytest.raises(ValueError, match="8, 16"):
        cuda.attention(q[..., :12].contiguous(), keys[..., :12].contiguous(), values, spans, 0.2)
    with pytest.raises(ValueError, match="q's dtype or float8"):
        cuda.attention(q, keys.half(), values, spans, 0.2)
    with pytest.raises(ValueError, match="q's dtype or float8"):
        cuda.attention(q, keys, values.to(torch.float8_e4m3fn), spans, 0.2)
    eight = (one[..., :40].to(torch.float8_e4m3fn) for one in (keys, values))
    with pytest.raises(ValueError, match="16, 32"):
        cuda.attention(q[..., :40].contiguous(), *eight, spans, 0.2)
    narrow = values[..., :36].contiguous()
    with pytest.raises(ValueError, match=r"8, 16, … 512 values, not 36"):
        cuda.attention(q, keys, narrow, spans, 0.2)
    with pytest.raises(ValueError, match="at most as wide as key heads, 32, not 64"):
        cuda.attention(q[..., :32].contiguous(), keys[..., :32].contiguous(), values, spans, 0.2)
    with pytest.raises(ValueError, match="contiguous"):
        cuda.attention(q[..., :32], keys, values, spans, 0.2)
    with pytest.raises(ValueError, match="int32"):
        cuda.attention(q, keys, values, replace(spans, n_past=spans.n_past.long()), 0.2)
    with pytest.raises(ValueError, match="window"):
        cuda.attention(q, keys, values, spans, 0.2, 0)
    with pytest.raises(ValueError, match=r"sinks are \[2\] float32"):
        cuda.attention(q, keys, values, spans, 0.2, sinks=torch.zeros(4))
    assert cuda.refuses(torch.device("cuda"), torch.float32) == "bfloat16 and float16 only"
    assert cuda.refuses(torch.device("cpu"), torch.bfloat16) == "the device is cpu"


@pytest.mark.parametrize("width", cuda.WIDTHS, ids=lambda width: str(width.most))
@pytest.mark.parametrize("coded", [False, True], ids=["16 bits", "float8"])
def test_blocks_fit_every_gpu(width: cuda.Width, coded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads are those of the kernel's launch bounds; shared memory is what compute capability 8.9 and 12.0 have."""
    blocks: set[tuple[int, int]] = set()

    def note(_: object, __: str, grid: Grid, block: int, ___: object, shared: int) -> None:
        if shared:  # not merge_chunks
            blocks.add((block, shared))

    for few in (cuda.FEW_BLOCKS, 0):  # blocks with warps that only help, and without
        monkeypatch.setattr(cuda, "FEW_BLOCKS", few)
        blocks.clear()
        for n_rows in (1, 9, 17, 40, 65):
            prompt = Prompt(n_rows, (2, 1, width.most), torch.bfloat16)
            stores = [one.to(torch.float8_e4m3fn) if coded else one for one in prompt.stores]
            with launched_by(note):
                cuda.attention(prompt.q, *stores, prompt.spans, 0.2)
        assert max(block for block, _ in blocks) == cuda.MOST_WARPS * cuda.WARP
        fixed = 4 * cuda.LONGEST + (
            12288 if width.walks else 0
        )  # rows of a chunk, sums that lie in no register
        assert max(shared for _, shared in blocks) + fixed <= 99 * 1024
        assert len(blocks) == len({shared for _, shared in blocks}) == (2 if width.slices > 1 else 3)


def test_signatures_are_those_of_the_op() -> None:
    for name in ("attention",):
        assert inspect.signature(getattr(cuda, name)) == inspect.signature(getattr(op, name))
