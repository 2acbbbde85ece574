"""Some rows of a matrix on CPUs, as an embedding reads them: of GGUF's blocks the values, straight from their bytes.

A value is computed as `gguf.quants` computes it, in float32 and in its order, so the bits are `BlockWeight.dense`'s.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels import threads
from slipstream.kernels.compiled import fetch_add, long_kernel, long_pointer, pointer, shifted
from slipstream.kernels.matmul.blocks import BlockWeight
from slipstream.kernels.matmul.formats import EXPONENT, FORMATS, HALF, SIGNED, UNSIGNED
from slipstream.kernels.matmul.records import code_of, constants_of, factor_of

DATA, IDS, OUT, TABLES, N_ROWS, N_BLOCKS, NEXT = range(7)  # arguments of a task
SERIAL_BELOW = 1_000_000  # values; fewer are there before a second thread has woken
# Of the tables, in numbers: what a half stands for, what a group's byte does, what a code does.
FACTORS, VALUES = 1 << 16, (1 << 16) + 256


def take_rows(table: Tensor | BlockWeight, row_ids: Tensor) -> Tensor:
    if isinstance(table, Tensor):
        return table.index_select(0, row_ids)
    if table.kind not in FORMATS or table.order is not None:
        return table.rows(row_ids)
    n, n_in = len(row_ids), table.shape[1]
    ids = row_ids.contiguous()
    if n and not 0 <= int(ids.min()) <= int(ids.max()) < len(table.data):
        raise IndexError(f"rows {int(ids.min())} to {int(ids.max())} of {len(table.data)}")
    out = torch.empty((n, n_in), dtype=torch.float32)
    tables, data = _tables(table.kind), table.data.contiguous()
    addresses = data.data_ptr(), ids.data_ptr(), out.data_ptr(), tables.ctypes.data
    sizes = np.array([*addresses, n, n_in // FORMATS[table.kind].block, 0], np.int64)
    _run(_task(table.kind), sizes.ctypes.data, threads.available() if n * n_in >= SERIAL_BELOW else 1)
    return out.to(table.dtype)


@long_kernel
def _run(task: int, address: int, n_threads: int) -> None:
    threads.run(task, address, n_threads)


@functools.cache
def _tables(kind: str) -> Any:
    """float32: by the bits of a half its number; by a group's byte what it scales with; by a code its value."""
    form = FORMATS[kind]
    with np.errstate(invalid="ignore"):  # there are NaNs among them
        halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    whole = np.arange(256)
    factors = {
        "": np.ones(256),
        UNSIGNED: whole,
        SIGNED: whole.astype(np.uint8).view(np.int8),
        EXPONENT: np.ldexp(1.0, whole - 128),
    }[form.factor]
    # Codes of eight bits are sign and magnitude; -128, which has none of seven bits, comes as 256.
    signed = [*range(128), *(-i for i in range(128)), -128]
    values = form.values or signed
    return np.concatenate((halves, *(np.asarray(one, np.float32) for one in (factors, values))))


@functools.cache
def _task(kind: str) -> int:
    """Address of the compiled task that computes rows of that type."""
    has_half_minimum = FORMATS[kind].minimum == HALF

    def items(address: int) -> None:
        a = long_pointer(address)
        _, block, block_bytes, half, second, n_factors, n_minima, _, _, _, _, _ = constants_of(kind)
        tables, ids = pointer(a[TABLES], np.float32), long_pointer(a[IDS])
        group = block // max(n_factors, 1)
        row = fetch_add(shifted(a, NEXT), 1)
        while row < a[N_ROWS]:
            for j in range(a[N_BLOCKS]):
                b = pointer(a[DATA] + (ids[row] * a[N_BLOCKS] + j) * block_bytes, np.uint8)
                out = pointer(a[OUT] + 4 * (row * a[N_BLOCKS] + j) * block, np.float32)
                scale = np.float32(1) if half < 0 else tables[b[half] | b[half + 1] << 8]
                offset = np.float32(0) if second < 0 else tables[b[second] | b[second + 1] << 8]
                for sixteen in range(block // 16):
                    g = sixteen * 16 // group
                    factor, minimum = scale, offset
                    if n_factors > 0:
                        factor = scale * tables[FACTORS + (factor_of(b, g, kind, "factor") & 255)]
                    if n_minima > 0:
                        minimum = -(offset * np.float32(factor_of(b, g, kind, "minimum")))
                    for i in range(16):
                        code = code_of(b, sixteen // 2, sixteen % 2, i, kind)
                        value = factor * tables[VALUES + code]
                        out[sixteen * 16 + i] = value + minimum if n_minima > 0 or has_half_minimum else value
            row = fetch_add(shifted(a, NEXT), 1)

    return threads.compile_task(items)
