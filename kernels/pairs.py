"""Pairs of bfloat16 in the lanes of a vector, and the sums of their products."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from slipstream.kernels.compiled import emits
from slipstream.kernels.cpu_features import features
from slipstream.kernels.vector import FLOATS, INTS, VECTOR, WIDTH, call_intrinsic, constant

HAS_PAIRS = "avx512bf16" in features()


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


BFLOATS = ir.VectorType(_BFloat(), 2 * WIDTH)


@emits(VECTOR)
def add_pairs(builder: ir.IRBuilder, total: Any, x: Any, y: Any) -> Any:
    """total + x₀y₀ + x₁y₁ per lane, where x and y hold two bfloat16 in every lane.

    One instruction on CPUs with avx512bf16; on others two fused multiply-adds in float32.
    """
    if not HAS_PAIRS:
        for half in (_first_half, _second_half):
            total = call_intrinsic(
                builder, "llvm.fma.v16f32", FLOATS, half(builder, x), half(builder, y), total
            )
        return total
    x, y = builder.bitcast(x, BFLOATS), builder.bitcast(y, BFLOATS)
    return call_intrinsic(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, total, x, y)


def _first_half(builder: ir.IRBuilder, pairs: Any) -> Any:
    return builder.bitcast(builder.shl(builder.bitcast(pairs, INTS), constant(16)), FLOATS)


def _second_half(builder: ir.IRBuilder, pairs: Any) -> Any:
    return builder.bitcast(builder.and_(builder.bitcast(pairs, INTS), constant(-65536)), FLOATS)
