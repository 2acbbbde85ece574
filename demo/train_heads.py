"""Train the demo's draft heads on the frozen target: EAGLE-3, an MTP layer, DFlash, and what makes a DSpark of it.

Run as `python -m demo.train_heads` once the target is trained; an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from demo import checkpoint, evaluate_heads, head_files
from demo.head_rows import Mixture, frequent_tokens, write_answers
from demo.head_training import block_loss, chain_loss
from demo.heads import DFlashHead, DSparkHead, initialise
from demo.loop import Loop, Task
from demo.network import Network
from demo.train import DEFAULT_WORK

MINUTES = {"eagle3": 19.0, "mtp": 13.0, "dflash": 15.0, "dspark": 8.0}
# How deep a chain head is unrolled from a given part of its run on.
DEPTHS = ((0.0, 2), (0.25, 4))
CHECKED_TASKS = 10


def depth(progress: float) -> int:
    """Steps that a chain head is unrolled for."""
    return max(steps for begin, steps in DEPTHS if begin <= progress)


def head_loss(
    target: Network, head: head_files.Head, progress: Callable[[], float]
) -> Callable[[Any, Tensor, Tensor], Tensor]:
    """The loss over (head, tokens, weights [B, T + 1])."""
    if isinstance(head, DFlashHead):
        return block_loss(target)
    return chain_loss(target, lambda: depth(progress()))


def train(name: str, target: Network, tokenizer: Tokenizer, arguments: argparse.Namespace) -> None:
    """Train one head until its budget is spent, and export it."""
    rows = write_answers(target, tokenizer, arguments.work / "answers-heads")
    made = head_files.make(name, frequent_tokens(rows, head_files.DRAFT_VOCAB_SIZE))
    if isinstance(made, DSparkHead):
        trained = head_files.load(arguments.out / head_files.BACKBONE)
        assert isinstance(trained, DFlashHead)
        made.take_backbone(trained)
    else:
        initialise(made, target)
    minutes = MINUTES[name] * arguments.share
    loop = Loop(made, arguments.work / f"{name}.pt", minutes, arguments.device)

    def check() -> str:
        found = evaluate_heads.measure(target, loop.network, tokenizer, "continue", CHECKED_TASKS)
        return f"{name}: acceptance length {found.length:.2f} over {found.tokens} tokens"

    if not arguments.export_only:
        mixture = Mixture(tokenizer, rows, loop.clock.steps)
        loop.run(Task(head_loss(target, made, lambda: loop.clock.progress), mixture.batch, check))
    head_files.export(loop.network, arguments.out / name)
    loop.write_summary(arguments.out / name)


def main() -> None:
    """Train the heads one after the other, or only export what there is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=DEFAULT_WORK, help="checkpoints, outside the repository")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent, help="holds target/, gets the heads"
    )
    parser.add_argument("--heads", nargs="+", choices=head_files.NAMES, default=list(head_files.NAMES))
    parser.add_argument("--share", type=float, default=1.0, help="of the CPU minutes planned for each head")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--export-only", action="store_true", help="write the current checkpoints and stop")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    target = checkpoint.load(Path(__file__).parent / "target").to(arguments.device)
    target.requires_grad_(requires_grad=False)
    tokenizer = Tokenizer.from_file(str(Path(__file__).parent / "target" / "tokenizer.json"))
    for name in arguments.heads:
        logging.getLogger("demo.train").info("head: %s", name)
        train(name, target, tokenizer, arguments)


if __name__ == "__main__":
    main()
