"""From the blocks of a GGUF file to the records of `formats.py`: bits are moved, no value changes.

What the bytes of a block mean is what `gguf.quants` (llama.cpp's package) makes of them. Codes and groups' bytes are given
below by their place in a block, an expression for each type. b: the block's bytes, i: an input, g: a group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba.extending import overload
from torch import Tensor

from slipstream.kernels import threads
from slipstream.kernels.compiled import fetch_add, inlined, long_kernel, long_pointer, pointer, shifted
from slipstream.kernels.matmul.blocks import BlockWeight, block_sizes
from slipstream.kernels.matmul.formats import CHUNK, EXPONENT, FORMATS, PANEL, UNSIGNED

DATA, RECORDS, N_OUT, N_BLOCKS, NEXT, UNFIT = range(6)  # arguments of a task
NO_CODE = 256  # -128 has no magnitude of seven bits
Part = Callable[[Any, Any], int]

CODES: dict[str, Part] = {
    "Q4_0": lambda b, i: b[2 + i % 16] >> (i // 16 * 4) & 15,
    "Q4_1": lambda b, i: b[4 + i % 16] >> (i // 16 * 4) & 15,
    "Q5_0": lambda b, i: b[6 + i % 16] >> (i // 16 * 4) & 15 | (b[2 + i // 8] >> i % 8 & 1) << 4,
    "Q5_1": lambda b, i: b[8 + i % 16] >> (i // 16 * 4) & 15 | (b[4 + i // 8] >> i % 8 & 1) << 4,
    "Q8_0": lambda b, i: b[2 + i] if b[2 + i] < 128 else 384 - b[2 + i],
    "Q2_K": lambda b, i: b[16 + i // 128 * 32 + i % 32] >> (i % 128 // 32 * 2) & 3,
    "Q3_K": lambda b, i: (
        b[32 + i // 128 * 32 + i % 32] >> (i % 128 // 32 * 2) & 3 | (b[i % 32] >> i // 32 & 1) << 2
    ),
    "Q4_K": lambda b, i: b[16 + i // 64 * 32 + i % 32] >> (i % 64 // 32 * 4) & 15,
    "Q5_K": lambda b, i: (
        b[48 + i // 64 * 32 + i % 32] >> (i % 64 // 32 * 4) & 15 | (b[16 + i % 32] >> i // 32 & 1) << 4
    ),
    "Q6_K": lambda b, i: (
        b[i // 128 * 64 + i % 64] >> (i % 128 // 64 * 4) & 15
        | (b[128 + i // 128 * 32 + i % 32] >> (i % 128 // 32 * 2) & 3) << 4
    ),
    "IQ4_NL": lambda b, i: b[2 + i % 16] >> (i // 16 * 4) & 15,
    "IQ4_XS": lambda b, i: b[8 + i // 32 * 16 + i % 16] >> (i % 32 // 16 * 4) & 15,
    "MXFP4": lambda b, i: b[1 + i % 16] >> (i // 16 * 4) & 15,
}
FACTORS: dict[str, Part] = {
    "Q2_K": lambda b, g: b[g] & 15,
    "Q3_K": lambda b, g: (
        (b[96 + g % 8] >> (g // 8 * 4) & 15 | (b[104 + g % 4] >> (g // 4 * 2) & 3) << 4) - 32
    ),
    "Q4_K": lambda b, g: b[4 + g] & 63 if g < 4 else b[8 + g] & 15 | b[g] >> 6 << 4,
    "Q5_K": lambda b, g: b[4 + g] & 63 if g < 4 else b[8 + g] & 15 | b[g] >> 6 << 4,
    "Q6_K": lambda b, g: b[192 + g],
    "IQ4_XS": lambda b, g: (b[4 + g // 2] >> (g % 2 * 4) & 15 | (b[2 + g // 4] >> (g % 4 * 2) & 3) << 4) - 32,
    "MXFP4": lambda b, g: b[0],
}
MINIMA: dict[str, Part] = {
    "Q2_K": lambda b, g: b[g] >> 4,
    "Q4_K": lambda b, g: b[8 + g] & 63 if g < 4 else b[8 + g] >> 4 | b[4 + g] >> 6 << 4,
    "Q5_K": lambda b, g: b[8 + g] & 63 if g < 4 else b[8 + g] >> 4 | b[4 + g] >> 6 << 4,
}


def records(weight: BlockWeight) -> Tensor | None:
    """The records, [n_panels, n_blocks, record_bytes] uint8; None if the type or one of its codes has none.

    Those are -128 in Q8_0, and the smallest and largest exponents in MXFP4. Outputs beyond the last are zeros.
    """
    form = FORMATS.get(weight.kind)
    if form is None or (form.factor == EXPONENT and not _exponents_fit(weight)):
        return None
    n_out, n_blocks = weight.shape[0], weight.shape[1] // form.block
    n_panels = -(-n_out // PANEL)
    laid = torch.zeros((n_panels, n_blocks, form.record_bytes), dtype=torch.uint8)
    data = weight.data.contiguous()
    sizes = np.array([data.data_ptr(), laid.data_ptr(), n_out, n_blocks, 0, 0], np.int64)
    _run(_task(weight.kind), sizes.ctypes.data, threads.available())
    return None if sizes[UNFIT] else laid


def _exponents_fit(weight: BlockWeight) -> bool:
    exponents = weight.data.unflatten(1, (-1, block_sizes(weight.kind)[1]))[..., 0]  # [n_out, n_blocks]
    return not bool(((exponents == 0) | (exponents == 255)).any())


@long_kernel
def _run(task: int, address: int, n_threads: int) -> None:
    threads.run(task, address, n_threads)


def _constants(kind: str) -> tuple[int, ...]:
    """What the loops below need of a type, as constants to the compiler."""
    form = FORMATS[kind]
    half = -1 if form.half_at is None else form.half_at
    second = form.second_at if form.minimum else -1
    n_factors = form.n_groups if form.factor else 0
    n_minima = form.n_groups if form.minimum == UNSIGNED else 0
    places = form.second, form.factors, form.second_factors, form.codes, form.record_bytes
    return (form.bits, form.block, block_sizes(kind)[1], half, second, n_factors, n_minima, *places)


def part_of(b: Any, i: Any, kind: str, table: str) -> int:
    """The code (or factor, minimum) `i` of a block; in compiled code only."""
    raise NotImplementedError


_TABLES = {"codes": CODES, "factors": FACTORS, "minima": MINIMA}


@overload(part_of, prefer_literal=True, strict=False)
def _part_of(b: Any, i: Any, kind: Any, table: Any) -> Any:
    chosen = inlined(_TABLES[table.literal_value].get(kind.literal_value, lambda b, i: 0))
    return lambda b, i, kind, table: chosen(b, i)


def constants_of(kind: str) -> tuple[int, ...]:
    """`_constants`; in compiled code only."""
    raise NotImplementedError


@overload(constants_of, prefer_literal=True, strict=False)
def _constants_of(kind: Any) -> Any:
    found = _constants(kind.literal_value)
    return lambda kind: found


@inlined
def _copy_block(b: Any, record: Any, output: int, kind: Any) -> bool:
    """Write one output's part of a record; returns whether every code has a place in it."""
    bits, block, _, half, second, n_factors, n_minima, seconds, factors, minima, codes, _ = constants_of(kind)
    for i in range(2):
        if half >= 0:
            record[2 * output + i] = b[half + i]
        if second >= 0:
            record[seconds + 2 * output + i] = b[second + i]
    for g in range(n_factors):
        record[factors + g * PANEL + output] = part_of(b, g, kind, "factors") & 255
    for g in range(n_minima):
        record[minima + g * PANEL + output] = part_of(b, g, kind, "minima")
    fits = True
    for chunk in range(block // CHUNK):
        place = shifted(record, codes + chunk * PANEL * CHUNK * bits // 8)
        if bits == 8:
            fits = _copy_bytes(b, place, output, kind) and fits
        else:
            _copy_stream(b, place, (output, chunk * CHUNK), kind, bits)
    return fits


@inlined
def _copy_stream(b: Any, place: Any, at: Any, kind: Any, bits: int) -> None:
    """32 codes as two streams of words: even and odd inputs."""
    output, first = at
    for parity in range(2):
        word, n_bits, k = 0, 0, 0
        for step in range(CHUNK // 2):
            word |= part_of(b, first + 2 * step + parity, kind, "codes") << n_bits
            n_bits += bits
            if n_bits >= 16:
                target = 4 * (k * PANEL + output) + 2 * parity
                place[target] = word & 255
                place[target + 1] = word >> 8 & 255
                word, n_bits, k = word >> 16, n_bits - 16, k + 1


@inlined
def _copy_bytes(b: Any, place: Any, output: int, kind: Any) -> bool:
    """32 codes of eight bits, so that bytes 0 … 7 of 16 are four outputs' pairs of one step, the others of the next."""
    fits = True
    for i in range(CHUNK):
        code = part_of(b, i, kind, "codes")
        fits = fits and code < NO_CODE
        vector, lane = i // 4 * 4 + output // 16, output % 16
        place[64 * vector + lane // 4 * 16 + i // 2 % 2 * 8 + lane % 4 * 2 + i % 2] = code & 255
    return fits


@functools.cache
def _task(kind: str) -> int:
    """Address of the compiled task that copies matrices of that type."""

    def items(address: int) -> None:
        a = long_pointer(address)
        _, _, block_bytes, _, _, n_factors, _, _, _, _, _, record_bytes = constants_of(kind)
        n_blocks, n_out = a[N_BLOCKS], a[N_OUT]
        panel = fetch_add(shifted(a, NEXT), 1)
        while panel * PANEL < n_out:
            for i in range(min(PANEL, n_out - panel * PANEL)):
                for j in range(n_blocks):
                    b = pointer(a[DATA] + ((panel * PANEL + i) * n_blocks + j) * block_bytes, np.uint8)
                    record = pointer(a[RECORDS] + (panel * n_blocks + j) * record_bytes, np.uint8)
                    if not _copy_block(b, record, i, kind):
                        a[UNFIT] = 1
            panel = fetch_add(shifted(a, NEXT), 1)

    return threads.compile_task(items)
