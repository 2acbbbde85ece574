"""The steps of products with packed blocks as kernels call them; `unpack.py` has what they are.

Types, ways of products and numbers of rows are constants: each combination has instructions of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types
from numba.extending import intrinsic

from slipstream.kernels.compiled import constant
from slipstream.kernels.matmul import code_a8, code_bytes, code_floats, code_pairs, code_shorts
from slipstream.kernels.matmul.emit import LONG, PANEL, Emitter, Value, Way
from slipstream.kernels.matmul.formats import (
    CHUNK,
    LAYOUTS,
    OF_A8,
    OF_A8_SIGNED,
    OF_BYTES,
    OF_FLOATS,
    OF_PAIRS,
    OF_SIGNED,
    OF_TILES,
    OF_UNITS,
    BlockFormat,
)
from slipstream.kernels.matmul.unpack import (
    MOST_ROWS,
    Place,
    Tile,
    address_of,
    emit_end,
    emit_group,
    emit_laid,
    emit_tile,
    emit_values,
)
from slipstream.kernels.vector import WIDTH


def _always(way: Way) -> Callable[[BlockFormat, int], Way]:
    return lambda form, n_rows: way


# By the name of what products are of: how a type is multiplied with a tile of so many rows.
WAYS: dict[str, Callable[[BlockFormat, int], Way]] = {
    OF_FLOATS: _always(code_floats.WAY),
    OF_PAIRS: _always(code_pairs.WAY),
    OF_TILES: _always(code_pairs.WAY),
    OF_BYTES: _always(code_bytes.WAY if code_bytes.HAS_VNNI else code_shorts.WAY),
    OF_SIGNED: _always(code_bytes.SIGNED if code_bytes.HAS_VNNI else code_shorts.SIGNED),
    OF_UNITS: _always(code_bytes.UNITS),
    OF_A8: code_a8.way_of,
    OF_A8_SIGNED: code_a8.signed_way_of,
}
INPUT_BYTES = {OF_FLOATS: 4, OF_A8: code_a8.INPUT_BYTES}  # of an input in a tile, where it is not two


def _step(emit: Callable[..., None]) -> Callable[[Any, Any], None]:
    """An intrinsic of kernels, (operands, constants), for a function (builder, operands, *constants).

    operands: seven int64, as of `Place`, but the first record of the panel and which 32 inputs of the row; then the
    address of what is laid down, if the step has any.
    """

    def typed(typing: Any, operands: Any, constants: Any) -> Any:
        def generate(context: Any, builder: Emitter, signature: Any, values: Any) -> Any:
            emit(builder, values[0], *(one.literal_value for one in constants))
            return context.get_dummy_value()

        return types.void(operands, constants), generate

    made: Callable[[Any, Any], None] = intrinsic(prefer_literal=True)(typed)
    return made


def _placed(builder: Emitter, form: BlockFormat, operands: Value) -> Place:
    """The operands of a kernel's call, with the record that its chunk is in."""
    x, sums, records, chunk, first, totals, partial = (builder.extract_value(operands, i) for i in range(7))
    n_chunks = LONG(form.block // CHUNK)
    record = address_of(builder, records, 0, (builder.udiv(chunk, n_chunks), form.record_bytes))
    return Place(x, sums, record, builder.urem(chunk, n_chunks), first, totals, partial)


def _address(builder: Emitter, operands: Value) -> Value:
    return builder.extract_value(operands, 7)


@_step
def add_chunk(builder: Emitter, operands: Value, kind: str, n_rows: int, way: str) -> None:
    """Add 32 inputs to the totals of some rows, or to partial sums. How many outputs it takes: `columns_of`."""
    form = LAYOUTS[kind]
    found = WAYS[way](form, n_rows)
    tile = Tile(form, n_rows, *found.at_once(form, n_rows), found)
    emit_tile(builder, tile, _placed(builder, form, operands))


@_step
def add_laid(builder: Emitter, operands: Value, kind: str, n_rows: int, way: str) -> None:
    """The same with what codes stand for, laid down by `lay_chunk`. It is read anew for every four rows."""
    form = LAYOUTS[kind]
    found = WAYS[way](form, n_rows)
    tile = Tile(form, n_rows, *found.at_once(form, 4), found)
    emit_laid(builder, tile, _placed(builder, form, operands), _address(builder, operands))


@_step
def end_block(builder: Emitter, operands: Value, kind: str, n_rows: int) -> None:
    """Add the partial sums of the block that the chunk is in to the totals of 64 outputs."""
    form = LAYOUTS[kind]
    if form.is_nested:
        tile = Tile(form, n_rows, n_rows, PANEL // WIDTH, code_floats.WAY)
        emit_end(builder, tile, _placed(builder, form, operands))


@_step
def lay_chunk(builder: Emitter, operands: Value, kind: str, way: str) -> None:
    """Lay down what the codes of 32 inputs of 64 outputs stand for."""
    form = LAYOUTS[kind]
    tile = Tile(form, 1, 1, PANEL // WIDTH, WAYS[way](form, MOST_ROWS))
    emit_values(builder, tile, _placed(builder, form, operands), _address(builder, operands))


@_step
def scale_group(builder: Emitter, operands: Value, kind: str, n_rows: int, way: str, group: int) -> None:
    """Add the sums of a group of the chunk, which are laid down, to the totals of 16 outputs."""
    form = LAYOUTS[kind]
    tile = Tile(form, n_rows, n_rows, 1, WAYS[way](form, n_rows))
    emit_group(builder, tile, _placed(builder, form, operands), (group, _address(builder, operands)))


@constant
def columns_of(kind: str, n_rows: int, way: str) -> int:
    """Vectors of 16 outputs that `add_chunk` takes at once."""
    return WAYS[way](LAYOUTS[kind], n_rows).at_once(LAYOUTS[kind], n_rows)[1]


@constant
def bytes_of_input(way: str) -> int:
    """Bytes of an input as it lies in a tile."""
    return INPUT_BYTES.get(way, 2)


@constant
def group_of(kind: str) -> int:
    """Inputs that share a scale."""
    return LAYOUTS[kind].group


@constant
def laid_bytes(way: str) -> int:
    """Bytes of what the codes of 32 inputs and 64 outputs stand for: of the type that has most."""
    ways = (WAYS[way](form, MOST_ROWS) for form in LAYOUTS.values())
    return max(CHUNK // one.n_inputs * len(one.kinds) * PANEL * 4 for one in ways)
