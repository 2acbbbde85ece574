"""The values of rows of GGUF's blocks, compiled: for embeddings, and for weights that have to be widened.

They are those of `gguf.quants.dequantize` in every bit: half * factor, times the code's number, plus the minimum, each
rounded to float32; then rounded once to the dtype.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from torch import Tensor

from slipstream.kernels import threads
from slipstream.kernels.compiled import (
    KINDS,
    emits,
    fetch_add,
    float_pointer,
    inlined,
    long_kernel,
    long_pointer,
    pointer,
    shifted,
)
from slipstream.kernels.cpu_features import missing
from slipstream.kernels.matmul.blocks import block_sizes
from slipstream.kernels.matmul.formats import CHUNK, FORMATS
from slipstream.kernels.matmul.records import code_of, constants_of, factor_of
from slipstream.kernels.vector import WIDTH, load, splat, store

DATA, ROWS, OUT, NUMBERS, N_ROWS, N_BLOCKS, N_OUT, NEXT, MISSED = range(9)  # arguments of a task
FEATURES = ("f16c",)  # of the CPU: reads halves
SERIAL_BELOW = 100_000  # values; fewer are read before a second thread has woken


def has_values(kind: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `values` reads blocks of this kind there."""
    able = device.type == "cpu" and not missing(FEATURES)
    return able and kind in FORMATS and dtype in (torch.float32, torch.bfloat16)


def values(data: Tensor, kind: str, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of a matrix, [n, in_features]. data: [out_features, bytes of a row] uint8; rows: [n] integers.

    Raises IndexError for a row that the matrix has not.
    """
    form = FORMATS[kind]
    data, rows = data.contiguous(), rows.to(torch.int64).contiguous()
    n_blocks = data.shape[1] // block_sizes(kind)[1]
    out = torch.empty((len(rows), n_blocks * form.block), dtype=dtype)
    addresses = data.data_ptr(), rows.data_ptr(), out.data_ptr(), _numbers(kind).ctypes.data
    n_threads = threads.available() if out.numel() >= SERIAL_BELOW else 1
    if _run(addresses, (len(rows), n_blocks, len(data)), _task(kind, dtype), n_threads):
        raise IndexError(f"rows are numbered from 0 to {len(data) - 1}, one of {rows.tolist()} is not")
    return out


@functools.cache
def _numbers(kind: str) -> Any:
    """What codes stand for, by code, [at least as many as there are codes] float32."""
    return np.array(FORMATS[kind].values, np.float32)


@long_kernel
def _run(addresses: Any, shape: Any, task: int, n_threads: int) -> bool:
    """Whether there is a row that the matrix has not. shape: (n, n_blocks, out_features)."""
    a = np.empty(MISSED + 1, np.int64)
    a[:4], a[4:7], a[NEXT], a[MISSED] = addresses, shape, 0, 0
    threads.run(task, a.ctypes.data, n_threads)
    return a[MISSED] != 0


@emits(types.float32)
def half_float(builder: ir.IRBuilder, bits: Any) -> Any:
    """The number of a half's bits."""
    half = builder.bitcast(builder.trunc(bits, ir.IntType(16)), ir.HalfType())
    return builder.fpext(half, ir.FloatType())


@emits(types.float32)
def float_of(builder: ir.IRBuilder, bits: Any) -> Any:
    """The float32 of those bits."""
    return builder.bitcast(builder.trunc(bits, ir.IntType(32)), ir.FloatType())


@inlined
def _scale(b: Any, g: int, half: int, n_factors: int, kind: Any) -> Any:
    """Of a group of the block. half: where the block has one, or -1."""
    if half < 0:
        exponent = np.int64(factor_of(b, g, kind, "factor"))
        return float_of((exponent - 1) << 23 if exponent > 1 else 0x0020_0000 << exponent)
    scale = half_float(np.int64(b[half]) | np.int64(b[half + 1]) << 8)
    if n_factors > 0:
        scale *= np.float32(np.int64(factor_of(b, g, kind, "factor")))
    return scale


@inlined
def _block(b: Any, numbers: Any, room: Any, out: Any, kind: Any) -> None:
    """The values of one block. room: of 16 floats."""
    _, block, _, half, second, n_factors, n_minima, _, _, _, _, _ = constants_of(kind)
    n_groups = max(n_factors, 1)
    for chunk in range(block // CHUNK):
        for h in range(2):
            g = (chunk * 2 + h) * n_groups // (block // WIDTH)
            for i in range(WIDTH):
                room[i] = numbers[code_of(b, chunk, h, i, kind)]
            result = splat(_scale(b, g, half, n_factors, kind)) * load(room, 0)
            if second >= 0:
                minimum = half_float(np.int64(b[second]) | np.int64(b[second + 1]) << 8)
                if n_minima > 0:
                    minimum *= np.float32(-np.int64(factor_of(b, g, kind, "minimum")))
                result = result + splat(minimum)
            store(out, chunk * CHUNK + h * WIDTH, result)


@functools.cache
def _task(kind: str, dtype: torch.dtype) -> int:
    """Address of the compiled task that reads rows of that kind."""
    out_kind = KINDS[dtype]

    def items(address: int) -> None:
        a = long_pointer(address)
        constants = constants_of(kind)
        block, block_bytes, n_blocks = constants[1], constants[2], a[N_BLOCKS]
        memory = np.empty(WIDTH, np.float32)
        room, numbers = float_pointer(memory.ctypes.data), float_pointer(a[NUMBERS])
        row = fetch_add(shifted(a, NEXT), 1)
        while row < a[N_ROWS]:
            which = long_pointer(a[ROWS])[row]
            if 0 <= which < a[N_OUT]:
                out = shifted(pointer(a[OUT], out_kind), row * n_blocks * block)
                for j in range(n_blocks):
                    b = pointer(a[DATA] + (which * n_blocks + j) * block_bytes, np.uint8)
                    _block(b, numbers, room, shifted(out, j * block), kind)
            else:
                a[MISSED] = 1
            row = fetch_add(shifted(a, NEXT), 1)
        memory[:0] = 0  # keeps the memory alive until here

    return threads.compile_task(items)
