"""The losslessness suite: the same tokens as plain decoding, over drafters, sampling, slots and disturbances.

    python -m tests.oracle.lossless [--dtype float32] [--rounds 3]

runs it whole and prints a table; `test_lossless.py` runs a sample of it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from engine.api import Chat, Sampling
from engine.text.chat import load_chat_template
from tests.oracle.lab import Bench, Case, Lab, differences, play

ROOT = Path(__file__).parents[2]
SAMPLINGS: Mapping[str, Sampling] = {
    "greedy": Sampling(temperature=0.0, top_p=1.0, top_k=0),
    "warm": Sampling(temperature=0.8, top_p=1.0, top_k=0),
    "all": Sampling(
        temperature=1.0,
        top_p=0.92,
        min_p=0.02,
        repeat_penalty=1.3,
        repeat_last_n=40,
        presence_penalty=0.8,
        frequency_penalty=0.4,
        logit_bias=((20, 1.5), (30, -2.0)),
    ),
}
CHAINS: Sequence[tuple[str, ...]] = (
    (),
    ("ngram-simple",),
    ("draft-model",),
    ("ngram-simple", "draft-model"),
    ("garbage",),
    ("scripted",),
)


def demo_cases(lab: Lab, name: str, n_cases: int, seed: int = 0) -> list[Case]:
    """Demo tasks as requests: half of them share another one's prompt with another seed."""
    template = load_chat_template(ROOT / "demo" / "target", lab.tokenizer)
    assert template is not None
    with (ROOT / "demo" / "tasks.jsonl").open() as file:
        tasks = [json.loads(line) for line in file]
    tasks = tasks[seed % 7 :: 7]
    cases = []
    for i in range(n_cases):
        chat = Chat(tasks[i // 2 % len(tasks)]["messages"])
        prompt = tuple(template.encode(chat)[:300])
        base = SAMPLINGS[name]
        sampling = replace(base, seed=1000 * seed + i, ignore_eos=i % 3 > 0)
        cases.append(Case(prompt, sampling, n_max=(8, 1, 16, 3)[i % 4], max_tokens=40 + 8 * (i % 3)))
    return cases


def benches(chain: tuple[str, ...]) -> Iterator[Bench]:
    """One slot; four with few pages, so that slots are preempted; eight with a small row budget."""
    yield Bench(chain, n_slots=1, batch_size=32, adaptive=False)
    yield Bench(chain, n_slots=4, n_pages=26)
    yield Bench(chain, n_slots=8, n_pages=512, batch_size=48, page_size=8, adaptive=False)


def compare(lab: Lab, name: str, n_cases: int, seed: int) -> Iterator[tuple[Bench, int, int, int, int]]:
    """Per engine: (bench, tokens compared, requests that differ, preemptions, prompt tokens from the cache)."""
    cases = demo_cases(lab, name, n_cases, seed)
    expected = play(lab, Bench(), cases, seed=seed).tokens
    for i, bench in enumerate(bench for chain in CHAINS for bench in benches(chain)):
        yield (bench, *disturbed(lab, bench, cases, expected, 100 * seed + i))


def disturbed(
    lab: Lab, bench: Bench, cases: Sequence[Case], expected: Mapping[int, Sequence[int]], seed: int
) -> tuple[int, int, int, int]:
    """One engine under random arrivals and cancels against the expected tokens."""
    played = play(lab, bench, cases, seed=seed + 1, cancel_share=0.4, known=expected)
    assert not played.failed
    assert set(played.tokens) == set(expected)
    assert played.stats is not None
    assert played.stats.n_pages_held == 0
    n_tokens, n_wrong = differences(played, expected)
    return n_tokens, n_wrong, played.stats.n_preempted, played.n_cached


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--cases", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args(arguments)
    total = wrong = preempted = cached = 0
    started = time.perf_counter()
    for dtype, name, seed in itertools.product(options.dtype, SAMPLINGS, range(options.rounds)):
        lab = Lab(ROOT / "demo" / "target", ROOT / "demo" / "draft", getattr(torch, dtype))
        for bench, n_tokens, n_wrong, n_preempted, n_cached in compare(lab, name, options.cases, seed):
            total, wrong = total + n_tokens, wrong + n_wrong
            preempted, cached = preempted + n_preempted, cached + n_cached
            sys.stdout.write(
                f"{dtype:9} {name:7} slots {bench.n_slots} {'+'.join(bench.types) or 'plain':25}"
                f" {n_tokens:6} tokens, {n_wrong} requests differ, {n_preempted} preempted\n"
            )
            sys.stdout.flush()
    sys.stdout.write(
        f"total: {total} tokens, {wrong} requests differ, {preempted} preemptions,"
        f" {cached} prompt tokens from the prefix cache, {time.perf_counter() - started:.0f} s\n"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
