"""Codes of fp8 as pairs of bfloat16, looked up by AVX-512, for its instruction that adds two products at once."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from llvmlite import ir

from slipstream.kernels.cpu_features import is_amd, missing
from slipstream.kernels.matmul.emit import (
    CODES,
    INT,
    PAIRS,
    PANEL,
    Emitter,
    Row,
    Value,
    Way,
    after,
    all_of,
    all_rows,
    as_it_is,
    load_at,
    spread,
)
from slipstream.kernels.matmul.formats import CHUNK, BlockFormat
from slipstream.kernels.pairs import BFLOATS
from slipstream.kernels.vector import FLOATS, INTS, WIDTH, call_intrinsic

FEATURES = ("avx512bf16", "avx512bw", "avx512vbmi")  # of the CPU
# Whether pairs are added as fast as bytes: AMD's CPUs add them every cycle, Intel's every second one.
IS_QUICK = is_amd() and not missing(FEATURES)


def bfloat_bits(value: float) -> int:
    """Bits of a number of at most eight binary digits as bfloat16: it is exact."""
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0] >> 16
    return bits


def _pairs(builder: Emitter, form: BlockFormat, words: Value) -> Iterator[list[Value]]:
    """Values of 16 outputs and 32 inputs, two neighbouring inputs at a time, as pairs of bfloat16: 16 times a vector.

    Codes are sign and magnitude in eight bits: both bytes of the magnitude by lookup, then the sign, two steps at once.
    words: the address of their first word.
    """
    table = [bfloat_bits(value) for value in form.values[:128]]
    upper = [i + j + 64 * k for i in (0, 16, 32, 48) for j in range(8) for k in (0, 1)]
    for step in range(0, CHUNK // 2, 2):
        codes = load_at(builder, CODES, words, step // 2 * PANEL * 4)
        low, high = (_byte_of(builder, [bits >> shift & 255 for bits in table], codes) for shift in (0, 8))
        sign = builder.and_(codes, ir.Constant(CODES, [128] * 4 * WIDTH))
        high = builder.or_(high, sign)
        for lanes in (upper, [lane + 8 for lane in upper]):
            mask = ir.Constant(ir.VectorType(INT, 4 * WIDTH), lanes)
            pair = builder.bitcast(builder.shuffle_vector(low, high, mask), PAIRS)
            yield [builder.bitcast(pair, BFLOATS)]
        words = after(
            builder, words, pair
        )  # else compilers look all codes up at once and run out of registers


def _byte_of(builder: Emitter, table: list[int], codes: Value) -> Value:
    """The byte that the lowest seven bits of each byte stand for."""
    halves = (ir.Constant(CODES, part) for part in (table[:64], table[64:]))
    first, second = halves
    return call_intrinsic(builder, "llvm.x86.avx512.vpermi2var.qi.512", CODES, first, codes, second)


def _inputs(builder: Emitter, x: Value, step: int, row: Row) -> list[Value]:
    """Two inputs in all lanes. x: pairs of bfloat16 [16 steps, n_rows]."""
    two = load_at(builder, INT, x, (step * row.n_rows + row.index) * 4)
    return [builder.bitcast(spread(builder, two, INTS), BFLOATS)]


def _add(builder: Emitter, total: list[Value], inputs: list[Value], values: list[Value]) -> list[Value]:
    """total + x₀w₀ + x₁w₁, as the instruction adds them."""
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    return [call_intrinsic(builder, name, FLOATS, total[0], inputs[0], values[0])]


WAY = Way(2, [BFLOATS], _pairs, _inputs, [all_of(0.0)], _add, as_it_is, all_rows({8: 2, 4: 4, 1: 4}))
