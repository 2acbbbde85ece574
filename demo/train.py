"""Train the demo's tokenizer and target on the standard library's source.

Run as `python -m demo.train`; an interrupted run goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from demo import checkpoint, curriculum, evaluate
from demo.loop import Loop, Task
from demo.network import Network, Shape
from demo.tokenizer import VOCAB_SIZE, save_tokenizer, train_tokenizer

TARGET_SHAPE = Shape(
    vocab_size=VOCAB_SIZE,
    hidden_size=256,
    intermediate_size=576,
    num_hidden_layers=5,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=128,
)
CHECKED_RENAMES = 20
CHECKED_LOSSES = 40
CHECKED_TOKENS = 256
DEFAULT_WORK = Path.home() / ".cache" / "slipstream-demo"
DEFAULT_MINUTES = 60.0


def loss_of(network: Network, tokens: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean cross-entropy of a batch [B, T + 1]."""
    hidden = network(tokens[:, :-1], torch.bfloat16)
    logits = network.logits(hidden.flatten(0, 1)).float()  # [B * T, V]
    losses = F.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="none")
    wanted = weights[:, 1:].flatten()
    return (losses * wanted).sum() / wanted.sum()


def prepare_tokenizer(work: Path) -> Tokenizer:
    """The run's tokenizer, trained once."""
    folder = work / "tokenizer"
    if not (folder / "tokenizer.json").exists():
        save_tokenizer(train_tokenizer(curriculum.texts()), folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def check_target(network: Network, tokenizer: Tokenizer) -> str:
    """How a target in training does on a few held-out tasks."""
    renames = evaluate.rename_tasks(CHECKED_RENAMES)
    score = evaluate.score_renames(network, tokenizer, renames, CHECKED_TOKENS)
    continued = evaluate.answer_loss(network, tokenizer, evaluate.loss_tasks("continue")[:CHECKED_LOSSES])
    return f"rename similarity {score.similarity:.3f}, exact {score.exact}, continue loss {continued:.3f}"


def target_task(network: Network, tokenizer: Tokenizer, seed: int) -> Task:
    """Next-token prediction on the curriculum, checked on a few held-out renames."""
    source = curriculum.Curriculum(tokenizer, seed)
    return Task(torch.compile(loss_of, dynamic=True), source.batch, lambda: check_target(network, tokenizer))


def options(description: str | None, minutes: float, out: str) -> argparse.ArgumentParser:
    """The command line that training and distillation share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--work", type=Path, default=DEFAULT_WORK, help="checkpoints, outside the repository")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / out)
    parser.add_argument(
        "--minutes", type=float, default=minutes, help="CPU minutes in all, resumed ones included"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--export-only", action="store_true", help="write the current checkpoint and stop")
    return parser


def main() -> None:
    """Train, or only export what there is."""
    arguments = options(__doc__, DEFAULT_MINUTES, "target").parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    arguments.work.mkdir(parents=True, exist_ok=True)
    tokenizer = prepare_tokenizer(arguments.work)
    loop = Loop(Network(TARGET_SHAPE), arguments.work / "target.pt", arguments.minutes, arguments.device)
    if not arguments.export_only:
        loop.run(target_task(loop.network, tokenizer, seed=loop.clock.steps))
    checkpoint.export(loop.network, arguments.out, arguments.work / "tokenizer")
    loop.write_summary(arguments.out)


if __name__ == "__main__":
    main()
