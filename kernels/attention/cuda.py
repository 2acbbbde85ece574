"""Attention on CUDA: K/V is cut at fixed positions and joined in ascending order, so that a row's bits follow from its
position and the keys and values alone, however many rows, spans and blocks there are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.attention import warpgroups
from slipstream.kernels.attention.spans import WIDEST_ON_CUDA, Spans, check_attention, check_batch
from slipstream.kernels.cuda.launcher import compile_for, has_warpgroups, launch, refusal
from slipstream.kernels.cuda.source import Source

QUERIES, MOST_WARPS, WARP = 16, 4, 32  # as in attention.cu
LONGEST, SHORT_UNTIL, MIDDLE_UNTIL = 512, 1024, 2048  # positions of chunks, as in chunks.cuh


class Width(NamedTuple):
    """What the kernel of one width of heads has; as in attention.cu and stages.cuh."""

    most: int  # values of a head; narrower ones run here too, what they lack is not read
    stages: int
    step: int = 32  # positions of a stage
    slices: int = 1  # warps that have the same queries, each with its part of the columns of values
    walks: bool = False  # with sums over all chunks in registers


WIDTHS = (
    *(Width(64, 3, walks=True), Width(128, 3, walks=True)),
    *(Width(256, 2), Width(WIDEST_ON_CUDA, 2, step=16, slices=2)),
)
DTYPES = tuple(warpgroups.NAMES)  # of queries; keys and values have theirs or float8
NAMES = {**warpgroups.NAMES, torch.float8_e4m3fn: "float8"}
MERGED = (8, 14)  # chunks that a join has under way: more take more registers


def _source(q: torch.dtype, kv: torch.dtype, widths: Sequence[Width], *others: str) -> Source:
    kernels = (
        f"attention<{NAMES[q]}, {NAMES[kv]}, {width.most}, {walks}>"
        for width in widths
        for walks in (("false", "true") if width.walks else ("false",))
    )
    # Both ways of joining chunks must round alike: no multiplication and addition becomes one.
    return Source(__file__, "attention.cu", (*kernels, *others), fuse=False, early=True)


# By dtype of queries: a model has one, and compiling takes seconds. A device has NARROW or, if it is a Hopper, GROUPS.
WIDE = {q: _source(q, q, WIDTHS[2:], *(f"merge_chunks<{NAMES[q]}, {n}>" for n in MERGED)) for q in DTYPES}
CODED = {q: _source(q, torch.float8_e4m3fn, WIDTHS) for q in DTYPES}
NARROW = {q: _source(q, q, WIDTHS[:2]) for q in DTYPES}
GROUPS = warpgroups.SOURCES
NO_WINDOW = 1 << 30
ENOUGH_BLOCKS = 128  # one for each of about 132 multiprocessors: then each goes through all chunks by itself
MOST_BLOCKS = 16 * 132  # blocks that find nothing to do cost time as well
FEW_BLOCKS = 3 * 132  # as many run at a time: blocks of so few have more warps, to fetch sooner
LONG = 32  # chunks: behind more of them, more are joined at once
MOST_SUMS = 1 << 26  # floats kept between the two launches


def refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    return refusal(device) if dtype in DTYPES else "bfloat16 and float16 only"


def prepare(device: torch.device, dtype: torch.dtype) -> None:
    narrow = GROUPS if has_warpgroups(device) else NARROW
    compile_for(device, WIDE[dtype], CODED[dtype], narrow[dtype])


def attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    spans: Spans,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As `op.attention`, for any page size.

    Raises ValueError for heads that are no multiple of 8, or of 16 where keys and values are float8, or wider than 512,
    and for values wider than keys.
    """
    _check(q, keys, values)
    check_batch(spans, q, keys, values)
    check_attention(q, values, spans, window, sinks)
    return _run(q, keys, values, spans, sinks, scale, min(window or NO_WINDOW, NO_WINDOW))


def _run(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    spans: Spans,
    sinks: Tensor | None,
    scale: float,
    window: int,
) -> Tensor:
    """`attention` of what has been checked. Rows of no span are not written."""
    (n_rows, n_heads, d_head), (_, n_kv, page_size, d_value) = q.shape, values.shape
    starts, wholes = spans.span_starts, spans.wholes
    n_spans, n_pages = spans.page_table.shape
    out = q.new_empty(n_rows, n_heads * d_value)
    if n_rows == 0 or n_spans == 0:
        return out
    reach = window if wholes is None else NO_WINDOW  # where a whole begins is known to the device alone
    plan = _plan(q, keys, values, n_spans, n_pages * page_size, reach)
    between = 0 if plan.walks else 1 if plan.n_blocks == 1 else plan.n_chunks
    kept = n_rows * n_heads * between  # of queries, between chunks
    totals = warpgroups.n_totals(q, plan.n_groups, plan.n_items * n_kv) if plan.walks else 0
    sums = q.new_empty(kept * d_value + totals, dtype=torch.float32)
    softmax = q.new_empty(kept * 2, dtype=torch.float32)
    sizes = n_rows, n_spans, n_pages, n_heads, n_kv, page_size, d_head, d_value
    tensors = q, keys, values, starts, spans.n_past, spans.page_table, wholes, sinks, out, sums, softmax
    grid = n_kv, plan.n_blocks, plan.n_items
    factor = scale * math.log2(math.e)
    if plan.n_groups:
        launch(
            GROUPS[q.dtype],
            warpgroups.kernel(q, plan.n_groups),
            grid,
            (plan.n_groups + 1) * warpgroups.TEAM,
            *(*tensors, *sizes, window, factor),
            shared=warpgroups.shared(q, plan.n_groups, sums=plan.walks and not totals),
        )
    else:
        width, n_tiles = _width(d_head), plan.size // QUERIES
        is_few = plan.n_blocks * n_kv * plan.n_items <= FEW_BLOCKS
        source = WIDE if keys.dtype == q.dtype else CODED
        launch(
            (NARROW if source is WIDE and width.walks else source)[q.dtype],
            f"attention<{NAMES[q.dtype]}, {NAMES[keys.dtype]}, {width.most}, {str(plan.walks).lower()}>",
            grid,
            (MOST_WARPS if is_few else n_tiles * width.slices) * WARP,
            *(*tensors, *sizes, window, factor, n_tiles),
            shared=(width.stages * 2 * width.step + plan.size) * width.most * q.element_size(),
        )
    if plan.n_blocks > 1:
        n_parts = -(-d_value // (2 * WARP))
        launch(
            WIDE[q.dtype],
            f"merge_chunks<{NAMES[q.dtype]}, {MERGED[plan.n_chunks > LONG]}>",
            (-(-n_rows * n_heads * n_parts // MOST_WARPS), 1, 1),
            MOST_WARPS * WARP,
            *(sums, softmax, starts, spans.n_past, wholes, sinks, out),
            *(n_rows, n_spans, n_heads, n_parts, d_value, window),
        )
    return out


def _width(d_head: int) -> Width:
    return next(width for width in WIDTHS if d_head <= width.most)


class Plan(NamedTuple):
    """How the work is spread; nothing of it changes a result."""

    size: int  # queries of an item
    n_groups: int  # warpgroups that multiply them; 0: warps do
    n_items: int  # at most
    n_blocks: int  # that share an item's chunks
    n_chunks: int  # of an item, at most
    walks: bool  # a block keeps its sums over all chunks


def _plan(q: Tensor, keys: Tensor, values: Tensor, n_spans: int, n_positions: int, reach: int) -> Plan:
    """n_positions: that the page table has room for. reach: positions that a row sees at most."""
    (n_rows, n_heads, d_head), (_, n_kv, _, d_value) = q.shape, values.shape
    n_queries = n_rows * (n_heads // n_kv)
    per_span = -(-n_queries // n_spans)

    def n_items(size: int) -> int:
        return (n_queries - n_spans) // size + n_spans  # every span's last one may be partly filled

    n_groups, most = 0, MOST_WARPS // _width(d_head).slices
    size = QUERIES * next((n for n in (1, 2) if per_span <= QUERIES * n), most)
    if warpgroups.runs(q, keys):
        one, two = warpgroups.GROUP, 2 * warpgroups.GROUP
        n_groups = 2 if per_span > one and n_items(two) * n_kv >= ENOUGH_BLOCKS else 1
        size = n_groups * one
    n_seen = min(n_positions, reach + size)
    # Chunks do not get shorter: as many positions touch most of them where the text begins.
    n_chunks = min(_chunk_of(n_positions - 1) + 1, _chunk_of(n_seen - 1) + 2)
    n_sums = n_rows * n_heads * n_chunks * d_value  # that are kept where blocks share an item
    if n_groups:
        n_blocks = warpgroups.n_blocks(n_groups, n_items(size) * n_kv, n_seen, n_sums)
    else:
        is_full = n_queries // size * n_kv >= ENOUGH_BLOCKS
        n_blocks = 1 if is_full else max(1, MOST_BLOCKS // (n_items(size) * n_kv))
    n_blocks = 1 if n_sums > MOST_SUMS else min(n_chunks, n_blocks)
    return Plan(size, n_groups, n_items(size), n_blocks, n_chunks, n_blocks == 1 and _width(d_head).walks)


def _chunk_of(position: int) -> int:
    """As `chunk_of` in chunks.cuh."""
    short, middle = LONGEST // 4, LONGEST // 2
    n_short, n_middle = SHORT_UNTIL // short, (MIDDLE_UNTIL - SHORT_UNTIL) // middle
    if position < SHORT_UNTIL:
        return position // short
    if position < MIDDLE_UNTIL:
        return n_short + (position - SHORT_UNTIL) // middle
    return n_short + n_middle + (position - MIDDLE_UNTIL) // LONGEST


def _check(q: Tensor, keys: Tensor, values: Tensor) -> None:
    """Raises ValueError for heads that there is no kernel for."""
    unit = 16 // keys.element_size()  # values of a copy
    for width in (q.shape[2], values.shape[3]):
        if width % unit or width > WIDEST_ON_CUDA:
            raise ValueError(
                f"cuda attention takes heads of {unit}, {2 * unit}, … {WIDEST_ON_CUDA} values, not {width}"
            )
    if keys.dtype not in (q.dtype, torch.float8_e4m3fn) or keys.dtype != values.dtype:
        raise ValueError(
            f"keys and values are of q's dtype or float8_e4m3fn, not {q.dtype}, {keys.dtype}, {values.dtype}"
        )
