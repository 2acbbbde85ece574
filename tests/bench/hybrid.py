"""What speculation costs a hybrid: rows of drafts, drafts that are all rejected, memory, and prefixes resumed.

    python -m tests.bench.inflate demo/hybrid /tmp/big --hidden 1280 --layers 24 --ffn 3584 --heads 8 --kv-heads 2
    python -m tests.bench.hybrid --model /tmp/big

Sides alternate, medians of ratios of pairs count. Run it with nothing beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.api import Speculate
from engine.service.launch import launch
from engine.service.thread import ThreadEngine
from engine.settings import Settings
from tests.bench.bars import PLAIN, ratios, say, step_s
from tests.bench.playing import Ask, demo_asks, play, random_asks

N_CONTEXT = 500
VOCABULARY = 4096  # of the demo tokenizer
N_DRAFTS = 16


def memory(engine: ThreadEngine) -> None:
    """Bytes of a slot with parked rows for 16 drafts, against its state with the keys and values of 8,192 tokens."""
    needs, dtype = engine._engine.target.needs, engine._engine.target.dtype
    state = sum(need.slot_bytes(dtype) for need in needs)
    parked = N_DRAFTS * sum(need.parked_bytes(dtype) for need in needs)
    kv = 8192 * sum(need.token_bytes(dtype) for need in needs)
    say(
        f"a slot: state {state / 2**20:.2f} MiB, keys and values of 8,192 tokens {kv / 2**20:.2f} MiB,"
        f" {N_DRAFTS} parked rows {parked / 2**20:.2f} MiB: {(state + kv + parked) / (state + kv):.3f} x"
    )


def rows(engine: ThreadEngine, n_pairs: int) -> None:
    """A pass with drafts against one without: rows 1 + n drafts."""
    for n_rows in (2, 4, 8, 9, 16, 17):
        found = []
        for _ in range(n_pairs):
            one, many = step_s(engine, N_CONTEXT), step_s(engine, N_CONTEXT, n_rows)
            found.append((one, many, many / one))
        one, many, ratio = (statistics.median(column) for column in zip(*found, strict=True))
        say(f"pass of {n_rows:2} rows: {1e3 * many:.1f} ms, of 1: {1e3 * one:.1f} ms; {ratio:.2f} x")


async def rejected(engine: ThreadEngine, n_pairs: int, name: str) -> None:
    """A drafter that guesses at random, n_max 8, against plain decoding."""
    asks = random_asks(VOCABULARY, n_pairs, 1.0)
    garbage = Speculate(types=("garbage",), n_max=8)
    ratio, plain, rate, length = await ratios(engine, asks, garbage)
    say(
        f"all rejected, {name}: {ratio:.2f} x plain ({plain:.1f} -> {rate:.1f} tokens/s, length {length:.2f})"
    )


async def prefixes(engine: ThreadEngine, n_pairs: int, n_prompt: int) -> None:
    """Time to the first token of a prompt that shares 90 % of its tokens with an earlier one, against a new one."""
    found = []
    for i in range(n_pairs):
        first, other = _tokens(n_prompt, 2 * i), _tokens(n_prompt, 2 * i + 1)
        shared = n_prompt * 9 // 10
        tenant = f"prefix-{i}"
        cold = await play(engine, Ask("random", first, 4), PLAIN, tenant)
        hit = await play(engine, Ask("random", first[:shared] + other[shared:], 4), PLAIN, tenant)
        assert hit.done is not None
        found.append((cold.ttft_s, hit.ttft_s, cold.ttft_s / hit.ttft_s, hit.done.usage.n_cached))
    cold_s, hit_s, ratio, cached = (statistics.median(column) for column in zip(*found, strict=True))
    say(
        f"prompt of {n_prompt}, 90 % shared: first token after {1e3 * hit_s:.0f} ms with {cached:.0f} tokens cached,"
        f" {1e3 * cold_s:.0f} ms without: {ratio:.1f} x sooner"
    )


def _tokens(n: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(4, VOCABULARY, (n,), generator=generator).tolist())


async def speed(engine: ThreadEngine, n_pairs: int) -> None:
    """The target's own MTP layer and the default chain against plain decoding."""
    network = next((name for name in engine.info.drafters if name.startswith("draft-")), None)
    for kind in ("continue", "rename"):
        for types in ((network,), ("suffix", network)):
            if network is None:
                continue
            on = Speculate(types=tuple(one for one in types if one), n_max=8)
            ratio, plain, rate, length = await ratios(engine, demo_asks([kind], n_pairs, 160), on)
            say(
                f"{kind:9} {'+'.join(on.types or ()):20} {ratio:.2f} x plain ({plain:.1f} -> {rate:.1f} tokens/s,"
                f" acceptance length {length:.2f})"
            )


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument(
        "--prompt", type=int, default=2000, help="tokens of the prompts of which 90 %% are shared"
    )
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args(arguments)
    base = Settings(
        model=options.model, dtype=options.dtype, ctx_size=8192, parallel=2, spec_type="auto,garbage"
    )
    fixed = launch(replace(base, spec_adaptive=False))
    info = fixed.info
    say(
        f"{info.n_params / 1e6:.0f} M parameters, {info.weight_bytes / 1e6:.0f} MB, {torch.get_num_threads()} threads,"
        f" drafters {', '.join(info.drafters)}, medians of {options.pairs} pairs"
    )
    memory(fixed)
    rows(fixed, options.pairs)

    async def run_fixed() -> None:
        await rejected(fixed, options.pairs, "8 drafts every step")
        await prefixes(fixed, options.pairs, options.prompt)
        await fixed.close()

    asyncio.run(run_fixed())
    adaptive = launch(base)

    async def run_adaptive() -> None:
        await rejected(adaptive, options.pairs, "lengths that adapt")
        await speed(adaptive, options.pairs)
        await adaptive.close()

    asyncio.run(run_adaptive())


if __name__ == "__main__":
    main(sys.argv[1:])
