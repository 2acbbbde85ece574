"""Products of bfloat16 rows with the panels of `panel_sums.py` in the tiles of AMX, where the CPU has them.

Of 32 inputs the even ones are added from zero on, the odd ones too, in ascending order and each with one rounding; then
the two sums, and to the total what they make. Inputs behind the last 32 are added two at a time, as without tiles. So a
row's sums do not depend on the rows beside it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from slipstream.kernels.amx import HAS_TILES, configure, load, multiply, release, store
from slipstream.kernels.compiled import address_of, fetch_once, inlined, routine
from slipstream.kernels.matmul.formats import PANEL
from slipstream.kernels.matmul.panel_sums import BY_PAIRS, add_steps
from slipstream.kernels.pairs import add_pairs

TILE_ROWS = 16  # at most
# Rows up to which codes as bytes are multiplied sooner by the instruction for vectors than in tiles.
VECTOR_ROWS = 4
DEPTH = 32  # inputs of a tile
STEPS = DEPTH // 2  # of a panel
LINE = 64  # bytes: a tile's row, and a line of the cache
STEP_BYTES = PANEL * 4  # a panel's weights of two inputs; also 64 sums
TILE_BYTES = STEPS * STEP_BYTES  # of four tiles of weights, which lie side by side in a panel
# Times 32 inputs that all rows take before the next: their weights, 32 KiB, stay in the first cache.
VISIT = 8
AHEAD = 2 * TILE_BYTES  # bytes between the weights in use and those that are being fetched


@inlined
def begin(n_rows: int) -> None:
    """Shape the thread's tiles for so many rows."""
    configure(max(min(n_rows, TILE_ROWS), 1), np.int64(DEPTH))


@inlined
def end() -> None:
    """Give the tiles up."""
    release()


@inlined
def add_by_tiles(rows: Any, weight: Any, totals: Any) -> None:
    """Add the products of 64 outputs to the totals, [n_rows, 64] float32; between `begin` and `end`."""
    x, n_rows, n_steps = rows
    n, row_bytes = n_steps // STEPS, n_steps * 4
    whole, rest = n_rows // TILE_ROWS, n_rows % TILE_ROWS
    places = address_of(x), address_of(weight), address_of(totals)
    visit = VISIT if n_rows > TILE_ROWS else max(n, 1)
    for first in range(0, n, visit):
        # Every 16 rows fetch a share of the next weights, so that memory is neither idle nor in a rush.
        for i in range(whole):
            lines = STEPS * 4 * i // whole, STEPS * 4 * (i + 1) // whole
            ahead = AHEAD if whole == 1 else VISIT * TILE_BYTES
            _add_tile(
                _of_tile(places, i, row_bytes), row_bytes, (first, min(first + visit, n)), (ahead, lines)
            )
    if rest > 0:
        if whole > 0:
            configure(rest, np.int64(DEPTH))
        lines = 0, (STEPS * 4 if whole == 0 else 0)
        _add_tile(_of_tile(places, whole, row_bytes), row_bytes, (0, n), (AHEAD, lines))
        if whole > 0:
            configure(np.int64(TILE_ROWS), np.int64(DEPTH))
    if n * STEPS < n_steps:
        add_steps(rows, weight, n * STEPS, (totals, add_pairs))


@inlined
def _of_tile(places: Any, i: int, row_bytes: int) -> Any:
    """Addresses of inputs, weights and totals of the tile's rows."""
    x, weight, totals = places
    return x + i * TILE_ROWS * row_bytes, weight, totals + i * TILE_ROWS * STEP_BYTES


@routine
def _add_tile(places: Any, row_bytes: int, span: Any, fetch: Any) -> None:
    """Some times 32 inputs of a tile's rows. fetch: (how far ahead, which lines of each four tiles of weights)."""
    x, weight, totals = places
    ahead, lines = fetch
    load(0, totals, STEP_BYTES)
    load(1, totals + LINE, STEP_BYTES)
    load(2, totals + 2 * LINE, STEP_BYTES)
    load(3, totals + 3 * LINE, STEP_BYTES)
    for k in range(span[0], span[1]):
        w = weight + k * TILE_BYTES
        add_products(x + k * LINE, row_bytes, w, (w + ahead, lines))
    store_sums(totals)


@inlined
def add_products(x: int, row_bytes: int, weights: int, fetch: Any) -> None:
    """Add a tile of inputs times four of weights, side by side as in a panel, to the tiles of sums; all are addresses.

    fetch: (where, (first, end)), lines of the cache to bring nearer meanwhile.
    """
    add_first_half(x, row_bytes, weights, (fetch, multiply))
    add_other_half(weights, (fetch, multiply))


@inlined
def add_first_half(x: int, row_bytes: int, weights: int, form: Any) -> None:
    """The same of two tiles of weights. form: (fetch, what multiplies tiles)."""
    fetch, multiply_tiles = form
    load(4, x, row_bytes)
    fetch_quarter(fetch, 0)
    load(5, weights, STEP_BYTES)
    multiply_tiles(0, 5)
    fetch_quarter(fetch, 1)
    load(6, weights + LINE, STEP_BYTES)
    multiply_tiles(1, 6)


@inlined
def add_other_half(weights: int, form: Any) -> None:
    """The same of the other two, with the inputs that are in their tile."""
    fetch, multiply_tiles = form
    fetch_quarter(fetch, 2)
    load(7, weights + 2 * LINE, STEP_BYTES)
    multiply_tiles(2, 7)
    fetch_quarter(fetch, 3)
    load(5, weights + 3 * LINE, STEP_BYTES)
    multiply_tiles(3, 5)


@inlined
def store_sums(sums: int) -> None:
    """Write the tiles of sums to that address, [n_rows, 64] float32."""
    store(0, sums, STEP_BYTES)
    store(1, sums + LINE, STEP_BYTES)
    store(2, sums + 2 * LINE, STEP_BYTES)
    store(3, sums + 3 * LINE, STEP_BYTES)


@inlined
def fetch_quarter(fetch: Any, which: int) -> None:
    """Bring a quarter of some lines nearer. fetch: (where, (first, end))."""
    where, (line, last) = fetch
    quarter = (last - line + 3) // 4
    for i in range(line + which * quarter, min(line + (which + 1) * quarter, last)):
        fetch_once(where + i * LINE)


BY_TILES = 2, begin, add_by_tiles, end
BY_TWOS = BY_TILES if HAS_TILES else BY_PAIRS  # how products of bfloat16 are added here
