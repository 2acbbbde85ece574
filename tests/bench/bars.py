"""CPU speed against its physical limit and against plain decoding, on a checkpoint of realistic size.

    python -m tests.bench.inflate demo/target /tmp/big --hidden 1024 --layers 28 --ffn 4096 --heads 8 --kv-heads 4
    python -m tests.bench.bars --model /tmp/big

The drafter `garbage` shows what speculation costs where nothing is to gain. Sides alternate, and the median of
the ratios of pairs counts. Run it with nothing beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from slipstream.engine.api import Speculate
from slipstream.engine.batch import Span
from slipstream.engine.core import forward
from slipstream.engine.service.run.thread import ThreadEngine
from slipstream.engine.service.start.launch import launch
from slipstream.engine.settings import Settings
from slipstream.kernels.choose.op import RowParams, choose
from tests.bench.playing import ROOT, Ask, demo_asks, play, random_asks

N_PAIRS = 7
HISTORY = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache", "suffix")


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def median_s(work: Callable[[], object], n: int = 15) -> float:
    """Median seconds of a call, after three that do not count."""
    times = []
    for i in range(n + 3):
        started = time.perf_counter()
        work()
        if i >= 3:
            times.append(time.perf_counter() - started)
    return statistics.median(times)


@torch.inference_mode()
def bandwidth() -> float:
    """Bytes/s at which oneDNN's prepacked linears read their weights for one row: 8192 x 2048, 20 of them.

    In bfloat16, or where it has no products in that in float32.
    """
    dtype = torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
    reorder, product = torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise
    packed = [reorder(torch.randn(8192, 2048).to(dtype)) for _ in range(20)]  # 32 or 64 MiB each
    x = torch.randn(1, 2048).to(dtype)
    seconds = median_s(lambda: [product(x, one, None, "none", [], "") for one in packed])
    return 20 * 8192 * 2048 * dtype.itemsize / seconds


@torch.inference_mode()
def step_s(engine: ThreadEngine, n_past: int, n_rows: int = 1) -> float:
    """Seconds of a pass of the target at a context length, all rows but the first provisional and then rejected.

    What the cache holds of the context does not change the time, so nothing is computed for it.
    """
    core = engine._engine
    cache, target = core._cache, core.target.network
    assert cache.reserve(0, forward.STORE, 0, n_past + n_rows)
    store = cache.stores[forward.STORE]
    span = Span(0, [5] * n_rows, n_past, n_rows - 1, n_rows)

    def work() -> None:
        if store.parking is not None:
            store.parking.reset(0, n_past)
        cache.commit(0, forward.STORE, n_past)
        assert cache.reserve(0, forward.STORE, n_past, n_past + n_rows, n_rows - 1)
        target.forward(cache.batch(forward.STORE, [span]), store)

    try:
        return median_s(work)
    finally:
        cache.drop(0)


PLAIN = Speculate(types=("none",))


async def ratios(
    engine: ThreadEngine, asks: Sequence[Ask], on: Speculate, off: Speculate = PLAIN
) -> tuple[float, float, float, float]:
    """Medians of (on ÷ off, tokens/s off, tokens/s on) over pairs, and the acceptance length of on."""
    found, plain_rates, rates = [], [], []
    n_tokens = n_steps = 0
    for i, ask in enumerate(asks):
        first, second = (on, off) if i % 2 else (off, on)
        one, two = await play(engine, ask, first), await play(engine, ask, second)
        fast, plain = (one, two) if i % 2 else (two, one)
        assert fast.token_ids == plain.token_ids, "speculation changed the text"
        n = fast.n_counted
        seconds, tokens, steps = fast.decoding(n)
        plain_seconds, plain_tokens, _ = plain.decoding(n)
        if tokens < 8:
            continue
        n_tokens, n_steps = n_tokens + tokens, n_steps + steps
        plain_rates.append(plain_tokens / plain_seconds)
        rates.append(tokens / seconds)
        found.append(rates[-1] / plain_rates[-1])
    return (
        statistics.median(found),
        statistics.median(plain_rates),
        statistics.median(rates),
        n_tokens / n_steps,
    )


def context_cost(engine: ThreadEngine, n_pairs: int) -> None:
    """What 7,600 more tokens of context cost a step, against reading their keys and values."""
    layers = engine._engine.target.network.needs
    kv_bytes = sum(one.token_bytes(torch.bfloat16) for one in layers) * (8100 - 500)
    found = []
    for _ in range(n_pairs):
        rate = bandwidth()
        short, long = step_s(engine, 500), step_s(engine, 8100)
        found.append((rate, short, long, (long - short) / (kv_bytes / rate)))
    rate, short, long, ratio = (statistics.median(column) for column in zip(*found, strict=True))
    say(
        f"prepacked linears read {rate / 1e9:.1f} GB/s; step at 500 {1e3 * short:.1f} ms, at 8100 {1e3 * long:.1f} ms;"
        f" difference {ratio:.2f} x KV bytes / bandwidth"
    )


async def plain_rate(engine: ThreadEngine, n_pairs: int) -> None:
    """Plain decoding at a short context against reading every weight once a token."""
    found = []
    for ask in demo_asks(["rename"], n_pairs, 80):
        rate = bandwidth()
        reply = await play(engine, ask, Speculate(types=("none",)))
        seconds, tokens, _ = reply.decoding(len(reply.token_ids))
        limit = rate / engine.info.weight_bytes
        found.append((rate, limit, tokens / seconds, tokens / seconds / limit))
    rate, limit, plain, share = (statistics.median(column) for column in zip(*found, strict=True))
    say(
        f"plain {plain:.1f} tokens/s = {share:.2f} of the limit ({limit:.1f} tokens/s at {rate / 1e9:.1f} GB/s;"
        f" {min(one[3] for one in found):.2f} to {max(one[3] for one in found):.2f})"
    )


async def decoding(engine: ThreadEngine, options: argparse.Namespace) -> None:
    await plain_rate(engine, options.pairs)
    vocab_size = 4096  # of the demo tokenizer; inflated ids never occur
    network = next(name for name in engine.info.drafters if name.startswith("draft-"))
    auto = ("suffix", network)  # what `auto` loads beside a network; no request here brings a prediction
    names = {HISTORY: "history", auto: "auto"}
    sets = {
        "rename": demo_asks(["rename"], options.pairs, 160),
        "continue": demo_asks(["continue"], options.pairs, 160),
        "random": random_asks(vocab_size, options.pairs, 0.0),
        "random T1": random_asks(vocab_size, options.pairs, 1.0),
    }
    for kind, asks in sets.items():
        if options.kinds and kind not in options.kinds:
            continue
        alone: dict[tuple[str, ...], float] = {}
        for types in (*((network if one == "network" else one,) for one in options.types), HISTORY, auto):
            on = Speculate(types=types, n_max=options.draft_max)
            ratio, plain, rate, length = await ratios(engine, asks, on)
            if len(types) == 1:
                alone[types] = ratio
            say(
                f"{kind:9} {names.get(types, types[0]):15} {ratio:5.2f} x plain  ({plain:6.1f} -> {rate:6.1f} tokens/s,"
                f" acceptance length {length:.2f}, {len(asks)} pairs)"
            )
        if not alone:
            continue
        best = max(alone, key=lambda types: alone[types])
        sides = (Speculate(types=types, n_max=options.draft_max) for types in (auto, best))
        ratio, _, _, _ = await ratios(engine, asks, *sides)
        say(f"{kind:9} auto            {ratio:5.2f} x {best[0]}, the best alone")
    await engine.close()


@torch.inference_mode()
def picking(vocab_size: int = 151_936) -> None:
    logits = torch.randn(1, vocab_size) * 3
    for name, top_p in (("T 0.8", 1.0), ("T 0.8, top_p 0.95", 0.95)):
        params = RowParams(
            torch.tensor([0.8]),
            torch.tensor([0], dtype=torch.int32),
            torch.tensor([top_p]),
            torch.tensor([0.0]),
            torch.tensor([1]),
            torch.tensor([100]),
        )
        seconds = median_s(partial(choose, logits, params))
        say(f"pick at {vocab_size} words, {name}: {1e3 * seconds:.2f} ms a row")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--model-draft", default=str(ROOT / "demo" / "draft"))
    parser.add_argument("--pairs", type=int, default=N_PAIRS)
    parser.add_argument("--kinds", nargs="*", help="which of rename, continue, random, 'random T1'")
    parser.add_argument("--types", nargs="*", default=[*HISTORY, "network", "garbage"])
    parser.add_argument("--draft-max", type=int, default=16)
    parser.add_argument("--threads", type=int, default=None)
    options = parser.parse_args(arguments)
    engine = launch(
        Settings(
            model=options.model,
            model_draft=options.model_draft,
            spec_type=",".join((*HISTORY, "auto", "garbage")),
            dtype="bfloat16",
            ctx_size=8192,
            parallel=2,
            spec_ngram_simple_size_n=3,
            spec_ngram_map_k_size_n=3,
            spec_ngram_map_k4v_size_n=3,
            spec_ngram_map_k4v_size_m=8,
            spec_ngram_mod_n_match=4,
            spec_ngram_mod_n_min=2,
            threads=options.threads,
        )
    )
    info = engine.info
    say(
        f"{info.n_params / 1e6:.0f} M parameters, {info.weight_bytes / 1e6:.0f} MB, vocabulary {info.vocab_size},"
        f" {torch.get_num_threads()} threads, medians of {options.pairs} pairs"
    )
    context_cost(engine, options.pairs)
    say("rows: " + "  ".join(f"{n}: {1e3 * step_s(engine, 500, n):.1f} ms" for n in (1, 2, 4, 8, 16, 32)))
    picking()
    asyncio.run(decoding(engine, options))


if __name__ == "__main__":
    main(sys.argv[1:])
