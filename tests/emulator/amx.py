"""AMX's tiles in memory, for CPUs without them: a plugin of pytest that puts them in place of `kernels/amx.py`.

    NUMBA_CACHE_DIR=/tmp/emulated python -m pytest -p tests.emulator.amx tests/oracle/test_kernels_width.py

There is one set of tiles for all threads, so no test with two threads may run. What each instruction does is said in
Intel's manual; only that a product flushes numbers below 2^-126 to zero is not done here.

The tiles lie at one address in every process: machine code that numba keeps has it as a number.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
from llvmlite import ir

from slipstream.kernels import cpu_features
from slipstream.kernels.compiled import emits, float_pointer, int_pointer, pointer, routine
from slipstream.kernels.pairs import _first_half, _second_half
from slipstream.kernels.vector import VECTOR, fma, load, splat, store

ROWS, INPUTS, N_TILES = 16, 4, 8
WORDS = 16  # of a row: 64 bytes
TILES = 1 << 45  # far from where Linux puts programs, their heaps and what they map
SHAPE = TILES + N_TILES * ROWS * WORDS * 4  # int32: rows of inputs and sums, inputs at a time
_FIXED_NOREPLACE = 0x100000  # <linux/mman.h>; Python's mmap has no word for it


def _map() -> None:
    """Memory of zeros at TILES. Raises OSError where something else lies there."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (*2 * (ctypes.c_size_t,), *3 * (ctypes.c_int,), ctypes.c_long)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED_NOREPLACE
    n_bytes = SHAPE + 8 - TILES
    if libc.mmap(TILES, n_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) != TILES:
        raise OSError(ctypes.get_errno(), "no memory for the tiles at their address")


_map()


@emits(VECTOR)
def first(builder: ir.IRBuilder, pairs: Any) -> Any:
    """The first bfloat16 of each lane, as float32."""
    return _first_half(builder, pairs)


@emits(VECTOR)
def second(builder: ir.IRBuilder, pairs: Any) -> Any:
    return _second_half(builder, pairs)


@routine
def configure(n_rows: int, depth: int) -> None:
    shape = int_pointer(SHAPE)
    shape[0], shape[1] = n_rows, depth
    for tile in range(N_TILES):
        zero(tile)


@routine
def release() -> None:
    int_pointer(SHAPE)[0] = 0  # what is multiplied without a shape has no rows


@routine
def zero(tile: int) -> None:
    for row in range(ROWS):
        store(float_pointer(TILES), (tile * ROWS + row) * WORDS, splat(np.float32(0)))


@routine
def load_tile(tile: int, address: int, stride: int) -> None:
    """What a tile is too small for is zero."""
    zero(tile)
    shape, words = int_pointer(SHAPE), int_pointer(TILES)
    n_rows = shape[1] // 2 if tile > INPUTS else shape[0]
    n_words = shape[1] // 2 if tile == INPUTS else WORDS
    for row in range(n_rows):
        source = int_pointer(address + row * stride)
        for i in range(n_words):
            words[(tile * ROWS + row) * WORDS + i] = source[i]


@routine
def store_tile(tile: int, address: int, stride: int) -> None:
    for row in range(int_pointer(SHAPE)[0]):
        found = load(float_pointer(TILES), (tile * ROWS + row) * WORDS)
        store(float_pointer(address + row * stride), 0, found)


@routine
def multiply(sums: int, weights: int) -> None:
    shape, tiles = int_pointer(SHAPE), float_pointer(TILES)
    for row in range(shape[0]):
        even, odd = splat(np.float32(0)), splat(np.float32(0))
        for k in range(shape[1] // 2):
            x = splat(tiles[(INPUTS * ROWS + row) * WORDS + k])
            w = load(tiles, (weights * ROWS + k) * WORDS)
            even, odd = fma(first(x), first(w), even), fma(second(x), second(w), odd)
        place = (sums * ROWS + row) * WORDS
        store(tiles, place, load(tiles, place) + (even + odd))


@routine
def multiply_signed(sums: int, weights: int) -> None:
    """Products of signed bytes, four of a word each, are added to int32."""
    shape, words, numbers = int_pointer(SHAPE), int_pointer(TILES), pointer(np.int64(TILES), np.int8)
    for row in range(shape[0]):
        for k in range(shape[1] // 2):
            x = ((INPUTS * ROWS + row) * WORDS + k) * 4
            for lane in range(WORDS):
                w = ((weights * ROWS + k) * WORDS + lane) * 4
                total = np.int32(0)
                for i in range(4):
                    total += np.int32(numbers[x + i]) * np.int32(numbers[w + i])
                words[(sums * ROWS + row) * WORDS + lane] += total


def _take_the_place() -> None:
    there = cpu_features.features()
    cpu_features.features = lambda: there | cpu_features.TILES  # type: ignore[assignment]
    from slipstream.kernels import amx

    for name, function in (
        ("configure", configure),
        ("release", release),
        ("zero", zero),
        ("load", load_tile),
        ("store", store_tile),
        ("multiply", multiply),
        ("multiply_signed", multiply_signed),
    ):
        setattr(amx, name, function)


_take_the_place()
