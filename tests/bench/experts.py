"""A layer of experts on the CPU: narrow in one call, narrow with a product each, and widened, in turn.

    python -m tests.bench.experts --shapes qwen3-30b-a3b gpt-oss-20b

Layers take turns, so that weights come from memory. Bytes are those of the experts that a pass asks for; the rate of a
plain sum of memory stands beside them. Medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slipstream import kernels
from slipstream.kernels.matmul.blocks import BlockWeight
from slipstream.kernels.matmul.quantized import Quantized
from slipstream.kernels.moe import cpu, panels
from slipstream.kernels.moe.op import NarrowMatrices, PackedExperts, Routed
from tests.bench.blocks import PlainSum
from tests.block_data import block_bytes

ROWS = (1, 2, 4, 8, 16, 64, 512)
N_LAYERS = 3


@dataclass(frozen=True, slots=True)
class Shape:
    """A layer of a released model."""

    kind: str
    n_experts: int
    top_k: int
    d_model: int
    d_inner: int


SHAPES = {
    "qwen3-30b-a3b": Shape("Q4_K", 128, 8, 2048, 768),
    "gpt-oss-20b": Shape("MXFP4", 32, 4, 2880, 2880),
}


def layers(shape: Shape) -> dict[str, list[PackedExperts]]:
    """By way of multiplying, the layers in that layout."""
    made: dict[str, list[PackedExperts]] = {"one call": [], "a product each": [], "widened": []}
    for layer in range(N_LAYERS):
        both = [matrices(shape, 2 * shape.d_inner, shape.d_model, layer)]
        both.append(matrices(shape, shape.d_model, shape.d_inner, layer + 50))
        made["one call"].append(panels.pack_experts(*both))
        made["a product each"].append(cpu.pack_experts(*both))
        if not layer:  # one of them is larger than any cache
            made["widened"].append(panels.pack_experts(*(one.dense() for one in both)))
    return made


def matrices(shape: Shape, n_out: int, n_in: int, seed: int) -> NarrowMatrices:
    data = block_bytes(shape.kind, n_out, n_in, seed)
    each: list[Quantized] = [
        BlockWeight(data.roll(i, 0), shape.kind, None, torch.bfloat16) for i in range(shape.n_experts)
    ]
    return NarrowMatrices(each)


def routed(shape: Shape, n_rows: int) -> Routed:
    ids = torch.rand(n_rows, shape.n_experts).argsort(1)[:, : shape.top_k].sort(1).values
    return Routed(ids.to(torch.int32).contiguous(), torch.full((n_rows, shape.top_k), 1 / shape.top_k))


def measure(name: str, rounds: int) -> None:
    """Print a line for each number of rows."""
    shape, plain = SHAPES[name], PlainSum()
    made = layers(shape)
    each_bytes = (
        3
        * BlockWeight(
            block_bytes(shape.kind, shape.d_inner, shape.d_model), shape.kind, None, torch.bfloat16
        ).nbytes
    )
    for n_rows in ROWS:
        took: dict[str, list[float]] = {"sum": [], **{way: [] for way in made}}
        for i in range(rounds + 2):
            x, asked = torch.randn(n_rows, shape.d_model).to(torch.bfloat16), routed(shape, n_rows)
            n_bytes = len(asked.expert_ids.unique()) * each_bytes
            for way, some in made.items():
                run = panels.experts if way != "a product each" else cpu.experts
                started = time.perf_counter()
                run(x, asked, some[i % len(some)])
                took[way].append(time.perf_counter() - started)
            started = time.perf_counter()
            plain(min(n_bytes, 250_000_000))
            took["sum"].append((time.perf_counter() - started) * n_bytes / min(n_bytes, 250_000_000))
        typical = {way: statistics.median(times[2:]) for way, times in took.items()}
        figures = " · ".join(f"{way} {1e3 * typical[way]:.2f}" for way in ("sum", *made))
        sys.stdout.write(f"{name} {shape.kind}, {n_rows} rows, {n_bytes / 1e6:.0f} MB: ms {figures}\n")
        sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args(arguments)
    kernels.select("cpu", torch.bfloat16)
    for name in given.shapes:
        measure(name, given.rounds)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
