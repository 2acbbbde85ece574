"""Products with matrices in blocks, as narrow as the file has them: one compiled call, the same bits for any rows.

The sum of an output begins with its bias. Block by block, in ascending order, the block's scale times the sum of
value * input is added to it, or, where a block has several groups of inputs with a factor each, the scale times the
sum over groups of factor * sum of value * input; then, alike, the minimum times the sum of the inputs. `op.py` says in
which order and how rounded. Values are whole numbers that bfloat16 holds, so no weight is ever rounded.

A part that is no matrix in blocks is multiplied as `panels.py` does, beside the others, by the same call.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels import threads
from slipstream.kernels.compiled import (
    KINDS,
    fetch_add,
    float_pointer,
    inlined,
    long_kernel,
    long_pointer,
    per_dtype,
    pointer,
    shifted,
)
from slipstream.kernels.cpu_features import missing
from slipstream.kernels.matmul import code_floats, code_pairs
from slipstream.kernels.matmul.blocks import BlockWeight
from slipstream.kernels.matmul.formats import CHUNK, LAYOUTS, PANEL
from slipstream.kernels.matmul.panel_sums import (
    add_panel,
    multiply_floats,
    multiply_pairs,
    panels_of,
)
from slipstream.kernels.matmul.quantized import (
    Fp8Weight,
    Int4Weight,
    JoinedWeight,
    Quantized,
    same_order,
    widened,
)
from slipstream.kernels.matmul.records import constants_of, records
from slipstream.kernels.matmul.scaled import kind_of
from slipstream.kernels.matmul.unpack import COLUMNS_1, COLUMNS_4, COLUMNS_8, MOST_ROWS, add_chunk, end_block
from slipstream.kernels.vector import WIDTH, load, store, store_part, sum_lanes

VISIT = 8  # chunks of 32 inputs taken with all rows before the next: their codes stay in the first cache
SERIAL_BELOW = 1_000_000  # multiply-adds; less is done before a second thread has woken
# Arguments of a product, and of what adds one panel's products to the totals.
X, TILES, SUMS, N_ROWS, N_IN, OUT, BIAS, SEGMENTS, N_OUT, N_PANELS, N_THREADS, ARRIVED, NEXT = range(13)
RECORDS, TOTALS, PARTIAL = 5, 6, 7
FIRST_PANEL, TASK, ADDRESS, PANEL_BYTES, FIRST_OUTPUT, SEGMENT_OUTPUTS, FIELDS = range(7)  # of a segment
SUM_BYTES = 12  # of a chunk's three sums of inputs
SPREAD = 8  # words between the threads' counters, so that each has a line of the cache


@dataclass(frozen=True, slots=True)
class NarrowWeight:
    """A matrix, or several that read the same inputs, some of them in records (`formats.py`)."""

    parts: tuple[
        Tensor, ...
    ]  # records [n_panels, n_blocks, record_bytes] uint8, or panels of `panel_sums.py`
    segments: Tensor  # [n_parts + 1, FIELDS] int64: what a product has to know of each part; the last begins no panel
    bias: Tensor  # [n_panels of all * 64] float32, zero without one
    order: Tensor | None  # [in_features] int64: stored column i belongs to input order[i]; None: to input i
    dtype: torch.dtype
    by_pairs: bool  # whether products are of pairs of bfloat16, not of float32
    in_features: int
    out_features: int


def refusal() -> str | None:
    """Why blocks are widened on this CPU; None if they are not."""
    names = missing(code_floats.FEATURES)
    return f"this CPU has no {', '.join(names)}" if names else None


def has_pairs(dtype: torch.dtype) -> bool:
    """Whether inputs of the dtype are multiplied two at a time, by the CPU's instruction for pairs of bfloat16."""
    return dtype is torch.bfloat16 and not missing(code_pairs.FEATURES)


def pack(weight: Tensor | Quantized, bias: Tensor | None = None) -> NarrowWeight | None:
    """The weight with the parts that have records in these; None if there are none."""
    parts, order = _gathered(weight)
    by_pairs = has_pairs(weight.dtype)
    found = [records(part, for_pairs=by_pairs) if _is_narrow(part) else None for part in parts]
    if all(one is None for one in found):
        return None
    laid = [panels_of(widened(part)) if one is None else one for part, one in zip(parts, found, strict=True)]
    kinds = ["" if one is None else kind_of(part) for part, one in zip(parts, found, strict=True)]
    tasks = [_block_task(kind, int(not by_pairs)) if kind else _dense_task[weight.dtype] for kind in kinds]
    n_outs = [part.shape[0] for part in parts]
    ends = torch.zeros(sum(n_outs)) if bias is None else bias.to(torch.float32)
    ends = torch.cat([F.pad(one, (0, -len(one) % PANEL)) for one in ends.split(n_outs)])
    segments = _segments(laid, n_outs, tasks)
    return NarrowWeight(
        tuple(laid), segments, ends, order, weight.dtype, by_pairs, weight.shape[1], sum(n_outs)
    )


def packed_bytes(weight: Quantized) -> int:
    """Bytes of what `panels.pack` makes of a weight with parts in blocks; unlike it, for weights without memory too."""
    n_bytes = 0
    for part in _gathered(weight)[0]:
        if _is_narrow(part):
            form = LAYOUTS[kind_of(part) or ""]
            n_bytes += -(-part.shape[0] // PANEL) * (part.shape[1] // form.block) * form.record_bytes
        else:
            n_bytes += math.prod(part.shape) * part.dtype.itemsize
    return n_bytes


def _gathered(weight: Tensor | Quantized) -> tuple[list[Tensor | Quantized], Tensor | None]:
    """The parts as they are multiplied with inputs in some order, and that order, [in_features]; None: their own.

    If all parts have one order, a product gathers its inputs; else those that have one are widened.
    """
    parts: list[Tensor | Quantized] = list(weight.parts) if isinstance(weight, JoinedWeight) else [weight]
    orders = [getattr(part, "order", None) for part in parts]
    order = orders[0]
    if order is None or not all(same_order(order, one) for one in orders):
        return parts, None
    return [replace(part, order=None) for part in parts if isinstance(part, BlockWeight | Int4Weight)], order


def _is_narrow(part: Tensor | Quantized) -> TypeGuard[BlockWeight | Int4Weight | Fp8Weight]:
    """Whether records can be made of it; `records` may still find a code that has no place in them."""
    has_order = getattr(part, "order", None) is not None
    return not has_order and kind_of(part) is not None and refusal() is None


def _segments(laid: Sequence[Tensor], n_outs: Sequence[int], tasks: Sequence[int]) -> Tensor:
    """[n_parts + 1, FIELDS] int64."""
    rows, n_panels, n_done = [], 0, 0
    for part, n_out, task in zip(laid, n_outs, tasks, strict=True):
        rows.append((n_panels, task, part.data_ptr(), part[0].nbytes, n_done, n_out))
        n_panels, n_done = n_panels + len(part), n_done + n_out
    return torch.tensor([*rows, (n_panels, 0, 0, 0, n_done, 0)])


def linear(x: Tensor, packed: NarrowWeight, out_dtype: torch.dtype | None = None) -> Tensor:
    """As `op.linear`. Raises ValueError for rows of another dtype or size than the weight's."""
    n_rows, n_in = x.shape
    if x.dtype is not packed.dtype or n_in != packed.in_features:
        raise ValueError(
            f"x is {x.dtype} [n_rows, {n_in}], the weight {packed.dtype} [.., {packed.in_features}]"
        )
    x = x.contiguous() if packed.order is None else x.index_select(1, packed.order)
    wide = out_dtype is torch.float32 or x.dtype is torch.float32
    out = torch.empty((n_rows, packed.out_features), dtype=torch.float32 if wide else x.dtype)
    n_panels = packed.bias.shape[0] // PANEL
    _run(
        (x.data_ptr(), out.data_ptr(), packed.bias.data_ptr(), packed.segments.data_ptr()),
        (n_rows, n_in, packed.out_features, n_panels),
        (_arrange_task(x.dtype, packed.by_pairs), _task[out.dtype], 2 if packed.by_pairs else 4),
        threads.available() if n_rows * n_in * packed.out_features >= SERIAL_BELOW else 1,
    )
    return out if out_dtype is None else out.to(out_dtype)


@inlined
def _tile_rows(left: int) -> int:
    """Rows that are computed together of those that are left; where they are fewer, the last is done again."""
    if left > 4 and MOST_ROWS == 8:
        return 8
    return 4 if left > 1 else 1


@inlined
def _arrange(a: Any, kind: Any, words: Any, two: Any) -> None:
    """Copy rows into tiles, [steps, rows of the tile] words of two inputs, and add up the inputs of every 32.

    a: the arguments; kind: of an input; words: of two inputs and of two in a tile; two: makes the second of the first.
    """
    n_rows, n_steps = a[N_ROWS], a[N_IN] // 2
    x, tiles = pointer(a[X], words[0]), pointer(a[TILES], words[1])
    tile = fetch_add(shifted(a, ARRIVED), 1)
    while tile * 8 < n_rows:
        row = tile * 8
        while row < min(tile * 8 + 8, n_rows):
            n = _tile_rows(n_rows - row)
            for r in range(n):
                source = min(row + r, n_rows - 1)
                for step in range(n_steps):
                    tiles[row * n_steps + step * n + r] = two(x[source * n_steps + step])
                _add_inputs(a, pointer(a[X], kind), source, (row, n, r))
            row += n
        tile = fetch_add(shifted(a, ARRIVED), 1)


@inlined
def _add_inputs(a: Any, x: Any, source: int, at: Any) -> None:
    """Sums of each 32 inputs of a row: of all, of the first 16, of the last. at: (first row of the tile, n, r)."""
    row, n, r = at
    sums, n_chunks = float_pointer(a[SUMS]), a[N_IN] // CHUNK
    for chunk in range(n_chunks):
        first = sum_lanes(load(x, source * a[N_IN] + chunk * CHUNK))
        second = sum_lanes(load(x, source * a[N_IN] + chunk * CHUNK + WIDTH))
        place = (row * n_chunks + chunk * n) * 3 + r
        sums[place], sums[place + n], sums[place + 2 * n] = first + second, first, second


@inlined
def _add_blocks(a: Any, kind: Any, wide: Any) -> None:
    """Add the products of 64 outputs to the totals. a: the arguments; kind: the blocks' type; wide: 1 for float32."""
    n_rows, n_chunks = a[N_ROWS], a[N_IN] // CHUNK
    for begin in range(0, n_chunks, VISIT):
        span = begin, min(begin + VISIT, n_chunks)
        row = 0
        while row < n_rows:
            n = _tile_rows(n_rows - row)
            if MOST_ROWS == 8 and n == 8:
                _add_span(a, row, span, (kind, 8, wide))
            elif n == 4:
                _add_span(a, row, span, (kind, 4, wide))
            else:
                _add_span(a, row, span, (kind, 1, wide))
            row += n


@inlined
def _add_span(a: Any, row: int, span: Any, form: Any) -> None:
    """The same for the rows of a tile and some chunks of inputs. form: (kind, n_rows, wide), constants."""
    kind, n, wide = form
    per_block = constants_of(kind)[1] // CHUNK
    n_chunks, totals = a[N_IN] // CHUNK, a[TOTALS] + row * PANEL * 4
    for chunk in range(span[0], span[1]):
        x = a[TILES] + (row * n_chunks + chunk * n) * (CHUNK * 2 * (1 + wide))
        sums = a[SUMS] + (row * n_chunks + chunk * n) * SUM_BYTES
        n_columns = COLUMNS_8 if n == 8 else COLUMNS_4 if n == 4 else COLUMNS_1
        for first in range(0, PANEL, n_columns * WIDTH):
            add_chunk((x, sums, a[RECORDS], chunk, first, totals, a[PARTIAL]), kind, n, wide)
        if (chunk + 1) % per_block == 0:
            begin = chunk + 1 - per_block
            sums = a[SUMS] + (row * n_chunks + begin * n) * SUM_BYTES
            end_block((0, sums, a[RECORDS], begin, 0, totals, a[PARTIAL]), kind, n)


@inlined
def _add_dense(a: Any, steps_at_once: int, multiply: Any) -> None:
    """The same for weights of the rows' own dtype, in panels."""
    n_steps = a[N_IN] // steps_at_once
    rows = float_pointer(a[X]), a[N_ROWS], n_steps
    add_panel(rows, float_pointer(a[RECORDS]), (float_pointer(a[TOTALS]), multiply))


@functools.cache
def _block_task(kind: str, wide: int) -> int:
    """Address of what adds one panel's products with blocks. kind: their type; wide: 1 for products of float32."""

    def items(address: int) -> None:
        _add_blocks(long_pointer(address), kind, wide)

    return threads.compile_task(items)


@per_dtype
def _dense_task(kind: Any) -> int:
    """The same with a panel of inputs' and weights' kind."""
    by_twos = kind is KINDS[torch.bfloat16]

    def items(address: int) -> None:
        if by_twos:
            _add_dense(long_pointer(address), 2, multiply_pairs)
        else:
            _add_dense(long_pointer(address), 1, multiply_floats)

    return threads.compile_task(items)


@inlined
def _panels(a: Any, out: Any) -> None:
    """Do panels until none is left: first those of this thread's own share, which lie together in memory."""
    n_panels, n_threads = a[N_PANELS], a[N_THREADS]
    memory = np.zeros((8 + a[N_ROWS] + 8) * PANEL + WIDTH, np.float32)
    own = np.empty(PARTIAL + 1, np.int64)
    for i in range(RECORDS):
        own[i] = a[i]
    own[PARTIAL] = (memory.ctypes.data + 63) // 64 * 64
    own[TOTALS] = own[PARTIAL] + 8 * PANEL * 4
    arrived = fetch_add(shifted(a, ARRIVED), 1)
    for turn in range(n_threads):
        share = (arrived + turn) % n_threads
        counter, end = shifted(a, NEXT + share * SPREAD), n_panels * (share + 1) // n_threads
        panel = fetch_add(counter, 1)
        while panel < end:
            _one_panel(a, panel, out, own)
            panel = fetch_add(counter, 1)
    memory[:0], own[:0] = 0, 0  # keeps the memory alive until here


@inlined
def _one_panel(a: Any, panel: int, out: Any, own: Any) -> None:
    """64 outputs of all rows, from the bias to their place. own: this thread's arguments."""
    segment, n_rows = long_pointer(a[SEGMENTS]), a[N_ROWS]
    while panel >= segment[FIELDS + FIRST_PANEL]:
        segment = shifted(segment, FIELDS)
    place = panel - segment[FIRST_PANEL]
    bias = shifted(float_pointer(a[BIAS]), panel * PANEL)
    totals = float_pointer(own[TOTALS])
    for row in range(n_rows):
        for i in range(0, PANEL, WIDTH):
            store(totals, row * PANEL + i, load(bias, i))
    own[RECORDS] = segment[ADDRESS] + place * segment[PANEL_BYTES]
    threads.call(segment[TASK], own.ctypes.data)
    n_out = segment[SEGMENT_OUTPUTS] - place * PANEL
    for row in range(n_rows):
        target = shifted(out, row * a[N_OUT] + segment[FIRST_OUTPUT] + place * PANEL)
        for i in range(0, min(PANEL, n_out), WIDTH):
            store_part(target, i, load(totals, row * PANEL + i), n_out - i)


@per_dtype
def _task(kind: Any) -> int:
    """Address of the compiled task that multiplies, for results of this kind."""

    def items(address: int) -> None:
        a = long_pointer(address)
        _panels(a, pointer(a[OUT], kind))

    return threads.compile_task(items)


@inlined
def _same(word: Any) -> Any:
    return word


@inlined
def _two_floats(word: Any) -> Any:
    """Two float32 of two bfloat16."""
    bits = np.int64(word)
    return (bits & 0xFFFF) << 16 | bits >> 16 << 48


@functools.cache
def _arrange_task(dtype: torch.dtype, by_pairs: bool) -> int:  # noqa: FBT001
    """Address of the compiled task that comes before, for inputs of this dtype."""
    kind, word = KINDS[dtype], np.uint32 if dtype is torch.bfloat16 else np.int64
    widens = int(dtype is torch.bfloat16 and not by_pairs)

    def items(address: int) -> None:
        if widens:
            _arrange(long_pointer(address), kind, (word, np.int64), _two_floats)
        else:
            _arrange(long_pointer(address), kind, (word, word), _same)

    return threads.compile_task(items)


@long_kernel
def _run(addresses: Any, shape: Any, tasks: Any, n_threads: int) -> None:
    """shape: (n_rows, n_in, n_out, n_panels). tasks: (before, the product, bytes of an input in a tile)."""
    n_rows, n_in, _, n_panels = shape
    arrange, multiply, n_bytes = tasks
    tiles = np.empty((n_rows + 7) * n_in * n_bytes // 8, np.int64)
    sums = np.empty((n_rows + 7) * n_in // CHUNK * 3, np.float32)
    a = np.empty(NEXT + n_threads * SPREAD, np.int64)
    a[X], a[OUT], a[BIAS], a[SEGMENTS] = addresses
    a[N_ROWS], a[N_IN], a[N_OUT], a[N_PANELS] = shape
    a[TILES], a[SUMS], a[N_THREADS], a[ARRIVED] = tiles.ctypes.data, sums.ctypes.data, n_threads, 0
    threads.run(arrange, a.ctypes.data, n_threads if n_rows > 8 else 1)
    a[ARRIVED] = 0  # `_arrange` counted tiles with it
    for i in range(n_threads):
        a[NEXT + i * SPREAD] = n_panels * i // n_threads
    threads.run(multiply, a.ctypes.data, n_threads)
    tiles[:0], sums[:0], a[0] = 0, 0, 0  # keeps the memory alive until here
