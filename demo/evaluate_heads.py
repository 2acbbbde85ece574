"""Held-out evaluation of the draft heads: tokens per target pass along the target's own greedy answers.

Run as `python -m demo.evaluate_heads`. It writes the heads' model cards and adds the figures to training.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import get_args

import torch
from tokenizers import Tokenizer
from torch import Tensor

from demo import checkpoint, head_card, head_files, heldout, tasks
from demo.acceptance import DRAFT_TOKENS, before_loop
from demo.drafting import Drafter, drafter
from demo.generate import generate
from demo.head_files import Head
from demo.heads import streams
from demo.network import Network
from demo.tokenizer import render

TASKS = 30
MAX_NEW = 200


@dataclass(frozen=True)
class Found:
    """Tokens per target pass, and what it was counted over."""

    length: float
    tokens: int
    passes: int
    by_place: tuple[float, ...]  # how often the i-th drafted token was right, given that it was reached


@dataclass(frozen=True)
class Reply:
    """A prompt, the target's greedy answer to it and the target's streams over both."""

    prompt: list[int]
    answer: list[int]
    found: list[Tensor]  # L + 1 of [1, T, hidden]


@cache
@torch.inference_mode()
def replies(target: Network, tokenizer: Tokenizer, kind: tasks.Kind, count: int) -> tuple[Reply, ...]:
    """The target's answers to the first held-out tasks of a kind."""
    asked = [held.task for held in heldout.load(kind)[:count]]
    prompts = [list(tokenizer.encode(render(task.prompt_messages)).ids) for task in asked]
    made = []
    for prompt, answer in zip(prompts, generate(target, prompts, MAX_NEW), strict=True):
        tokens = torch.tensor([prompt + answer])
        made.append(Reply(prompt, answer, streams(target, tokens, torch.float32)))
    return tuple(made)


def rounds(made: Drafter, prompt: list[int], answer: list[int], states: Tensor) -> Iterator[tuple[int, int]]:
    """Play speculation along an answer; yields per pass how many drafted tokens were kept, and compared at most.

    states [T, width] are those the head reads, of the prompt and the answer. The prompt's pass gives answer[0],
    and an answer's last token always counts as the target's own.
    """
    whole = prompt + answer
    seen, newest = 0, len(prompt)
    while newest + 1 < len(whole):
        made.observe(states[seen:newest], whole[seen + 1 : newest + 1])
        seen = newest
        pairs = list(zip(made.draft(DRAFT_TOKENS), whole[newest + 1 : -1], strict=False))
        kept = next((place for place, (token, right) in enumerate(pairs) if token != right), len(pairs))
        newest += kept + 1
        yield kept, len(pairs)


def counted(kept: list[int], limit: int) -> int:
    """How many passes end within the first `limit` tokens; the first token is the prompt's own."""
    total = 1
    for index, n in enumerate(kept):
        total += n + 1
        if total > limit:
            return max(1, index)
    return len(kept)


@torch.inference_mode()
def measure(target: Network, head: Head, tokenizer: Tokenizer, kind: tasks.Kind, count: int = TASKS) -> Found:
    """Tokens per target pass on the first held-out tasks of a kind, replies counted until they loop."""
    tokens = passes = 0
    reached, right = [0] * DRAFT_TOKENS, [0] * DRAFT_TOKENS
    for reply in replies(target, tokenizer, kind, count):
        states = head_files.states(head, reply.found)[0]  # [T, width]
        played = list(rounds(drafter(head, target), reply.prompt, reply.answer, states))
        played = played[: counted([kept for kept, _ in played], before_loop(reply.answer))]
        tokens += sum(kept + 1 for kept, _ in played)
        passes += len(played)
        for kept, compared in played:
            for place in range(compared):
                reached[place] += kept >= place
                right[place] += kept > place
    rates = tuple(a / b for a, b in zip(right, reached, strict=True) if b)
    return Found(tokens / max(1, passes), tokens, passes, rates)


def main() -> None:
    """Measure every head, write their cards and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder", type=Path, default=Path(__file__).parent, help="holds target/ and the heads"
    )
    parser.add_argument("--heads", nargs="+", choices=head_files.NAMES, default=list(head_files.NAMES))
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    target = checkpoint.load(arguments.folder / "target")
    tokenizer = Tokenizer.from_file(str(arguments.folder / "target" / "tokenizer.json"))
    for name in arguments.heads:
        folder = arguments.folder / name
        head = head_files.load(folder)
        figures = {kind: measure(target, head, tokenizer, kind) for kind in get_args(tasks.Kind)}
        head_card.write(folder, head, figures)
        for kind, found in figures.items():
            places = " ".join(f"{rate:.2f}" for rate in found.by_place)
            sys.stdout.write(
                f"{name:7} {kind:10} {found.length:5.2f} over {found.passes} passes; by place {places}\n"
            )
        summary = json.loads((folder / "training.json").read_text())
        summary["acceptance_length"] = {kind: round(found.length, 3) for kind, found in figures.items()}
        (folder / "training.json").write_text(json.dumps(summary) + "\n")


if __name__ == "__main__":
    main()
