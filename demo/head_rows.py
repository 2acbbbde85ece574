"""What the draft heads are trained on: the target's own answers to training tasks, and some real code."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from tokenizers import Tokenizer

from demo.acceptance import before_loop
from demo.curriculum import ROW_STEP, Batch, Curriculum, Row, Stage, pad
from demo.distill import PROMPT_WEIGHT, Answers
from demo.network import Network
from demo.tokenizer import VOCAB_SIZE

GROUPS = 55
MAX_NEW = 200
# A third of the answers are sampled, the rest greedy.
TEMPERATURES = (0.0, 0.0, 0.7)
SEED = 1000
BATCH_TOKENS = 3072
REAL_SHARE = 0.25
STAGES = (Stage(0.00, 0.00, 0.30, 0.55, 0.15, 12, 320),)

log = logging.getLogger("demo.train")


def write_answers(target: Network, tokenizer: Tokenizer, folder: Path) -> list[Row]:
    """The rows of a folder; groups that it lacks are generated first, each from its own seed."""
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for group in range(GROUPS):
        file = folder / f"{group:03}.pt"
        if not file.exists():
            answers = Answers(target, tokenizer, SEED + group)
            temperature = TEMPERATURES[group % len(TEMPERATURES)]
            torch.save(answers.group(temperature, MAX_NEW), file.with_suffix(".partial"))
            file.with_suffix(".partial").replace(file)
            log.info("answers: group %d of %d", group + 1, GROUPS)
        rows += [(ids, weights) for ids, weights in torch.load(file, weights_only=True)]
    return [cut(row) for row in rows]


def cut(row: Row) -> Row:
    """A row without what follows once its answer loops: loops need no training."""
    ids, weights = row
    n_prompt = weights.count(PROMPT_WEIGHT)
    kept = n_prompt + before_loop(ids[n_prompt:])
    return ids[:kept], weights[:kept]


class Mixture:
    """Mostly the target's answers, with rows of one length together, and some real code."""

    def __init__(
        self, tokenizer: Tokenizer, rows: list[Row], seed: int, stages: tuple[Stage, ...] = STAGES
    ) -> None:
        self.curriculum = Curriculum(tokenizer, seed, stages)
        self.rows = sorted(rows, key=lambda row: len(row[0]))

    def batch(self, progress: float) -> Batch:
        """The next batch: tokens and weights [B, T + 1]."""
        if self.curriculum.rng.random() < REAL_SHARE:
            return self.curriculum.batch(progress)
        return self.answered()

    def answered(self) -> Batch:
        """A batch of the target's answers: tokens and weights [B, T + 1]."""
        first = self.curriculum.rng.randrange(len(self.rows))
        size = -(-(len(self.rows[first][0]) - 1) // ROW_STEP) * ROW_STEP
        count = min(-(-BATCH_TOKENS // size), first + 1)
        # Rows are sorted, so those just before the chosen one fit its length.
        return pad(self.rows[first + 1 - count : first + 1], size)


def frequent_tokens(rows: list[Row], count: int) -> torch.Tensor:
    """The ids [count] most frequent in the rows, in ascending order."""
    counts = torch.zeros(VOCAB_SIZE, dtype=torch.long)  # [V]
    for ids, _ in rows:
        counts += torch.bincount(torch.tensor(ids), minlength=VOCAB_SIZE)
    # Ties go to the lower id, which the tokenizer merged first.
    return counts.argsort(descending=True, stable=True)[:count].sort().values
