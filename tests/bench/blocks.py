"""Products with GGUF's blocks against a plain sum of memory: time by rows, share of the sum's rate, eight rows to one.

    python -m tests.bench.blocks --shapes 8192x2048 4096x1024 --kinds Q4_K Q8_0 wide

Every size works through 1.2 GB of weights in turn, so that they come from memory as in a pass. The sum and the types
alternate, and medians are compared, so that other work on the machine hits all of them; on a busy machine a lower
quantile says more. A share is the time of the sum over as many bytes as the file has for the matrix, divided by the
time of a product of one row. The kinds "int4" and "fp8" have scales for 128 inputs
(and outputs), "wide" is a plain matrix of the inputs' dtype. NUMBA_CPU_NAME=haswell and its
NUMBA_CPU_FEATURES measure what CPUs without AVX-512 run.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels import threads
from slipstream.kernels.compiled import (
    address_of,
    fetch_add,
    float_pointer,
    long_kernel,
    long_pointer,
    prefetch,
    shifted,
)
from slipstream.kernels.matmul import narrow, narrow_sums, panels
from slipstream.kernels.matmul.blocks import BlockWeight
from slipstream.kernels.matmul.packed import Packed
from slipstream.kernels.matmul.quantized import ByteWeight, Int4Weight, Quantized
from slipstream.kernels.vector import load_four, store
from tests.block_data import block_bytes

IN_TURN = 1200e6  # bytes of weights, several times any cache
ROWS = (1, 2, 4, 8, 16)
WIDE = "wide"
AT_ONCE = 16  # products of one kind before the next kind's turn
AHEAD = 2048  # floats
MEMORY, N_VECTORS, N_THREADS, ARRIVED, OUT = range(5)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def _sum_items(address: int) -> None:
    a = long_pointer(address)
    me = fetch_add(shifted(a, ARRIVED), 1)
    begin = a[N_VECTORS] * me // a[N_THREADS] // 4 * 64
    end = a[N_VECTORS] * (me + 1) // a[N_THREADS] // 4 * 64
    memory = float_pointer(a[MEMORY])
    s0, s1, s2, s3 = load_four(memory, begin)
    for i in range(begin, end, 64):
        for line in range(0, 64, 16):
            prefetch(address_of(shifted(memory, i + line + AHEAD)))
        v0, v1, v2, v3 = load_four(memory, i)
        s0, s1, s2, s3 = s0 + v0, s1 + v1, s2 + v2, s3 + v3
    store(float_pointer(a[OUT]), me * 16, s0 + s1 + s2 + s3)


@long_kernel
def _run_sum(memory: int, n_vectors: int, n_threads: int, out: int, task: int) -> None:
    a = np.empty(OUT + 1, np.int64)
    a[MEMORY], a[N_VECTORS], a[N_THREADS], a[ARRIVED], a[OUT] = memory, n_vectors, n_threads, 0, out
    threads.run(task, a.ctypes.data, n_threads)
    a[0] = 0  # keeps the memory alive until here


class PlainSum:
    """Adds up parts of a large buffer in turn."""

    def __init__(self) -> None:
        self._memory = torch.zeros(int(IN_TURN) // 4)
        self._sums = torch.zeros(16 * threads.available())
        self._task = threads.compile_task(_sum_items)
        self._begin = 0

    def __call__(self, n_bytes: int) -> None:
        if self._begin + n_bytes // 4 > len(self._memory):
            self._begin = 0
        part = self._memory[self._begin :]
        self._begin += n_bytes // 64 * 16
        _run_sum(part.data_ptr(), n_bytes // 64, threads.available(), self._sums.data_ptr(), self._task)


class Weights:
    """One type's matrices, multiplied in turn."""

    def __init__(self, kind: str, shape: tuple[int, int], dtype: torch.dtype, rows: Sequence[int]) -> None:
        weight = _weight(kind, shape, dtype)
        self.n_bytes = weight.nbytes
        first = panels.pack(weight)
        if kind != WIDE and not isinstance(first, narrow.NarrowWeight):
            raise SystemExit(f"{kind} is widened here: {narrow.refusal()}")
        self.all = [_copy(first) for _ in range(max(2, int(IN_TURN / weight.nbytes)))]
        self.inputs = {n: torch.randn(n, shape[1]).to(dtype) for n in rows}
        self._next = 0

    def __call__(self, n_rows: int) -> None:
        self._next = (self._next + 1) % len(self.all)
        panels.linear(self.inputs[n_rows], self.all[self._next])


def _weight(kind: str, shape: tuple[int, int], dtype: torch.dtype) -> Tensor | Quantized:
    n_out, n_in = shape
    if kind == WIDE:
        return torch.randn(*shape).to(dtype)
    if kind == "int4":
        codes, zeros = (torch.randint(16, (n_out, n), dtype=torch.uint8) for n in (n_in // 2, n_in // 128))
        return Int4Weight(codes * 17, torch.rand(n_out, n_in // 128) / 100, zeros, None, dtype)
    if kind == "fp8":
        codes = torch.randn(*shape).to(torch.float8_e4m3fn)
        return ByteWeight(codes, torch.rand(n_out // 128, n_in // 128), (128, 128), dtype)
    return BlockWeight(block_bytes(kind, *shape), kind, None, dtype)


def _copy(weight: Packed) -> Packed:
    if isinstance(weight, panels.PanelStack):
        return replace(weight, panels=weight.panels.clone())
    assert isinstance(weight, narrow.NarrowWeight)
    (part,) = weight.parts
    other, segments = part.clone(), weight.segments.clone()
    segments[0, narrow_sums.ADDRESS] = other.data_ptr()
    table = torch.tensor([weight.bias.data_ptr(), segments.data_ptr()])
    return replace(weight, parts=(other,), segments=segments, table=table)


def measure(shape: tuple[int, int], given: argparse.Namespace) -> None:
    """Print a line for each kind."""
    rounds, rows = given.rounds, given.rows
    plain = PlainSum()
    weights = {kind: Weights(kind, shape, DTYPES[given.dtype], rows) for kind in given.kinds}
    took: dict[tuple[str, int], list[float]] = defaultdict(list)  # rows 0: the sum
    for i in range(rounds + 1):
        for kind, one in weights.items():
            for n_rows in (0, *rows):
                work, much = (one, n_rows) if n_rows else (plain, one.n_bytes)
                times = [_seconds(work, much) for _ in range(AT_ONCE)]
                took[kind, n_rows] += times if i > 0 else []
    for kind, one in weights.items():
        typical = {n: sorted(took[kind, n])[int(given.quantile * rounds * AT_ONCE)] for n in (0, *rows)}
        by_rows = " ".join(f"{1e6 * typical[n]:7.0f}" for n in rows)
        sys.stdout.write(
            f"{shape[0]:5} x {shape[1]:<5} {kind:7} {one.n_bytes / typical[0] / 1e9:5.1f} GB/s |{by_rows} |"
            f" {typical[0] / typical[1]:5.2f} {typical[8] / typical[1]:5.2f}\n"
        )
        sys.stdout.flush()


def _seconds(work: Callable[[int], None], given: int) -> float:
    started = time.perf_counter()
    work(given)
    return time.perf_counter() - started


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=["8192x2048", "2048x8192", "4096x1024", "1024x4096"])
    parser.add_argument("--kinds", nargs="+", default=["Q4_0", "Q4_K", "Q8_0", "Q6_K"])
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS, help="1 and 8 among them")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--quantile", type=float, default=0.5)
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    sys.stdout.write(f"{'':22} sum's rate | us by rows {given.rows} | share of the sum, T(8) / T(1)\n")
    for shape in given.shapes:
        n_out, n_in = map(int, shape.split("x"))
        measure((n_out, n_in), given)


if __name__ == "__main__":
    main()
