"""Held-out evaluation of the demo: rename similarity, losses, acceptance lengths; writes the model cards.

Run as `python -m demo.evaluate`.
"""

from __future__ import annotations

import argparse
import difflib
import json
import random
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

import torch
from tokenizers import Tokenizer
from torch.nn import functional as F

from demo import acceptance, card, checkpoint, tasks
from demo.generate import decode, generate
from demo.network import Network
from demo.tokenizer import encode_task, render

RENAME_LINES = 12
RENAME_COUNT = 100
LONG_COUNT = 30
LOSS_COUNT = 100
SEED = 20
BATCH = 25


@dataclass(frozen=True)
class RenameScore:
    """How close the greedy answers are to the exact renames."""

    similarity: float
    exact: int
    count: int


def rename_tasks(count: int, max_lines: int = RENAME_LINES, min_lines: int = 2) -> list[tasks.Task]:
    """Held-out rename tasks, one per function, the same at every call."""
    rng = random.Random(SEED)
    pool = [f for f in tasks.functions("heldout") if f.renamable and min_lines <= f.line_count <= max_lines]
    return [tasks.rename_task(function, rng) for function in rng.sample(pool, min(count, len(pool)))]


def loss_tasks(kind: tasks.Kind) -> list[tasks.Task]:
    """Held-out tasks of a kind whose reference is scored."""
    rng = random.Random(SEED)
    pool = [f for f in tasks.functions("heldout") if f.line_count <= 2 * RENAME_LINES]
    if kind == "docstring":
        documented = [f for f in pool if f.docstring]
        return [tasks.docstring_task(f) for f in rng.sample(documented, min(LOSS_COUNT, len(documented)))]
    return [tasks.continue_task(f, rng) for f in rng.sample(pool, min(LOSS_COUNT, len(pool)))]


def similarity(answer: str, reference: str) -> float:
    """difflib's ratio of the whole texts."""
    return difflib.SequenceMatcher(None, answer, reference, autojunk=False).ratio()


def answers(network: Network, tokenizer: Tokenizer, asked: list[tasks.Task], max_new: int = 512) -> list[str]:
    """Greedy answers in batches of similar length, in the order of the tasks."""
    prompts = [tokenizer.encode(render(task.prompt_messages)).ids for task in asked]
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    texts = [""] * len(prompts)
    for start in range(0, len(order), BATCH):
        chosen = order[start : start + BATCH]
        for index, tokens in zip(
            chosen, generate(network, [prompts[i] for i in chosen], max_new), strict=True
        ):
            texts[index] = decode(tokenizer, tokens)
    return texts


def score_renames(
    network: Network, tokenizer: Tokenizer, asked: list[tasks.Task], max_new: int = 512
) -> RenameScore:
    """Mean similarity and number of exact answers."""
    given = answers(network, tokenizer, asked, max_new)
    ratios = [similarity(text, task.reference) for text, task in zip(given, asked, strict=True)]
    exact = sum(text == task.reference for text, task in zip(given, asked, strict=True))
    return RenameScore(sum(ratios) / len(ratios), exact, len(ratios))


@torch.inference_mode()
def answer_loss(network: Network, tokenizer: Tokenizer, asked: list[tasks.Task]) -> float:
    """Mean cross-entropy in nats per token of the reference answers."""
    total, count = 0.0, 0
    for task in asked:
        prompt, answer = encode_task(tokenizer, task.prompt_messages, task.reference)
        whole = torch.tensor(prompt + answer)
        logits = network.logits(network(whole[None, :-1])[0, len(prompt) - 1 :])  # [T, V]
        total += float(F.cross_entropy(logits, whole[len(prompt) :], reduction="sum"))
        count += len(whole) - len(prompt)
    return total / count


def measure(network: Network, tokenizer: Tokenizer) -> dict[str, float]:
    """Every figure of the target's model card."""
    renames = rename_tasks(RENAME_COUNT)
    short = score_renames(network, tokenizer, renames)
    long = score_renames(network, tokenizer, rename_tasks(LONG_COUNT, 2 * RENAME_LINES, RENAME_LINES + 1))
    return {
        "rename_similarity": short.similarity,
        "rename_exact": short.exact,
        "rename_tasks": short.count,
        "long_rename_similarity": long.similarity,
        "long_rename_exact": long.exact,
        "long_rename_tasks": long.count,
        "rename_loss": answer_loss(network, tokenizer, renames),
        "continue_loss": answer_loss(network, tokenizer, loss_tasks("continue")),
        "docstring_loss": answer_loss(network, tokenizer, loss_tasks("docstring")),
    }


def main() -> None:
    """Measure both checkpoints, write their cards and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent, help="holds target/ and draft/")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    target, draft = (checkpoint.load(arguments.folder / name) for name in ("target", "draft"))
    tokenizer = Tokenizer.from_file(str(arguments.folder / "target" / "tokenizer.json"))
    figures = measure(target, tokenizer)
    card.write_target(arguments.folder / "target", target, figures)
    accepted = {kind: acceptance.measure(target, draft, tokenizer, kind) for kind in get_args(tasks.Kind)}
    card.write_draft(arguments.folder / "draft", draft, accepted)
    rates = {f"{kind}_draft": asdict(found) for kind, found in accepted.items()}
    sys.stdout.write(json.dumps({**figures, **rates}, indent=2) + "\n")


if __name__ == "__main__":
    main()
