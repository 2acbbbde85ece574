"""What the parts of a product with packed codes are emitted with: types of LLVM, loads, and marks for its scheduler."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from slipstream.kernels.matmul.formats import PANEL as PANEL
from slipstream.kernels.vector import BYTES, FLOATS, WIDTH

BYTE, SHORT, INT, LONG, FLOAT = (
    ir.IntType(8),
    ir.IntType(16),
    ir.IntType(32),
    ir.IntType(64),
    ir.FloatType(),
)
PAIRS = ir.VectorType(SHORT, 2 * WIDTH)  # bits of two bfloat16, or of two words of codes, in each lane
CODES = ir.VectorType(BYTE, 4 * WIDTH)
LINE = 64  # bytes of a line of the cache, of a vector, and of 16 outputs' words
Emitter = Any  # an ir.IRBuilder
Value = Any  # of LLVM


def load_at(builder: Emitter, kind: Any, address: Value, offset: int = 0) -> Value:
    """A value of that type, `offset` bytes behind the address."""
    place = builder.inttoptr(builder.add(address, LONG(offset)), kind.as_pointer())
    return builder.load(place, align=1 if kind in (BYTE, BYTES, CODES) else 2)


def spread(builder: Emitter, scalar: Value, kind: Any) -> Value:
    """The scalar in all lanes."""
    none = ir.Constant(kind, ir.Undefined)
    one = builder.insert_element(none, scalar, INT(0))
    return builder.shuffle_vector(one, none, ir.Constant(ir.VectorType(INT, kind.count), [0] * kind.count))


def lanes_of(builder: Emitter, vector: Value, lanes: list[int]) -> Value:
    """Some lanes of a vector, in that order."""
    none = ir.Constant(vector.type, ir.Undefined)
    return builder.shuffle_vector(vector, none, ir.Constant(ir.VectorType(INT, len(lanes)), lanes))


def shorts(values: list[int]) -> Value:
    return ir.Constant(PAIRS, values)


def after(builder: Emitter, address: Value, vector: Value) -> Value:
    """The address, which the compiler takes to depend on the vector: it moves no use of it to before that."""
    if vector.type == FLOATS:  # half of it fits a register of every CPU
        vector = lanes_of(builder, vector, list(range(WIDTH // 2)))
    form = ir.FunctionType(LONG, [LONG, vector.type])
    return builder.asm(form, "", "=r,0,v", [address, vector], side_effect=False)
