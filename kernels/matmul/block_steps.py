"""The steps of products with packed blocks as kernels call them; `unpack.py` has what they are.

Types, ways of products and numbers of rows are constants: each combination has instructions of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types
from numba.extending import intrinsic

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


def _placed(builder: Emitter, form: BlockFormat, operands: Value) -> Place:
    """The operands of a kernel's call, with the record that its chunk is in."""
    x, sums, records, chunk, first, totals, partial = (builder.extract_value(operands, i) for i in range(7))
    n_chunks = LONG(form.block // CHUNK)
    record = address_of(builder, records, 0, (builder.udiv(chunk, n_chunks), form.record_bytes))
    return Place(x, sums, record, builder.urem(chunk, n_chunks), first, totals, partial)


def _add_chunk(typing: Any, place: Any, kind: Any, n_rows: Any, way: Any) -> Any:
    """(place: seven int64, kind, rows, way) adds 32 inputs to the totals of some rows, or to partial sums.

    place: as of `Place`, but the first record of the panel and which 32 inputs of the row. kind, n_rows and way are
    constants. How many outputs a call takes is in `Way.at_once`.
    """

    def generate(context: Any, builder: Emitter, signature: Any, values: Any) -> Any:
        form, rows = LAYOUTS[kind.literal_value], n_rows.literal_value
        found = WAYS[way.literal_value](form, rows)
        tile = Tile(form, rows, *found.at_once(form, rows), found)
        emit_tile(builder, tile, _placed(builder, form, values[0]))
        return context.get_dummy_value()

    return types.void(place, kind, n_rows, way), generate


def _add_laid(typing: Any, place: Any, kind: Any, n_rows: Any, way: Any, values: Any) -> Any:
    """(place, kind, rows, way, address) does the same with what codes stand for, laid down by `lay_chunk`.

    It is read anew for every four rows.
    """

    def generate(context: Any, builder: Emitter, signature: Any, given: Any) -> Any:
        form, rows = LAYOUTS[kind.literal_value], n_rows.literal_value
        found = WAYS[way.literal_value](form, rows)
        tile = Tile(form, rows, *found.at_once(form, 4), found)
        emit_laid(builder, tile, _placed(builder, form, given[0]), given[4])
        return context.get_dummy_value()

    return types.void(place, kind, n_rows, way, types.int64), generate


def _constant(find: Callable[..., int]) -> Callable[..., Any]:
    """An intrinsic of what a function finds for constants, as a number: it costs no compilation of its own."""

    def of_one(typing: Any, a: Any) -> Any:
        return types.int64(a), lambda context, builder, signature, values: LONG(find(a.literal_value))

    def of_three(typing: Any, a: Any, b: Any, c: Any) -> Any:
        found = find(a.literal_value, b.literal_value, c.literal_value)
        return types.int64(a, b, c), lambda context, builder, signature, values: LONG(found)

    return of_one if find.__code__.co_argcount == 1 else of_three


def _end_block(typing: Any, place: Any, kind: Any, n_rows: Any) -> Any:
    """(place, kind, rows) adds the partial sums of the block that the chunk is in to the totals of 64 outputs."""

    def generate(context: Any, builder: Emitter, signature: Any, values: Any) -> Any:
        form = LAYOUTS[kind.literal_value]
        if form.is_nested:
            rows = n_rows.literal_value
            tile = Tile(form, rows, rows, PANEL // WIDTH, code_floats.WAY)
            emit_end(builder, tile, _placed(builder, form, values[0]))
        return context.get_dummy_value()

    return types.void(place, kind, n_rows), generate


def _lay_chunk(typing: Any, place: Any, kind: Any, way: Any, target: Any) -> Any:
    """(place, kind, way, address) lays down 32 inputs of 64 outputs."""

    def generate(context: Any, builder: Emitter, signature: Any, values: Any) -> Any:
        form = LAYOUTS[kind.literal_value]
        tile = Tile(form, 1, 1, PANEL // WIDTH, WAYS[way.literal_value](form, MOST_ROWS))
        emit_values(builder, tile, _placed(builder, form, values[0]), values[3])
        return context.get_dummy_value()

    return types.void(place, kind, way, types.int64), generate


def _laid_bytes(way: Way) -> int:
    return CHUNK // way.n_inputs * len(way.kinds) * PANEL * 4


def _scale_group(typing: Any, place: Any, form: Any, found: Any) -> Any:
    """(place, (kind, rows, way, group of the chunk), address of its sums) adds them for 16 outputs."""

    def generate(context: Any, builder: Emitter, signature: Any, values: Any) -> Any:
        kind, n_rows, way, group = (one.literal_value for one in form)
        tile = Tile(LAYOUTS[kind], n_rows, n_rows, 1, WAYS[way](LAYOUTS[kind], n_rows))
        emit_group(builder, tile, _placed(builder, LAYOUTS[kind], values[0]), (group, values[2]))
        return context.get_dummy_value()

    return types.void(place, form, types.int64), generate


lay_chunk: Callable[[Any, Any, Any, Any], None] = intrinsic(prefer_literal=True)(_lay_chunk)
scale_group: Callable[[Any, Any, Any], None] = intrinsic(prefer_literal=True)(_scale_group)
add_chunk: Callable[[Any, Any, Any, Any], None] = intrinsic(prefer_literal=True)(_add_chunk)
add_laid: Callable[[Any, Any, Any, Any, Any], None] = intrinsic(prefer_literal=True)(_add_laid)
end_block: Callable[[Any, Any, Any], None] = intrinsic(prefer_literal=True)(_end_block)
# Vectors of 16 outputs that `add_chunk` takes at once, by (type, rows of the tile, way).
columns_of: Callable[[str, int, str], int] = intrinsic(prefer_literal=True)(
    _constant(lambda kind, n_rows, way: WAYS[way](LAYOUTS[kind], n_rows).at_once(LAYOUTS[kind], n_rows)[1])
)
# Bytes of an input as it lies in a tile, by way.
bytes_of_input: Callable[[str], int] = intrinsic(prefer_literal=True)(
    _constant(lambda way: INPUT_BYTES.get(way, 2))
)
# Inputs that share a scale, by type.
group_of: Callable[[str], int] = intrinsic(prefer_literal=True)(_constant(lambda kind: LAYOUTS[kind].group))
# Bytes of what the codes of 32 inputs and 64 outputs stand for, by way: of the type that has most.
laid_bytes: Callable[[str], int] = intrinsic(prefer_literal=True)(
    _constant(lambda way: max(_laid_bytes(WAYS[way](form, MOST_ROWS)) for form in LAYOUTS.values()))
)
