"""Sixteen float32 in one variable, for kernels: loads, arithmetic (+, -, *, / and more), reductions in a fixed order.

LLVM splits a vector where the machine's are narrower; the bits of a result do not change. Pointers are to float32,
to bfloat16 (uint16) or to float8_e4m3fn (uint8): loads widen, stores round to the nearest, ties to even. What is
beyond the 448 of float8 is stored as that.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.datamodel import models
from numba.core.datamodel.registry import register_default
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature

from slipstream.kernels.compiled import emits, inlined
from slipstream.kernels.cpu_features import features

IS_WIDE = "avx512f" in features()  # 32 registers of 16 floats, not 16 of 8
# One instruction loads or stores some lanes, whatever their size.
HAS_MASKS = features() >= {"avx512bw", "avx512vl"}
WIDTH = 16
FLOATS = ir.VectorType(ir.FloatType(), WIDTH)
INTS = ir.VectorType(ir.IntType(32), WIDTH)
SHORTS = ir.VectorType(ir.IntType(16), WIDTH)
BYTES = ir.VectorType(ir.IntType(8), WIDTH)
OF_BITS = {8: BYTES, 16: SHORTS}  # by bits of an integer element; other elements are float32
NAMES = {FLOATS: "f32", INTS: "i32", SHORTS: "i16", BYTES: "i8"}  # LLVM's, of an element
ALIGNMENTS = {FLOATS: 4, INTS: 2, SHORTS: 2, BYTES: 1}  # bytes; 32 bits may be a pair of bfloat16


class Vector(types.Type):
    """numba's name for <16 x float>."""

    def __init__(self) -> None:
        super().__init__("vector of 16 float32")


@register_default(Vector)
class VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, front_end: Any) -> None:
        super().__init__(manager, front_end, FLOATS)  # type: ignore[no-untyped-call]


VECTOR = Vector()


def constant(value: int) -> Any:
    return ir.Constant(INTS, [value] * WIDTH)


def _spread(builder: ir.IRBuilder, scalar: Any) -> Any:
    kind = ir.VectorType(scalar.type, WIDTH)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(INTS, [0] * WIDTH))


def lanes_below(builder: ir.IRBuilder, count: Any) -> Any:
    count = builder.trunc(count, ir.IntType(32)) if count.type.width > 32 else count
    return builder.icmp_signed("<", ir.Constant(INTS, list(range(WIDTH))), _spread(builder, count))


def widen(builder: ir.IRBuilder, value: Any) -> Any:
    """float32 of what was loaded: bfloat16, float8 or float32 itself."""
    if value.type == BYTES:
        return _widen_fp8(builder, value)
    if value.type == SHORTS:
        return builder.bitcast(builder.shl(builder.zext(value, INTS), constant(16)), FLOATS)
    return value


def _widen_fp8(builder: ir.IRBuilder, codes: Any) -> Any:
    """Four bits of exponent (bias 7) and three of mantissa; all ones is NaN, there is no infinity."""
    bits = builder.zext(codes, INTS)
    sign = builder.shl(builder.and_(bits, constant(0x80)), constant(24))
    rest = builder.and_(bits, constant(0x7F))
    normal = builder.add(builder.shl(rest, constant(20)), constant((127 - 7) << 23))
    tiny = builder.fmul(builder.sitofp(rest, FLOATS), ir.Constant(FLOATS, [2.0**-9] * WIDTH))
    size = builder.select(builder.icmp_signed("<", rest, constant(8)), builder.bitcast(tiny, INTS), normal)
    size = builder.select(builder.icmp_signed("==", rest, constant(0x7F)), constant(0x7FC00000), size)
    return builder.bitcast(builder.or_(size, sign), FLOATS)


def narrow_fp8(builder: ir.IRBuilder, floats: Any) -> Any:
    """float8_e4m3fn bits, nearest even, at most 448; a NaN stays one."""
    bits = builder.bitcast(floats, INTS)
    sign = builder.and_(builder.lshr(bits, constant(24)), constant(0x80))
    size = builder.and_(bits, constant(0x7FFFFFFF))
    most = constant(0x43E00000)  # 448
    kept = builder.select(builder.icmp_signed(">", size, most), most, size)
    odd = builder.and_(builder.lshr(kept, constant(20)), constant(1))
    normal = builder.lshr(builder.add(kept, builder.add(odd, constant(0x7FFFF))), constant(20))
    normal = builder.sub(normal, constant((127 - 7) << 3))
    # Below 2^-6 the steps are 2^-9, as those of float32 are beside 2^14: the addition rounds.
    beside = builder.fadd(builder.bitcast(kept, FLOATS), ir.Constant(FLOATS, [2.0**14] * WIDTH))
    tiny = builder.sub(builder.bitcast(beside, INTS), constant(0x46800000))
    code = builder.select(builder.icmp_signed("<", kept, constant(0x3C800000)), tiny, normal)
    nan = builder.icmp_signed(">", size, constant(0x7F800000))
    code = builder.select(nan, constant(0x7F), code)
    return builder.trunc(builder.or_(code, sign), BYTES)


def fitted(builder: ir.IRBuilder, value: Any, kind: Any) -> Any:
    """float32 as a vector of that kind."""
    return {BYTES: narrow_fp8, SHORTS: narrow}.get(kind, lambda _, same: same)(builder, value)


def narrow(builder: ir.IRBuilder, floats: Any) -> Any:
    """bfloat16 bits, nearest even; a NaN stays one."""
    bits = builder.bitcast(floats, INTS)
    odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, constant(0x7FFF))), constant(16))
    nan = builder.or_(builder.lshr(bits, constant(16)), constant(0x40))
    return builder.trunc(builder.select(builder.fcmp_unordered("uno", floats, floats), nan, rounded), SHORTS)


def call_intrinsic(builder: ir.IRBuilder, name: str, result: Any, *values: Any) -> Any:
    function_type = ir.FunctionType(result, [value.type for value in values])
    module = builder.module
    function = module.globals.get(name) or ir.Function(module, function_type, name)
    return builder.call(function, values)


def kind_of(pointer: Any) -> Any:
    """Vector of the elements it points to."""
    return OF_BITS.get(getattr(pointer.type.pointee, "width", 0), FLOATS)


def at_element(builder: ir.IRBuilder, pointer: Any, index: Any) -> Any:
    """Pointer to the vector that begins with that element."""
    return builder.bitcast(builder.gep(pointer, [index]), kind_of(pointer).as_pointer())


def load_vector(builder: ir.IRBuilder, place: Any, count: Any = None) -> Any:
    """What lies at a pointer to a vector; with a count, the lanes below it, and 0 in the others."""
    kind = place.type.pointee
    if count is None:
        return builder.load(place, align=ALIGNMENTS[kind])
    if HAS_MASKS:
        return _load_lanes(builder, place, count)
    with builder.if_else(_is_whole(builder, count)) as (whole, part):
        with whole:
            found = [(load_vector(builder, place), builder.block)]
        with part:
            found.append((_load_lanes(builder, place, count), builder.block))
    loaded = builder.phi(kind)
    for value, block in found:
        loaded.add_incoming(value, block)
    return loaded


def _load_lanes(builder: ir.IRBuilder, place: Any, count: Any) -> Any:
    kind = place.type.pointee
    align, zero = ir.Constant(ir.IntType(32), ALIGNMENTS[kind]), ir.Constant(kind, None)
    name = f"llvm.masked.load.v16{NAMES[kind]}.p0"
    return call_intrinsic(builder, name, kind, place, align, lanes_below(builder, count), zero)


def store_lanes(builder: ir.IRBuilder, place: Any, value: Any, count: Any) -> None:
    """Write the lanes below `count` to a pointer to a vector of that kind."""
    if HAS_MASKS:
        _store_lanes(builder, place, value, count)
        return
    with builder.if_else(_is_whole(builder, count)) as (whole, part):
        with whole:
            builder.store(value, place, align=ALIGNMENTS[value.type])
        with part:
            _store_lanes(builder, place, value, count)


def _store_lanes(builder: ir.IRBuilder, place: Any, value: Any, count: Any) -> None:
    align = ir.Constant(ir.IntType(32), ALIGNMENTS[value.type])
    name = f"llvm.masked.store.v16{NAMES[value.type]}.p0"
    call_intrinsic(builder, name, ir.VoidType(), value, place, align, lanes_below(builder, count))


def _is_whole(builder: ir.IRBuilder, count: Any) -> Any:
    """Whether no lane is left out: such vectors take a branch where masks are slow.

    AVX2 has none for 16 bits and fewer, so each lane is a branch of its own; AMD's stores by a mask are microcode.
    """
    return builder.icmp_signed(">=", count, ir.Constant(count.type, WIDTH))


@emits(VECTOR)
def load(builder: ir.IRBuilder, pointer: Any, index: Any) -> Any:
    """Elements index … index + 15."""
    return widen(builder, load_vector(builder, at_element(builder, pointer, index)))


@emits(VECTOR)
def load_part(builder: ir.IRBuilder, pointer: Any, index: Any, count: Any) -> Any:
    """The first `count` elements from index on, 0 in the other lanes."""
    return widen(builder, load_vector(builder, at_element(builder, pointer, index), count))


@emits(types.void)
def store(builder: ir.IRBuilder, pointer: Any, index: Any, value: Any) -> None:
    """Write elements index … index + 15."""
    kind = kind_of(pointer)
    place = at_element(builder, pointer, index)
    builder.store(fitted(builder, value, kind), place, align=ALIGNMENTS[kind])


@emits(types.void)
def store_part(builder: ir.IRBuilder, pointer: Any, index: Any, value: Any, count: Any) -> None:
    """Write the first `count` lanes from element `index` on."""
    place = at_element(builder, pointer, index)
    store_lanes(builder, place, fitted(builder, value, kind_of(pointer)), count)


@emits(VECTOR)
def splat(builder: ir.IRBuilder, scalar: Any) -> Any:
    """float32 in all lanes."""
    return _spread(builder, scalar)


@emits(VECTOR)
def fma(builder: ir.IRBuilder, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    return call_intrinsic(builder, "llvm.fma.v16f32", FLOATS, a, b, c)


def _operator(symbol: Any, instruction: str) -> None:
    """Let kernels write that operator between two vectors: LLVM's instruction, per lane."""
    case = signature(VECTOR, VECTOR, VECTOR)
    infer_global(symbol)(type("Lanes", (ConcreteTemplate,), {"cases": [case]}))
    lower_builtin(symbol, VECTOR, VECTOR)(
        lambda context, builder, case, values: getattr(builder, instruction)(*values)
    )


_operator(operator.add, "fadd")
_operator(operator.sub, "fsub")
_operator(operator.mul, "fmul")
_operator(operator.truediv, "fdiv")


@emits(VECTOR)
def larger(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    """The larger per lane; b where either is NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@emits(VECTOR)
def smaller(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    """The smaller per lane; b where either is NaN."""
    return builder.select(builder.fcmp_ordered("<", a, b), a, b)


@emits(VECTOR)
def floor(builder: ir.IRBuilder, a: Any) -> Any:
    return call_intrinsic(builder, "llvm.floor.v16f32", FLOATS, a)


@emits(VECTOR)
def power_of_whole(builder: ir.IRBuilder, whole: Any) -> Any:
    """2**n per lane for whole numbers n in [-126, 127]."""
    exponent = builder.add(builder.fptosi(whole, INTS), constant(127))
    return builder.bitcast(builder.shl(exponent, constant(23)), FLOATS)


@emits(types.float32)
def first_lane(builder: ir.IRBuilder, value: Any) -> Any:
    return builder.extract_element(value, ir.Constant(ir.IntType(32), 0))


@emits(types.void)
def store_whole(builder: ir.IRBuilder, pointer: Any, index: Any, value: Any) -> None:
    """Write 16 lanes, rounded towards zero, to a pointer to int32."""
    place = builder.bitcast(builder.gep(pointer, [index]), INTS.as_pointer())
    builder.store(builder.fptosi(value, INTS), place, align=4)


def _mask(builder: ir.IRBuilder, bits: Any) -> Any:
    return builder.zext(builder.bitcast(bits, ir.IntType(WIDTH)), ir.IntType(64))


@emits(types.int64)
def at_least(builder: ir.IRBuilder, a: Any, b: Any) -> Any:
    """Bit i is set where lane i of a is at least that of b."""
    return _mask(builder, builder.fcmp_ordered(">=", a, b))


@emits(VECTOR)
def load_inverted(builder: ir.IRBuilder, pointer: Any, index: Any) -> Any:
    """0xFFFFFFFF - word, rounded to float32, for 16 unsigned words; pointer to int32."""
    place = builder.bitcast(builder.gep(pointer, [index]), INTS.as_pointer())
    return builder.uitofp(builder.not_(builder.load(place, align=4)), FLOATS)


@emits(types.int64)
def lowest_bit(builder: ir.IRBuilder, mask: Any) -> Any:
    """Index of the lowest set bit of a mask that is not 0."""
    long = ir.IntType(64)
    return call_intrinsic(builder, "llvm.cttz.i64", long, mask, ir.Constant(ir.IntType(1), 1))


@emits(VECTOR)
def keep_below(builder: ir.IRBuilder, count: Any, value: Any, otherwise: Any) -> Any:
    """`value` in lanes 0 … count - 1, `otherwise` in the rest. count may be negative or above 16."""
    return builder.select(lanes_below(builder, count), value, otherwise)


@emits(VECTOR)
def rounded(builder: ir.IRBuilder, value: Any, like: Any) -> Any:
    """As it would be read back after a store through a pointer of that kind."""
    return widen(builder, fitted(builder, value, kind_of(like)))


@emits(VECTOR)
def power_of_two(builder: ir.IRBuilder, magic: Any) -> Any:
    """2**n per lane, where n was added to MAGIC of `exponential.py`."""
    exponent = builder.shl(builder.bitcast(magic, INTS), constant(23))
    return builder.bitcast(builder.add(exponent, constant(127 << 23)), FLOATS)


@emits(VECTOR)
def rounded_before(builder: ir.IRBuilder, value: Any, like: Any, target: Any) -> Any:
    """Rounded to the kind of `like`, unless the store to `target` will do just that."""
    if like.type.pointee == target.type.pointee:
        return value
    return widen(builder, fitted(builder, value, kind_of(like)))


def _halves(builder: ir.IRBuilder, value: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Combine lane i with lane i + n/2, then halve, down to one lane."""
    count = WIDTH
    while count > 1:
        count //= 2
        none = ir.Constant(value.type, ir.Undefined)
        low, high = (
            builder.shuffle_vector(value, none, ir.Constant(ir.VectorType(ir.IntType(32), count), lanes))
            for lanes in (list(range(count)), list(range(count, 2 * count)))
        )
        value = combine(low, high)
    return builder.extract_element(value, ir.Constant(ir.IntType(32), 0))


@emits(types.float32)
def sum_lanes(builder: ir.IRBuilder, value: Any) -> Any:
    """Sum of the lanes: i with i + 8, then i with i + 4, 2, 1."""
    return _halves(builder, value, builder.fadd)


@emits(types.float32)
def max_lanes(builder: ir.IRBuilder, value: Any) -> Any:
    """Largest lane; unspecified if one is NaN."""
    return _halves(builder, value, lambda a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))


@inlined
def load_four(pointer: Any, index: Any) -> Any:
    """Elements index … index + 63."""
    return (
        load(pointer, index),
        load(pointer, index + 16),
        load(pointer, index + 32),
        load(pointer, index + 48),
    )


@inlined
def store_four(pointer: Any, index: Any, values: Any) -> None:
    """Write what `load_four` reads."""
    store(pointer, index, values[0])
    store(pointer, index + 16, values[1])
    store(pointer, index + 32, values[2])
    store(pointer, index + 48, values[3])
