"""Inputs rounded to eight bits ("A8"), as llama.cpp rounds them, times codes as the bytes of `code_bytes.py`.

Of each 32 inputs the largest is 127 steps, and the others are the nearest whole numbers of steps. So an input is one
byte, not two, and the instruction for bytes multiplies twice as many at once. A group's sum is one of integers, exact,
then it is rounded to float32, once: the same bits by vectors of bytes, by shorts (CPUs without VNNI) and in AMX's
tiles.
"""

from __future__ import annotations

from dataclasses import replace

from llvmlite import ir
from numba import types

from slipstream.kernels.compiled import emits
from slipstream.kernels.matmul import code_bytes, code_shorts
from slipstream.kernels.matmul.code_bytes import (
    HAS_VNNI,
    UNIT,
    dot,
    field_of,
    floats_of,
    in_units,
    largest_of,
    store_bytes,
    store_shorts,
    whole_numbers,
)
from slipstream.kernels.matmul.emit import FLOAT, INT, Emitter, Fields, Row, Value, load_at, spread
from slipstream.kernels.matmul.formats import CHUNK, BlockFormat
from slipstream.kernels.vector import INTS, IS_WIDE, WIDTH, constant

MOST = 127  # steps of the largest input
INPUT_BYTES = 1 if HAS_VNNI else 2  # of an input as it lies in a tile
LEAST_EXPONENT = 32  # as bfloat16 has it, of what is largest: smaller inputs become fewer steps, or none


@emits(types.void)
def find_step(builder: Emitter, source: Value, fields: Value) -> None:
    """Write the step of 32 bfloat16 to the fields, as `code_bytes.find_unit` does a unit."""
    most, least = largest_of(builder, source), INT(LEAST_EXPONENT << 7)
    most = builder.select(builder.icmp_unsigned(">", most, least), most, least)
    largest = builder.bitcast(builder.shl(most, INT(16)), FLOAT)
    step = builder.fdiv(largest, ir.Constant(FLOAT, float(MOST)))
    is_number = builder.icmp_unsigned("<", most, INT(0x7F80))
    step = builder.select(is_number, step, ir.Constant(FLOAT, float("nan")))
    builder.store(step, field_of(builder, fields, UNIT))


@emits(types.void)
def lay_steps(builder: Emitter, source: Value, target: Value, fields: Value) -> None:
    """Make bytes [32] of 32 bfloat16, or shorts, and write their sums to the fields, which have the step."""
    for i, whole in enumerate(whole_numbers(builder, source, fields)):
        if HAS_VNNI:
            store_bytes(builder, whole, target, WIDTH * i)
        else:
            store_shorts(builder, whole, target, 2 * WIDTH * i)


def _inputs(builder: Emitter, x: Value, step: int, row: Row) -> list[Value]:
    """Four inputs in all lanes. x: bytes [n_rows, 32]."""
    return [spread(builder, load_at(builder, INT, x, row.index * CHUNK + step * 4), INTS)]


def _add(builder: Emitter, total: list[Value], inputs: list[Value], values: list[Value]) -> list[Value]:
    return [dot(builder, total[0], values[0], inputs[0])]


def _floats(builder: Emitter, form: BlockFormat, total: list[Value], fields: Fields) -> Value:
    return floats_of(builder, form, total[0], fields)


def _floats_of_signed(builder: Emitter, form: BlockFormat, total: list[Value], fields: Fields) -> Value:
    return in_units(builder, total[0], fields)


_COLUMNS = {8: 2, 4: 4, 1: 4} if IS_WIDE else {4: 2, 1: 1}


def _at_once(form: BlockFormat, n_rows: int) -> tuple[int, int]:
    """As of `code_bytes.py`: memory is read in its order where a code is a byte."""
    return (2, 4) if IS_WIDE and form.bits == 8 and n_rows > 1 else (n_rows, _COLUMNS[n_rows])


_BYTES = replace(
    code_bytes.WAY,
    inputs=_inputs,
    zeros=[constant(0)],
    add=_add,
    floats=_floats,
    at_once=_at_once,
    ahead=8192,
)
WAY = _BYTES if HAS_VNNI else code_shorts.WAY
SIGNED = replace(_BYTES, codes=code_bytes.SIGNED.codes, floats=_floats_of_signed)  # of AMX's tiles
