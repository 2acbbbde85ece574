"""Networks with latent attention on this machine: a pass of several rows over one of one row, at a long context.

    python -m tests.bench.latents [--threads 2] [--context 4096] [--layers 12]

Weights are random, layers have dense feed-forward parts: with experts further rows read further weights. Beside each
figure stands what a plain sum of the weights' bytes takes on all threads. Run nothing beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from slipstream.engine.batch import Span
from slipstream.engine.cache.cache import Cache
from slipstream.engine.cache.need import Sizes
from slipstream.engine.cache.store import Store
from slipstream.engine.layers.decoder import Decoder, load_decoder
from slipstream.engine.models.blueprint import Blueprint, draw
from slipstream.engine.models.reading.config import ModelConfig
from slipstream.engine.models.registry import decoder_spec, read_model
from slipstream.engine.ranks import Joint
from slipstream.kernels import select
from tests.public_configs import CONFIGS

CPU, DTYPE, PAGE = torch.device("cpu"), torch.bfloat16, 64
WIDTHS, N_ROUNDS = (1, 2, 4, 8, 16), 9
# Of released models, with fewer and dense layers.
SHRUNK: Mapping[str, Mapping[str, Any]] = {
    "GLM-4.7-Flash": {"intermediate_size": 6144, "first_k_dense_replace": 10_000},
    "Kimi-Linear-48B-A3B": {"intermediate_size": 6144, "first_k_dense_replace": 10_000},
}


class RandomWeights(Blueprint):
    """A source that has every tensor it is asked for, with random numbers of about the size that keeps rows finite."""

    def __init__(self) -> None:
        super().__init__(DTYPE)
        self.device = CPU

    def take(
        self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None, joint: Joint | None = None
    ) -> Tensor:
        made = torch.randn(tuple(shape), dtype=torch.float32) * shape[-1] ** -0.5
        return made.to(dtype or DTYPE)

    def take_linear(
        self, names: Sequence[str], d_in: int, d_outs: Sequence[int], joint: Sequence[int] = ()
    ) -> Tensor:
        return self.take(names[0], (sum(d_outs), d_in))

    def take_matrix(self, name: str, shape: tuple[int, int], *, for_rows: bool = True) -> Tensor:
        return self.take(name, shape)


def shrunk(name: str, n_layers: int) -> ModelConfig:
    """The config of a released model with so many dense layers."""
    values = {**CONFIGS[name], **SHRUNK[name], "num_hidden_layers": n_layers, "vocab_size": 32_000}
    if "linear_attn_config" in values:
        full = list(range(4, n_layers + 1, 4))
        values["linear_attn_config"] = {**values["linear_attn_config"], "full_attn_layers": full}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.json")
        path.write_text(json.dumps(values))
        return read_model(path)


def seconds_of(decoder: Decoder, cache: Cache, context: int) -> dict[int, float]:
    """Seconds of a pass by rows, one certain and the rest drafts that are not kept; medians of all rounds.

    context: tokens before the first pass; each pass adds one.
    """
    took: dict[int, list[float]] = {width: [] for width in WIDTHS}
    for _ in range(N_ROUNDS):
        for width in WIDTHS:
            assert cache.reserve(0, "target", context, context + width, width - 1)
            batch = cache.batch("target", [Span(0, list(range(width)), context, width - 1, width)])
            started = time.perf_counter()
            with torch.inference_mode():
                decoder(batch, cache.stores["target"])
            took[width].append(time.perf_counter() - started)
            context += 1
            cache.commit(0, "target", context)
    return {width: median(times) for width, times in took.items()}


def sum_seconds(n_bytes: int) -> float:
    """Seconds of a plain sum over so many bytes, the median of rounds."""
    many = torch.ones(n_bytes // 4)
    times = []
    for _ in range(N_ROUNDS):
        started = time.perf_counter()
        many.sum()
        times.append(time.perf_counter() - started)
    return median(times)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=12)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    for dtype in (torch.float32, DTYPE):
        select(CPU, dtype)
    for name in SHRUNK:
        config = shrunk(name, options.layers)
        outline, decoder = draw(config, DTYPE, CPU), load_decoder(RandomWeights(), decoder_spec(config, 8192))
        select(CPU, DTYPE)  # drawing chose operators for a device of its own
        n_pages = options.context // PAGE + 4
        needs = [block.mixer.need for block in decoder.blocks]
        sizes = Sizes(n_slots=1, n_pages=n_pages, page_size=PAGE, n_parked=64)
        store = Store(needs, sizes, DTYPE, CPU)
        cache = Cache({"target": store}, 1, n_pages, PAGE)
        held = sum(tensor.nbytes for tensor in store.held.page_tensors("full"))
        planned = sum(need.token_bytes(DTYPE) for need in outline.needs) * (n_pages + 1) * PAGE
        for start in range(0, options.context, 512):
            assert cache.reserve(0, "target", start, start + 512)
            with torch.inference_mode():
                decoder(cache.batch("target", [Span(0, [7] * 512, start, 0, 1)]), store)
            cache.commit(0, "target", start + 512)
        took = seconds_of(decoder, cache, options.context)
        limit = sum_seconds(outline.weight_bytes)
        sys.stdout.write(
            f"{name}, {options.layers} dense layers, {outline.weight_bytes / 1e9:.2f} GB, after {options.context}:"
            f" 1 row {took[1] * 1e3:.1f} ms (a sum of the weights {limit * 1e3:.1f} ms); "
            + ", ".join(f"{width} rows {took[width] / took[1]:.2f} x" for width in WIDTHS[1:])
            + f"; cache {held / planned:.4f} of planned\n"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
