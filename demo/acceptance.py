"""How many tokens per target pass a draft gives: the length of greedy speculation, replayed.

The target's greedy answers are fixed first; the draft is then asked for every next token of them at once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from demo import heldout, tasks
from demo.generate import generate
from demo.network import Network
from demo.tokenizer import encode_task

DRAFT_TOKENS = 8
MAX_NEW = 192
BATCH = 20
# A reply loops from where one of its n-grams of this size is seen for this many times.
LOOP_NGRAM, LOOP_TIMES = 8, 3


@dataclass(frozen=True)
class Acceptance:
    """Agreement of single tokens, and tokens per target pass including the target's own.

    Once on the target's own answers, which loop now and then and are then easy to draft, and once along the
    reference answers, where a token counts as drafted right if it is the target's first choice there.
    """

    agreement: float
    length: float
    reference_agreement: float
    reference_length: float


def before_loop(tokens: list[int]) -> int:
    """How many tokens of a reply count: all up to the n-gram that shows that it loops."""
    seen: Counter[tuple[int, ...]] = Counter()
    for end in range(LOOP_NGRAM, len(tokens) + 1):
        ngram = tuple(tokens[end - LOOP_NGRAM : end])
        seen[ngram] += 1
        if seen[ngram] == LOOP_TIMES:
            return end
    return len(tokens)


def passes(matches: list[bool], draft_tokens: int = DRAFT_TOKENS) -> int:
    """Target passes that an answer takes when matches[i] says whether token i is drafted right."""
    position = count = 0
    while position < len(matches):
        accepted = 0
        while accepted < draft_tokens and position + accepted < len(matches) and matches[position + accepted]:
            accepted += 1
        position += accepted + 1
        count += 1
    return count


@torch.inference_mode()
def choices(network: Network, prompt: list[int], answer: list[int]) -> list[int]:
    """The network's first choice at each position of the answer, given the answer up to there."""
    tokens = torch.tensor([prompt + answer[:-1]])
    chosen = network.logits(network(tokens)[0, len(prompt) - 1 :]).argmax(-1)  # [len(answer)]
    return [int(token) for token in chosen]


def agreements(left: list[int], right: list[int]) -> list[bool]:
    """Where two sequences of the same length have the same token."""
    return [a == b for a, b in zip(left, right, strict=True)]


def measure(target: Network, draft: Network, tokenizer: Tokenizer, kind: tasks.Kind) -> Acceptance:
    """Acceptance on the held-out file's short tasks of a kind."""
    asked = [held.task for held in heldout.load(kind, "short")]
    pairs = [encode_task(tokenizer, task.prompt_messages, task.reference) for task in asked]
    pairs.sort(key=lambda pair: len(pair[0]))
    own, reference = [], []
    for start in range(0, len(pairs), BATCH):
        chosen = pairs[start : start + BATCH]
        answers = generate(target, [prompt for prompt, _ in chosen], MAX_NEW)
        for (prompt, expected), answer in zip(chosen, answers, strict=True):
            own.append(agreements(choices(draft, prompt, answer), answer))
            reference.append(agreements(choices(draft, prompt, expected), choices(target, prompt, expected)))
    return Acceptance(*_rates(own), *_rates(reference))


def _rates(answers: list[list[bool]]) -> tuple[float, float]:
    tokens = sum(map(len, answers))
    return sum(map(sum, answers)) / tokens, tokens / sum(map(passes, answers))
