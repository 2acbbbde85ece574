"""From the blocks of a GGUF file, and codes with scales, to the records of `formats.py`: bits move, no value changes.

Where codes and groups' bytes lie in a block is what `block_places.py` says.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import overload
from torch import Tensor

from slipstream.kernels import threads
from slipstream.kernels.compiled import (
    address_of,
    constant,
    emits,
    fetch_add,
    inlined,
    long_kernel,
    long_pointer,
    pointer,
    shifted,
)
from slipstream.kernels.matmul.block_places import CODES, FACTORS, MINIMA
from slipstream.kernels.matmul.blocks import BlockWeight, block_sizes
from slipstream.kernels.matmul.code_bytes import words_of
from slipstream.kernels.matmul.formats import (
    CHUNK,
    EXPONENT,
    FORMATS,
    HALF,
    LAYOUTS,
    OF_A8,
    OF_BYTES,
    OF_FLOATS,
    OF_UNITS,
    PANEL,
    UNSIGNED,
)
from slipstream.kernels.matmul.quantized import ByteWeight, Int4Weight
from slipstream.kernels.matmul.scaled import kind_of, put_scales
from slipstream.kernels.vector import call_intrinsic

DATA, RECORDS, N_OUT, N_BLOCKS, NEXT = range(5)  # arguments of a task
STREAM, BYTES, PLANES = range(3)  # how codes lie (`formats.py`)


def records(weight: BlockWeight | Int4Weight | ByteWeight, way: str) -> Tensor | None:
    """The records, [n_panels, n_blocks, record_bytes] uint8; None if the type or one of its codes has none.

    Those are the least and greatest exponents in MXFP4, and NaN in fp8.
    Outputs beyond the last are zeros. way: what products are of.
    """
    kind = kind_of(weight)
    if kind is None:
        return None
    form, data = LAYOUTS[kind], _data(weight)
    if data is None:
        return None
    n_out, n_blocks = weight.shape[0], weight.shape[1] // form.block
    n_panels = -(-n_out // PANEL)
    laid = torch.empty((n_panels, n_blocks, form.record_bytes), dtype=torch.uint8)
    laid[n_out // PANEL :] = 0  # of a last panel that is not full, the outputs that are none
    sizes = np.array([data.data_ptr(), laid.data_ptr(), n_out, n_blocks, 0], np.int64)
    _run(_task(kind, way), sizes.ctypes.data, threads.available())
    if not isinstance(weight, BlockWeight):
        put_scales(weight, laid, form)
    return laid


def _data(weight: BlockWeight | Int4Weight | ByteWeight) -> Tensor | None:
    """The bytes of its blocks, [n_out, bytes] uint8; None if there is a number in them that records have not."""
    if isinstance(weight, BlockWeight):
        fits = FORMATS[weight.kind].factor != EXPONENT or _exponents_fit(weight)
        return weight.data.contiguous() if fits else None
    codes = weight.codes.contiguous().view(torch.uint8)
    has_nan = weight.codes.dtype is torch.float8_e4m3fn and bool((codes & 127).eq(127).any())
    return None if has_nan else codes


def _exponents_fit(weight: BlockWeight) -> bool:
    exponents = weight.data.unflatten(1, (-1, block_sizes(weight.kind)[1]))[..., 0]  # [n_out, n_blocks]
    return not bool(((exponents == 0) | (exponents == 255)).any())


@long_kernel
def _run(task: int, address: int, n_threads: int) -> None:
    threads.run(task, address, n_threads)


@constant
def constants_of(kind: str) -> tuple[int, ...]:
    """What the loops below need of a type, as constants to the compiler."""
    form = LAYOUTS[kind]
    half = -1 if form.half_at is None else form.half_at
    second = form.second_at if form.minimum in (HALF, UNSIGNED) else -1
    n_bytes = block_sizes(kind)[1] if kind in FORMATS else form.block * form.bits // 8
    n_factors = form.n_groups if form.factor else 0
    n_minima = form.n_groups if form.minimum == UNSIGNED else 0
    places = form.second, form.factors, form.second_factors, form.codes, form.record_bytes
    return (form.bits, form.block, n_bytes, half, second, n_factors, n_minima, *places)


def code_of(b: Any, c: int, h: int, i: int, kind: str) -> int:
    """The code of input 32 c + 16 h + i; in compiled code only."""
    raise NotImplementedError


def factor_of(b: Any, g: int, kind: str, which: str) -> int:
    """The byte of a group that scales ("factor"), or its second one ("minimum"); in compiled code only."""
    raise NotImplementedError


@overload(code_of, prefer_literal=True, strict=False)
def _code_of(b: Any, c: Any, h: Any, i: Any, kind: Any) -> Any:
    chosen = inlined(CODES[kind.literal_value])
    return lambda b, c, h, i, kind: chosen(b, c, h, i)


@overload(factor_of, prefer_literal=True, strict=False)
def _factor_of(b: Any, g: Any, kind: Any, which: Any) -> Any:
    table = FACTORS if which.literal_value == "factor" else MINIMA
    chosen = inlined(table.get(kind.literal_value, lambda b, g: 0))
    return lambda b, g, kind, which: chosen(b, g)


@constant
def _words_of(kind: str) -> tuple[int, ...]:
    """`code_bytes.words_of`, one behind the other."""
    return tuple(number for word in words_of(LAYOUTS[kind].bits) for number in word)


@emits(types.int64)
def picked(builder: ir.IRBuilder, word: Any, mask: Any) -> Any:
    """The bits of the word that the mask has, moved together: an instruction of all CPUs that have AVX2."""
    return call_intrinsic(builder, "llvm.x86.bmi.pext.64", ir.IntType(64), word, mask)


@inlined
def _copy_block(b: Any, record: int, output: int, codes: Any, form: Any) -> None:
    """Write one output's part of the record at that address. form: (kind, how codes lie), constants."""
    kind, lie = form
    bits, block, _, half, second, n_factors, n_minima, seconds, factors, minima, at, _ = constants_of(kind)
    place = pointer(record, np.uint8)
    for i in range(2):
        if half >= 0:
            place[2 * output + i] = b[half + i]
        if second >= 0:
            place[seconds + 2 * output + i] = b[second + i]
    for g in range(n_factors):
        place[factors + g * PANEL + output] = factor_of(b, g, kind, "factor") & 255
    for g in range(n_minima):
        place[minima + g * PANEL + output] = factor_of(b, g, kind, "minimum")
    for chunk in range(block // CHUNK):
        for h in range(2):
            for i in range(16):
                codes[h * 16 + i] = code_of(b, chunk, h, i, kind)
        target = pointer(record + at + chunk * PANEL * CHUNK * bits // 8, np.uint16)
        _copy_codes(codes, target, output, (kind, bits, lie))


@inlined
def _copy_codes(codes: Any, target: Any, output: int, form: Any) -> None:
    """32 codes of an output. form: (kind, bits, how they lie)."""
    kind, bits, lie = form
    if lie == PLANES:
        _copy_planes(codes, target, output, kind)
    elif lie == STREAM:
        _copy_stream(codes, target, output, bits)
    else:
        _copy_bytes(codes, target, output)


@inlined
def _copy_stream(codes: Any, target: Any, output: int, bits: int) -> None:
    """32 codes as two streams of words: even and odd inputs."""
    eights = long_pointer(address_of(codes))
    for parity in range(2):
        mask = ((1 << bits) - 1) * 0x0001_0001_0001_0001 << 8 * parity
        stream, n_bits, k = 0, 0, 0
        for i in range(CHUNK // 8):
            stream |= picked(eights[i], mask) << n_bits
            n_bits += 4 * bits
            while n_bits >= 16:
                target[2 * (k * PANEL + output) + parity] = stream & 0xFFFF
                stream, n_bits, k = stream >> 16, n_bits - 16, k + 1


@inlined
def _copy_planes(codes: Any, target: Any, output: int, kind: Any) -> None:
    """32 codes as `code_bytes.py` reads them: of four neighbouring inputs a byte of a word each."""
    fours = pointer(address_of(codes), np.uint32)
    words = pointer(address_of(target), np.uint32)
    numbers = _words_of(kind)
    for i in range(len(numbers) // 3):
        part, before, first = numbers[3 * i], numbers[3 * i + 1], numbers[3 * i + 2]
        mask = np.uint32(0x01010101 * ((1 << part) - 1))
        word = np.uint32(0)
        for k in range(8 // part):
            word |= (fours[first + k] >> np.uint32(before) & mask) << np.uint32(k * part)
        words[i * PANEL + output] = word


@inlined
def _copy_bytes(codes: Any, target: Any, output: int) -> None:
    """32 codes of eight bits, so that bytes 0 … 7 of 16 are four outputs' pairs of one step, the others of the next."""
    pairs = pointer(address_of(codes), np.uint16)
    lane = output % 16
    for step in range(CHUNK // 2):
        vector = step // 2 * 4 + output // 16
        target[32 * vector + lane // 4 * 8 + step % 2 * 4 + lane % 4] = pairs[step]


@functools.cache
def _task(kind: str, way: str) -> int:
    """Address of the compiled task that copies matrices of that type."""
    lie = {OF_FLOATS: STREAM, OF_BYTES: PLANES, OF_UNITS: PLANES, OF_A8: PLANES}.get(way, BYTES)

    def items(address: int) -> None:
        a = long_pointer(address)
        constants = constants_of(kind)
        block_bytes, record_bytes = constants[2], constants[11]
        n_blocks, n_out = a[N_BLOCKS], a[N_OUT]
        memory = np.empty(CHUNK, np.uint8)
        codes = pointer(memory.ctypes.data, np.uint8)
        panel = fetch_add(shifted(a, NEXT), 1)
        while panel * PANEL < n_out:
            for i in range(min(PANEL, n_out - panel * PANEL)):
                for j in range(n_blocks):
                    b = pointer(a[DATA] + ((panel * PANEL + i) * n_blocks + j) * block_bytes, np.uint8)
                    record = a[RECORDS] + (panel * n_blocks + j) * record_bytes
                    _copy_block(b, record, i, codes, (kind, lie))
            panel = fetch_add(shifted(a, NEXT), 1)
        memory[:0] = 0  # keeps the memory alive until here

    return threads.compile_task(items)
