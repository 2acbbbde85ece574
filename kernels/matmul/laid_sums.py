"""Products with records where codes are laid down once for all rows: what `narrow_sums.py` does, the same bits.

`narrow_sums.py` unpacks codes again for every four rows, on CPUs of few registers, or eight. Here what they stand for
is written down, as much as the first cache holds, and read for all rows.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from slipstream.kernels import threads
from slipstream.kernels.compiled import inlined, long_pointer
from slipstream.kernels.matmul.arrange import FEW, N_IN, N_ROWS, tile_rows
from slipstream.kernels.matmul.block_steps import add_laid, columns_of, laid_bytes, lay_chunk
from slipstream.kernels.matmul.code_bytes import HAS_VNNI
from slipstream.kernels.matmul.formats import (
    CHUNK,
    LAYOUTS,
    OF_A8,
    OF_A8_SIGNED,
    OF_BYTES,
    OF_FLOATS,
    OF_SIGNED,
    OF_UNITS,
    PANEL,
    BlockFormat,
)
from slipstream.kernels.matmul.narrow_sums import (
    PARTIAL,
    PARTIAL_BYTES,
    RECORDS,
    TOTALS,
    VALUES,
    VISIT,
    add_blocks,
    add_span,
    end_chunk,
    inputs_at,
    part_of,
    share_of,
)
from slipstream.kernels.matmul.tile_sums import fetch_quarter
from slipstream.kernels.matmul.unpack import MOST_ROWS
from slipstream.kernels.vector import IS_WIDE, WIDTH

# Where it pays, what is laid down by what products are of. Of VNNI's bytes this was not measured.
LAID = {OF_UNITS: OF_UNITS} if IS_WIDE else {OF_FLOATS: OF_FLOATS, OF_BYTES: OF_SIGNED, OF_A8: OF_A8_SIGNED}
if HAS_VNNI:
    LAID = {way: laid for way, laid in LAID.items() if way not in (OF_BYTES, OF_A8)}


@functools.cache
def block_task(kind: str, way: str) -> int:
    """Address of what adds one panel's products with blocks of that type; way: one of LAID."""
    laid, fewest = LAID[way], _fewest(LAYOUTS[kind])

    def items(address: int) -> None:
        a = long_pointer(address)
        if a[N_ROWS] >= fewest:
            _add_blocks(a, (kind, way, laid))
        else:
            add_blocks(a, kind, way, MOST_ROWS)

    return threads.compile_task(items)


def _fewest(form: BlockFormat) -> int:
    """Rows for which it pays: more where a code is a few bits of a byte, and stands for a number as it is."""
    is_itself = form.values == tuple(range(int(form.values[0]), int(form.values[0]) + len(form.values)))
    return 33 if is_itself and form.bits in (2, 4) else 9


@inlined
def _add_blocks(a: Any, form: Any) -> None:
    """Add the products of 64 outputs to the totals. a: the arguments; form: (kind, way, of what is laid down)."""
    kind, way, laid = form
    n_rows, n_chunks = a[N_ROWS], a[N_IN] // CHUNK
    for begin in range(0, n_chunks, VISIT):
        span = begin, min(begin + VISIT, n_chunks)
        for chunk in range(span[0], span[1]):
            values = a[VALUES] + (chunk - begin) * laid_bytes(laid)
            lay_chunk((0, 0, a[RECORDS], chunk, 0, 0, 0, values), (kind, laid))
        row = np.int64(0)
        while row < n_rows:
            n = tile_rows(n_rows - row, 0)
            if MOST_ROWS == 8 and n == 8:
                _add_span(a, row, span, (form, 8))
            elif n == FEW:
                _add_span(a, row, span, (form, FEW))
            else:
                add_span(a, row, span, (kind, 1, way))
            row += n


@inlined
def _add_span(a: Any, row: int, span: Any, form: Any) -> None:
    """Some chunks of a tile of rows. form: (of `_add_blocks`, its rows)."""
    (kind, way, laid), n = form
    totals, share = a[TOTALS] + row * PANEL * 4, share_of(a, row, n, kind)
    partial, n_columns = a[PARTIAL] + row * PARTIAL_BYTES, columns_of((kind, FEW, laid))
    for chunk in range(span[0], span[1]):
        x, sums = inputs_at(a, (row, n), chunk, way)
        values = a[VALUES] + (chunk - span[0]) * laid_bytes(laid)
        ahead = part_of(share, a[RECORDS], (chunk, 0, 1))
        for column in range(0, PANEL // WIDTH, n_columns):
            at = x, sums, a[RECORDS], chunk, column * WIDTH, totals, partial, values
            add_laid(at, (kind, n, laid))
            for quarter in range(column, column + n_columns):
                fetch_quarter(ahead, quarter)
        end_chunk(a, (row, n), chunk, kind, partial)
