"""Distil the demo's draft on the target's distributions and on text the target wrote.

Run as `python -m demo.distill` once the target is trained; an interrupted run goes on.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from demo import acceptance, checkpoint, tasks
from demo.curriculum import ROW_STEP, Batch, Curriculum, Row, Stage, pad, rows_per_batch
from demo.generate import generate
from demo.loop import Loop, Task
from demo.network import Network, Shape
from demo.tokenizer import VOCAB_SIZE, render
from demo.train import options, prepare_tokenizer

DRAFT_SHAPE = Shape(
    vocab_size=VOCAB_SIZE,
    hidden_size=128,
    intermediate_size=320,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
)
DEFAULT_MINUTES = 25.0
# The first part of the run is on real text alone, where batches are cheap.
REAL_UNTIL = 0.5
REAL_AFTER = 0.35
STAGES = (
    Stage(0.00, 0.40, 0.30, 0.30, 0.00, 5, 128),
    Stage(0.10, 0.05, 0.35, 0.50, 0.10, 12, 384),
)
# Kinds of the prompts the target answers: mostly continuations, the hardest to draft.
ANSWERED: dict[tasks.Kind, float] = {"continue": 0.6, "rename": 0.25, "docstring": 0.15}
ANSWERED_LINES = 16
PROMPT_TOKENS = 256
MAX_NEW = 96
GROUP = 64
GROUPS = 24
PROMPT_WEIGHT = 0.25


def divergence(target: Network) -> Callable[[Network, Tensor, Tensor], Tensor]:
    """The loss: weighted KL of the draft's distributions from the target's over a batch [B, T + 1]."""

    def target_scores(tokens: Tensor) -> Tensor:
        return target.logits(target(tokens, torch.bfloat16).flatten(0, 1))  # [B * T, V]

    def draft_loss(draft: Network, tokens: Tensor, weights: Tensor, scores: Tensor) -> Tensor:
        guesses = draft.logits(draft(tokens, torch.bfloat16).flatten(0, 1))
        wanted = scores.float().log_softmax(-1)
        losses = F.kl_div(guesses.float().log_softmax(-1), wanted, reduction="none", log_target=True).sum(-1)
        return (losses * weights).sum() / weights.sum()

    score, fit = torch.compile(target_scores, dynamic=True), torch.compile(draft_loss, dynamic=True)

    def loss(draft: Network, tokens: Tensor, weights: Tensor) -> Tensor:
        with torch.no_grad():
            scores = score(tokens[:, :-1])
        return fit(draft, tokens[:, :-1], weights[:, 1:].flatten(), scores)

    return loss


class Answers:
    """Rows of task prompts with the target's own answers, written once and then drawn from."""

    def __init__(self, target: Network, tokenizer: Tokenizer, seed: int) -> None:
        self.target, self.tokenizer, self.rng = target, tokenizer, random.Random(seed)
        self.functions = [f for f in tasks.functions("train") if 3 <= f.line_count <= ANSWERED_LINES]
        self.renamable = [f for f in self.functions if f.renamable]
        self.documented = [f for f in self.functions if f.docstring]

    def write(self, file: Path) -> list[Row]:
        """The rows of a file, or new ones that are then kept in it."""
        if file.exists():
            return [(ids, weights) for ids, weights in torch.load(file, weights_only=True)]
        rows = [row for group in range(GROUPS) for row in self.group(0.0 if group % 2 else 0.7)]
        torch.save(rows, file)
        return rows

    def group(self, temperature: float, max_new: int = MAX_NEW) -> list[Row]:
        """New rows, as many as are generated together."""
        prompts = [self._prompt() for _ in range(GROUP)]
        answers = generate(self.target, prompts, max_new, temperature)
        return [
            (prompt + answer, [PROMPT_WEIGHT] * len(prompt) + [1.0] * len(answer))
            for prompt, answer in zip(prompts, answers, strict=True)
        ]

    def _prompt(self) -> list[int]:
        while True:
            kind = self.rng.choices(list(ANSWERED), list(ANSWERED.values()))[0]
            ids = list(self.tokenizer.encode(render(self._task(kind).prompt_messages)).ids)
            if len(ids) <= PROMPT_TOKENS:
                return ids

    def _task(self, kind: tasks.Kind) -> tasks.Task:
        if kind == "rename":
            return tasks.rename_task(self.rng.choice(self.renamable), self.rng)
        if kind == "docstring":
            return tasks.docstring_task(self.rng.choice(self.documented))
        return tasks.continue_task(self.rng.choice(self.functions), self.rng)


class Mixture:
    """Real text first, then mostly the target's answers."""

    def __init__(self, curriculum: Curriculum, answers: Answers, file: Path) -> None:
        self.curriculum, self.answers, self.file = curriculum, answers, file
        self.rows: list[Row] = []

    def batch(self, progress: float) -> Batch:
        """The next batch of a run that is `progress` (0 to 1) done."""
        rng = self.curriculum.rng
        if progress < REAL_UNTIL or rng.random() < REAL_AFTER:
            return self.curriculum.batch(progress)
        if not self.rows:
            self.rows = sorted(self.answers.write(self.file), key=lambda row: len(row[0]))
        first = rng.randrange(len(self.rows))
        size = -(-(len(self.rows[first][0]) - 1) // ROW_STEP) * ROW_STEP
        count = min(rows_per_batch(size), first + 1)
        # Rows are sorted, so those just before the chosen one fit its length.
        return pad(self.rows[first + 1 - count : first + 1], size)


def main() -> None:
    """Distil, or only export what there is."""
    arguments = options(__doc__, DEFAULT_MINUTES, "draft").parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = prepare_tokenizer(arguments.work)
    target = checkpoint.load(arguments.out.parent / "target").to(arguments.device)
    loop = Loop(Network(DRAFT_SHAPE), arguments.work / "draft.pt", arguments.minutes, arguments.device)

    def check() -> str:
        found = acceptance.measure(target, loop.network, tokenizer, "continue")
        return f"continue agreement {found.agreement:.3f}, acceptance length {found.length:.2f}"

    if not arguments.export_only:
        seed = loop.clock.steps
        answers = Answers(target, tokenizer, seed)
        mixture = Mixture(Curriculum(tokenizer, seed, STAGES), answers, arguments.work / "answers.pt")
        loop.run(Task(divergence(target), mixture.batch, check))
    checkpoint.export(loop.network, arguments.out, arguments.work / "tokenizer")
    loop.write_summary(arguments.out)


if __name__ == "__main__":
    main()
