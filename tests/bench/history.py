"""What the drafters that read text cost: `begin` on a long prompt, and `draft` + `accept` per slot and step.

    python -m tests.bench.history [--length 32768]

Bars: 30 ms for `begin`, 60 us for a step. Every step keeps one to four tokens of a text that goes on as it began; the
last column is tokens per step if every guess were verified. Run it with nothing beside it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import sysconfig
import time
from collections.abc import Sequence
from functools import cache
from itertools import cycle, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slipstream.engine.api import Request
from slipstream.engine.core.slot_factory import Prepared, SlotFactory
from slipstream.engine.settings import Settings
from slipstream.engine.slot import Slot
from slipstream.engine.speculate.drafter import NO_DRAFT, Drafter, Guess, Kept, TextDrafter, Want
from slipstream.engine.speculate.registry import BY_NAME, DRAFTERS, Parts
from slipstream.engine.text.tokenizer import Tokenizer
from tests.bench.playing import ROOT

BEGIN_MS = 30.0
STEP_US = 60.0
N_BEGINS = 7
N_STEPS = 500
N_MAX = 16
VOCAB = 4096
NO_CACHE: Any = None  # of keys and values: drafters that read text need none
PARTS = Parts(Settings(parallel=1), {}, NO_CACHE, 0, VOCAB, frozenset(), 0, torch.device("cpu"))


def make(name: str) -> Drafter:
    """A drafter at its default settings."""
    return BY_NAME[name].build(PARTS)


@cache
def names() -> tuple[str, ...]:
    """The drafters that are asked on the host."""
    asked = [
        row for row in DRAFTERS if row.network is None and row.brought_by != "grammar" and row.is_offered
    ]
    return tuple(row.name for row in asked if isinstance(make(row.name), TextDrafter))


def python_text(n: int) -> list[int]:
    """Source of the standard library in the demo tokenizer's tokens."""
    tokenizer = Tokenizer(str(ROOT / "demo" / "target"))
    token_ids: list[int] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if len(token_ids) >= n:
            break
        token_ids += tokenizer.encode(path.read_text(encoding="utf-8"), add_special=False)
    return token_ids[:n]


def texts(n: int) -> dict[str, list[int]]:
    """[n] tokens of each kind."""
    random = np.random.default_rng(3)
    return {
        "python": python_text(n),
        "one token": [7] * n,
        "period 7": [i % 7 for i in range(n)],
        "random": random.integers(0, VOCAB, n).tolist(),
    }


def slot_of(tokens: Sequence[int], n_prompt: int) -> Slot:
    """A slot with the text's first tokens; the whole text is what its caller expects."""
    prepared = Prepared(tokens[:n_prompt], None, tuple(tokens))  # type: ignore[arg-type]
    factory = SlotFactory(Settings(draft_max=N_MAX), names(), len(tokens) + 1, VOCAB, frozenset())
    slot = factory.resolve(Request(id="bench", prompt=""), prepared)
    slot.id = 0
    return slot


def begin_ms(drafter: Drafter, tokens: Sequence[int], n_prompt: int) -> float:
    """Median over slots of their own, so that each has its history to copy too."""
    found = []
    for _ in range(N_BEGINS):
        slot = slot_of(tokens, n_prompt)
        started = time.perf_counter()
        drafter.begin(slot)
        found.append(1e3 * (time.perf_counter() - started))
        drafter.end(slot)
    return statistics.median(found)


def n_right(guessed: Sequence[int], true: Sequence[int]) -> int:
    """Tokens before the first wrong guess."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(guessed, true, strict=False)))


def step_us(drafter: Drafter, tokens: Sequence[int], n_prompt: int) -> tuple[float, float]:
    """Median of draft + accept, and tokens per step if each guess were verified."""
    slot = slot_of(tokens, n_prompt)
    drafter.begin(slot)
    found, worth = [], []
    for n_kept in cycle((1, 2, 3, 4)):
        at = len(slot.tokens)
        if len(found) == N_STEPS or at + N_MAX > len(tokens):
            break
        wants = [Want(slot, N_MAX)]
        started = time.perf_counter()
        guess: Guess = drafter.draft(wants)[0]
        spent = time.perf_counter() - started
        worth.append(1 + n_right(guess.token_ids, tokens[at : at + N_MAX]))
        for token_id in tokens[at : at + n_kept]:
            slot.append(token_id)
        kept = [Kept(slot, NO_DRAFT, 0)]
        started = time.perf_counter()
        drafter.accept(kept)
        found.append(1e6 * (spent + time.perf_counter() - started))
    drafter.end(slot)
    return statistics.median(found), statistics.mean(worth)


def main(arguments: Sequence[str]) -> int:
    """Print the table; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=32768, help="tokens of the prompt")
    parser.add_argument("--runs", type=int, default=1, help="the least of so many medians is shown")
    options = parser.parse_args(arguments)
    n_ctx = options.length + 4 * N_STEPS + N_MAX
    n_missed = 0
    sys.stdout.write(f"{'drafter':14} {'text':10} {'begin ms':>9} {'step us':>8} {'tokens/step':>11}\n")
    for name in names():
        drafter = make(name)
        for kind, tokens in texts(n_ctx).items():
            begins = min(begin_ms(drafter, tokens, options.length) for _ in range(options.runs))
            steps = [step_us(drafter, tokens, options.length) for _ in range(options.runs)]
            step = min(steps)[0]
            missed = [
                bar
                for bar, is_missed in (("begin", begins > BEGIN_MS), ("step", step > STEP_US))
                if is_missed
            ]
            n_missed += len(missed)
            line = f"{name:14} {kind:10} {begins:9.2f} {step:8.1f} {steps[0][1]:11.2f}"
            sys.stdout.write(line + "".join(f"  {bar} over its bar" for bar in missed) + "\n")
            sys.stdout.flush()
    return 1 if n_missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
