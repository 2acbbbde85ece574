"""What the parts of a product with packed codes are emitted with: types of LLVM, loads, and marks for its scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from llvmlite import ir

from slipstream.kernels.matmul.formats import PANEL as PANEL
from slipstream.kernels.matmul.formats import BlockFormat
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
N_FIELDS = 7  # words for every 32 inputs of a row
LINE = 64  # bytes of a line of the cache, of a vector, and of 16 outputs' words
Emitter = Any  # an ir.IRBuilder
Value = Any  # of LLVM


class Row(NamedTuple):
    """A row of a tile."""

    index: int
    n_rows: int


class Fields(NamedTuple):
    """What is known of 32 inputs of one row, words: the sums of all, of the first 16 and of the others; then more."""

    address: Value
    row: Row
    which: int  # sums: 0 for those of all, 1 for the first half, 2 for the other

    def offset(self, field: int) -> int:
        """Bytes from the address to a field."""
        return (field * self.row.n_rows + self.row.index) * 4


@dataclass(frozen=True, slots=True)
class Way:
    """How codes are multiplied, a step at a time: some neighbouring inputs of 16 outputs.

    What codes of a step stand for is one or more vectors, as is a sum of 16 outputs before `floats` makes one of it.
    """

    n_inputs: int  # of a step
    kinds: list[Any]  # types of the vectors that codes of a step stand for
    # (a type, address of codes): what the codes of 32 inputs stand for, step by step
    codes: Callable[[Emitter, BlockFormat, Value], Iterator[list[Value]]]
    inputs: Callable[[Emitter, Value, int, Row], list[Value]]  # (address of a chunk, step, row)
    zeros: list[Value]  # a sum of nothing
    add: Callable[[Emitter, list[Value], list[Value], list[Value]], list[Value]]  # (sum, inputs, values)
    floats: Callable[[Emitter, BlockFormat, list[Value], Fields], Value]  # of the sum of a group
    # (a type, rows of a tile): the rows and vectors of 16 outputs that are taken at once, as many as fit the registers
    at_once: Callable[[BlockFormat, int], tuple[int, int]]
    ahead: int = 4096  # bytes between the records in use and those that are being fetched
    n_followed: int = (
        1  # rows of codes that are bytes up to which AMD's wide CPUs notice by themselves what is read next
    )


def all_rows(columns: dict[int, int]) -> Callable[[BlockFormat, int], tuple[int, int]]:
    """`Way.at_once` that takes all rows of a tile. columns: vectors of 16 outputs, by rows."""
    return lambda _, n_rows: (n_rows, columns[n_rows])


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
    if vector.type in (FLOATS, CODES):  # half of it fits a register of every CPU
        vector = lanes_of(builder, vector, list(range(vector.type.count // 2)))
    form = ir.FunctionType(LONG, [LONG, vector.type])
    return builder.asm(form, "", "=r,0,v", [address, vector], side_effect=False)


def all_of(value: float) -> Value:
    """The number in 16 lanes of float32."""
    return ir.Constant(FLOATS, [value] * WIDTH)


def as_it_is(builder: Emitter, form: BlockFormat, total: list[Value], fields: Fields) -> Value:
    """`Way.floats` where sums are float32."""
    return total[0]
