"""AMX, the matrix unit of Intel's CPUs since Sapphire Rapids: its instructions, for kernels.

A thread has eight tiles, registers of at most 16 rows of 64 bytes. Here tiles 0 to 3 are sums, float32 [n_rows, 16]; 4
is of inputs, bfloat16 [n_rows, depth]; 5 to 7 of weights, [depth / 2, 16, 2]: two neighbouring inputs of 16 outputs in
each row, as they lie in a panel. Or sums are int32, inputs bytes, of twice as many inputs, and weights four in a row of
each output. Tiles are named by constants. Between `configure` and `release` a thread may use them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from slipstream.kernels.compiled import emits
from slipstream.kernels.cpu_features import TILES, features

HAS_TILES = features() >= TILES  # whether threads of this process may use tiles
INPUTS = 4  # number of the tile
BYTE, INT, LONG = ir.IntType(8), ir.IntType(32), ir.IntType(64)


def _emit(builder: ir.IRBuilder, name: str, *values: Any) -> None:
    """Call LLVM's intrinsic of that name."""
    name = f"llvm.x86.{name}"
    form = ir.FunctionType(ir.VoidType(), [value.type for value in values])
    builder.call(builder.module.globals.get(name) or ir.Function(builder.module, form, name), values)


@emits(types.void)
def configure(builder: ir.IRBuilder, n_rows: Any, depth: Any) -> None:
    """Shape the tiles: rows of inputs and sums, 1 to 16, and depth, 16 or 32 inputs. All are zero then.

    The instruction reads 64 bytes: from the 16th on two of each tile, a row's bytes; from the 48th one, its rows.
    """
    memory = cgutils.alloca_once(builder, ir.ArrayType(LONG, 8))
    whole_rows = 64 * (1 << 16 | 1 << 32 | 1 << 48)
    of_weights = builder.mul(builder.lshr(depth, LONG(1)), LONG(0x01_01_01 << 40))
    n_bytes = LONG(whole_rows | 64), builder.or_(builder.shl(depth, LONG(1)), LONG(whole_rows))
    rows = builder.or_(builder.mul(n_rows, LONG(0x01_01_01_01_01)), of_weights)
    for i, word in enumerate((LONG(1), LONG(0), *n_bytes, LONG(0), LONG(0), rows, LONG(0))):
        builder.store(word, builder.gep(memory, [INT(0), INT(i)]))
    _emit(builder, "ldtilecfg", builder.bitcast(memory, BYTE.as_pointer()))


@emits(types.void)
def release(builder: ir.IRBuilder) -> None:
    """Give the tiles up, so that the thread's state is small again."""
    _emit(builder, "tilerelease")


def _moves(name: str) -> Callable[..., Any]:
    """(tile, address, stride): between a tile and memory, where a row begins `stride` bytes behind the one before."""

    def move(typing: Any, tile: Any, address: Any, stride: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            place = builder.inttoptr(values[1], BYTE.as_pointer())
            _emit(builder, name, BYTE(tile.literal_value), place, values[2])
            return context.get_dummy_value()

        return types.void(tile, types.int64, types.int64), generate

    return move


def _zero(typing: Any, tile: Any) -> Any:
    """(tile): all its elements are zero."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        _emit(builder, "tilezero", BYTE(tile.literal_value))
        return context.get_dummy_value()

    return types.void(tile), generate


def _multiplies(name: str) -> Callable[..., Any]:
    """(sums, weights) adds the inputs' products."""

    def multiply(typing: Any, sums: Any, weights: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            _emit(builder, name, BYTE(sums.literal_value), BYTE(INPUTS), BYTE(weights.literal_value))
            return context.get_dummy_value()

        return types.void(sums, weights), generate

    return multiply


zero: Callable[[int], None] = intrinsic(prefer_literal=True)(_zero)
load: Callable[[int, int, int], None] = intrinsic(prefer_literal=True)(_moves("tileloadd64"))
store: Callable[[int, int, int], None] = intrinsic(prefer_literal=True)(_moves("tilestored64"))
# Of even inputs from zero on, of odd ones too, then both to the sum.
multiply: Callable[[int, int], None] = intrinsic(prefer_literal=True)(_multiplies("tdpbf16ps"))
# Of signed bytes, to int32.
multiply_signed: Callable[[int, int], None] = intrinsic(prefer_literal=True)(_multiplies("tdpbssd"))
