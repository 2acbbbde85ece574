"""Training batches: what is drawn at which point of the run, and how it is packed into rows.

Copying is learnt first, on short and deliberately repetitive rows; the rows grow once it works.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from tokenizers import Tokenizer
from torch import Tensor

from demo import tasks
from demo.tokenizer import IM_END, SPECIAL_TOKENS, VOCAB_SIZE, encode_task, render

BATCH_TOKENS = 4096
# Rows are padded to a multiple of this, and only rows of one length share a batch.
ROW_STEP = 32

# Tokens and the weight of predicting each of them.
Row = tuple[list[int], list[float]]
# Losses on the prompt teach what code looks like, the answer is what is asked for.
PROMPT_WEIGHT = 0.25
AMBIGUOUS_WEIGHT = 3.0


@dataclass(frozen=True)
class Stage:
    """Shares of the kinds of row from a given part of the run on; the rest of the rows are plain code."""

    begin: float
    random_copy: float
    rename: float
    proceed: float
    docstring: float
    max_lines: int
    max_tokens: int


STAGES = (
    Stage(0.00, 0.60, 0.40, 0.00, 0.00, 3, 128),
    Stage(0.04, 0.30, 0.55, 0.10, 0.05, 5, 256),
    Stage(0.10, 0.10, 0.55, 0.25, 0.10, 8, 384),
    Stage(0.20, 0.08, 0.47, 0.35, 0.10, 14, 512),
    Stage(0.50, 0.04, 0.46, 0.40, 0.10, 24, 640),
    Stage(0.80, 0.02, 0.46, 0.42, 0.10, 40, 768),
)


@dataclass(frozen=True)
class Batch:
    """Rows of one length with the weight of each prediction."""

    tokens: Tensor  # [B, T + 1]
    weights: Tensor  # [B, T + 1], weight of predicting this very token


class Curriculum:
    """An endless, seeded source of batches over the training split."""

    def __init__(self, tokenizer: Tokenizer, seed: int, stages: tuple[Stage, ...] = STAGES) -> None:
        self.stages = stages
        self.tokenizer = tokenizer
        self.rng = random.Random(seed)
        self.functions = tasks.functions("train")
        self.renamable = [f for f in self.functions if f.renamable]
        self.documented = [f for f in self.functions if f.docstring]
        self.waiting: dict[int, list[Row]] = defaultdict(list)

    def batch(self, progress: float) -> Batch:
        """The next full batch for a run that is `progress` (0 to 1) done."""
        stage = max((s for s in self.stages if s.begin <= progress), key=lambda s: s.begin)
        while True:
            row = self.row(stage)
            if len(row[0]) > stage.max_tokens:
                continue
            size = -(-(len(row[0]) - 1) // ROW_STEP) * ROW_STEP
            held = self.waiting[size]
            held.append(row)
            if len(held) >= rows_per_batch(size):
                self.waiting[size] = []
                return pad(held, size)

    def row(self, stage: Stage) -> Row:
        """One conversation as tokens and weights."""
        pick = self.rng.random()
        for share, draw in (
            (stage.random_copy, self.random_copy),
            (stage.rename, self.rename),
            (stage.proceed, self.proceed),
            (stage.docstring, self.docstring),
        ):
            if pick < share:
                return draw(stage)
            pick -= share
        return self.docstring(stage)

    def random_copy(self, stage: Stage) -> Row:
        """Random tokens to repeat, half of the time with a name among them to replace.

        Few distinct tokens force the copy to look further back than one token.
        """
        old, new = (self._ids(tasks.new_identifier("", self.rng)) for _ in range(2))
        distinct = self.rng.choice((6, 20, 200))
        pieces = [[self.rng.randrange(len(SPECIAL_TOKENS), VOCAB_SIZE)] for _ in range(distinct)]
        if self.rng.random() < 0.5:
            request = "Copy:\n"
        else:
            request = (
                f"Rename `{self.tokenizer.decode(old)}` to `{self.tokenizer.decode(new)}` in this function:\n"
            )
            pieces += [old] * (1 + distinct // 6)
        count = self.rng.randint(8, max(16, stage.max_tokens // 3 - 16))
        body = [self.rng.choice(pieces) for _ in range(count)]
        before = self._ids(render([{"role": "user", "content": request}]))
        end = SPECIAL_TOKENS.index(IM_END)
        split = before.index(end)  # the body goes before the end of the user's turn
        prompt = before[:split] + [token for piece in body for token in piece] + before[split:]
        answer = [token for piece in body for token in (new if piece is old else piece)]
        return self._copied(prompt, answer + before[split : split + 2], 0.0)

    def rename(self, stage: Stage) -> Row:
        """A rename over the whole function or, if that is too long, some of its first lines."""
        function = self.rng.choice(self.renamable)
        old = self.rng.choice(function.renamable)
        lines = function.source.split("\n")
        source = "\n".join(lines[: self.rng.randint(2, stage.max_lines)])
        if not tasks.word(old).search(source):
            source = "\n".join(lines[: stage.max_lines])
        new = tasks.new_identifier(function.source, self.rng)
        task = tasks.rename_text(source, old, new)
        return self._copied(*encode_task(self.tokenizer, task.prompt_messages, task.reference), PROMPT_WEIGHT)

    def _copied(self, prompt: list[int], answer: list[int], prompt_weight: float) -> Row:
        """Weigh most what a copy that looks back one token gets wrong: substitutions and repeated contexts."""
        followers: dict[int, set[int]] = defaultdict(set)
        for token, follower in pairwise(prompt):
            followers[token].add(follower)
        contexts = zip([prompt[-1], *answer], answer, strict=False)
        weights = [AMBIGUOUS_WEIGHT if followers[context] - {token} else 1.0 for context, token in contexts]
        return prompt + answer, [prompt_weight] * len(prompt) + weights

    def proceed(self, stage: Stage) -> Row:
        """The continuation of a function's first lines; prompt and answer are one piece of code."""
        return self._task_row(tasks.continue_task(self._short(self.functions, stage), self.rng), 1.0)

    def docstring(self, stage: Stage) -> Row:
        """The docstring of a function shown without it."""
        return self._task_row(tasks.docstring_task(self._short(self.documented, stage)), PROMPT_WEIGHT)

    def _short(self, functions: Sequence[tasks.Function], stage: Stage) -> tasks.Function:
        while True:
            function = self.rng.choice(functions)
            if function.line_count <= 2 * stage.max_lines:
                return function

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text).ids)

    def _task_row(self, task: tasks.Task, prompt_weight: float) -> Row:
        prompt, answer = encode_task(self.tokenizer, task.prompt_messages, task.reference)
        return prompt + answer, [prompt_weight] * len(prompt) + [1.0] * len(answer)


def rows_per_batch(size: int) -> int:
    """Rows of a length that make up a batch."""
    return -(-BATCH_TOKENS // size)


def pad(rows: list[Row], size: int) -> Batch:
    """Stack rows padded on the right, where the causal mask keeps the padding out of sight."""
    tokens = torch.zeros(len(rows), size + 1, dtype=torch.long)
    weights = torch.zeros(len(rows), size + 1)
    for index, (ids, row_weights) in enumerate(rows):
        tokens[index, : len(ids)] = torch.tensor(ids)
        weights[index, : len(ids)] = torch.tensor(row_weights)
    return Batch(tokens, weights)


def texts() -> Iterator[str]:
    """What the tokenizer is trained on."""
    for _, text in tasks.module_sources("train"):
        yield text
