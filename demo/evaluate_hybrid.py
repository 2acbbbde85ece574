"""Held-out evaluation of the hybrid target, the prediction layer it ships, and its draft; writes their cards.

Run as `python -m demo.evaluate_hybrid`. The acceptance lengths are added to training.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import get_args

import torch
from tokenizers import Tokenizer

from demo import (
    acceptance,
    card,
    checkpoint,
    evaluate,
    evaluate_heads,
    heldout,
    hybrid_card,
    hybrid_mtp,
    tasks,
)
from demo.acceptance import DRAFT_TOKENS
from demo.evaluate_heads import Found
from demo.head_training import unroll
from demo.heads import ChainHead
from demo.network import Network
from demo.tokenizer import encode_task


@torch.inference_mode()
def reference_places(
    target: Network, head: ChainHead, prompt: list[int], answer: list[int]
) -> list[list[bool]]:
    """Along a reference: whether the i-th token drafted from place p of the answer is the target's first choice.

    The first list belongs to answer[1], as the prompt's own pass gives answer[0]. The head is fed the reference.
    """
    whole = torch.tensor([prompt + answer])  # [1, T]
    states = target(whole)  # [1, T, hidden]
    chosen = target.logits(states)[0].argmax(-1)  # [T], of the token after each
    starts = whole.shape[1] - 1
    padded = torch.nn.functional.pad(whole, (0, DRAFT_TOKENS))
    scored = unroll(head, states[:, :starts], target.embed_tokens(padded), DRAFT_TOKENS)
    drafted = [head.scores(step[0], target).argmax(-1) for step in scored]  # of the tokens at p + step + 2
    found = []
    for place in range(len(prompt) - 1, whole.shape[1] - 2):
        ahead = min(DRAFT_TOKENS, whole.shape[1] - 2 - place)
        found.append([bool(drafted[step][place] == chosen[place + step + 1]) for step in range(ahead)])
    return found


def passes(places: list[list[bool]]) -> int:
    """Target passes along a reference; each gives the drafts before the first wrong one, and one token more."""
    place = count = 0
    while place < len(places):
        right = places[place]
        place += (right.index(False) if False in right else len(right)) + 1
        count += 1
    return count


def reference_length(target: Network, head: ChainHead, tokenizer: Tokenizer, kind: tasks.Kind) -> float:
    """Tokens per target pass along the reference answers of the short held-out tasks of a kind."""
    tokens = n_passes = 0
    for held in heldout.load(kind, "short"):
        places = reference_places(
            target, head, *encode_task(tokenizer, held.task.prompt_messages, held.task.reference)
        )
        n_passes += passes(places)
        tokens += len(places)
    return tokens / max(1, n_passes)


def substitutions(network: Network, tokenizer: Tokenizer) -> dict[str, float]:
    """What the similarity of renames hides: how close a copy without any renaming is, and the names replaced.

    A new name counts as often as the answer has it, at most as often as the reference has.
    """
    asked = evaluate.rename_tasks(evaluate.RENAME_COUNT)
    wanted = written = 0
    copies = []
    for task, answer in zip(asked, evaluate.answers(network, tokenizer, asked), strict=True):
        request, source = task.prompt_messages[-1]["content"].split("\n", 1)
        copies.append(evaluate.similarity(source, task.reference))
        name = tasks.word(request.split("`")[3])
        n_wanted = len(name.findall(task.reference))
        wanted += n_wanted
        written += min(n_wanted, len(name.findall(answer)))
    return {"copy_similarity": sum(copies) / len(copies), "names_written": written, "names_wanted": wanted}


def add_figures(folder: Path, figures: dict[str, dict[str, float]]) -> None:
    """Keep acceptance lengths beside what the training cost."""
    summary = json.loads((folder / "training.json").read_text())
    rounded = {
        name: {kind: round(length, 3) for kind, length in lengths.items()}
        for name, lengths in figures.items()
    }
    (folder / "training.json").write_text(json.dumps(summary | rounded) + "\n")


def measure_target(folder: Path, target: Network, tokenizer: Tokenizer) -> dict[str, dict[str, float]]:
    """The hybrid and its prediction layer: figures, card, and the layer's acceptance lengths."""
    mtp = hybrid_mtp.load(folder)
    figures = evaluate.measure(target, tokenizer) | substitutions(target, tokenizer)
    kinds = get_args(tasks.Kind)
    found: dict[str, Found] = {kind: evaluate_heads.measure(target, mtp, tokenizer, kind) for kind in kinds}
    along = {kind: reference_length(target, mtp, tokenizer, kind) for kind in kinds}
    hybrid_card.write(folder, target, figures, (found, along))
    lengths = {
        "acceptance_length": {kind: one.length for kind, one in found.items()},
        "reference_acceptance_length": along,
    }
    add_figures(folder, lengths)
    return {"figures": figures, **lengths}


def measure_draft(folder: Path, target: Network, tokenizer: Tokenizer) -> dict[str, dict[str, float]]:
    """The hybrid's draft: card and acceptance lengths."""
    draft = checkpoint.load(folder)
    found = {kind: acceptance.measure(target, draft, tokenizer, kind) for kind in get_args(tasks.Kind)}
    card.write_draft(folder, draft, found)
    lengths = {
        "acceptance_length": {kind: one.length for kind, one in found.items()},
        "reference_acceptance_length": {kind: one.reference_length for kind, one in found.items()},
    }
    add_figures(folder, lengths)
    return lengths


def main() -> None:
    """Measure both checkpoints, write their cards and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder", type=Path, default=Path(__file__).parent, help="holds hybrid/ and hybrid-draft/"
    )
    parser.add_argument("--only", choices=("hybrid", "hybrid-draft"), help="measure one of the two")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    target = checkpoint.load(arguments.folder / "hybrid").requires_grad_(requires_grad=False)
    tokenizer = Tokenizer.from_file(str(arguments.folder / "hybrid" / "tokenizer.json"))
    for name, measure in (("hybrid", measure_target), ("hybrid-draft", measure_draft)):
        if arguments.only in (None, name):
            figures = measure(arguments.folder / name, target, tokenizer)
            sys.stdout.write(json.dumps({name: figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
