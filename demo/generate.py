"""Batched generation with a key-value cache, for evaluation and distillation."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer
from torch import Tensor

from demo.checkpoint import EOS_IDS
from demo.network import Cache, Network


@torch.inference_mode()
def generate(
    network: Network, prompts: list[list[int]], max_new: int, temperature: float = 0.0
) -> list[list[int]]:
    """The answer to each prompt, greedy at temperature 0, with the end token if it was reached."""
    caches, hidden, lengths = prefill(network, prompts, max_new)
    token = choose(network.logits(hidden), temperature)  # [B]
    answers: list[list[int]] = [[] for _ in prompts]
    alive = [True] * len(prompts)
    for _ in range(max_new):
        for row, value in enumerate(token.tolist()):
            if alive[row]:
                answers[row].append(value)
                alive[row] = value not in EOS_IDS
        if not any(alive):
            break
        token = choose(network.logits(network.step(token, lengths, caches)), temperature)
        lengths = lengths + 1
    return answers


def choose(logits: Tensor, temperature: float) -> Tensor:
    """One token per row [B] of logits [B, V]."""
    if temperature == 0.0:
        return logits.argmax(-1)
    return torch.multinomial((logits / temperature).softmax(-1), 1)[:, 0]


def prefill(network: Network, prompts: list[list[int]], max_new: int) -> tuple[list[Cache], Tensor, Tensor]:
    """Caches with every prompt but its last token, then one step for that token.

    Returns the caches, the hidden states [B, hidden] after the prompts and their lengths [B].
    """
    device = network.embed_tokens.weight.device
    caches = network.caches(len(prompts), max(map(len, prompts)) + max_new + 1)
    for row, prompt in enumerate(prompts):
        if len(prompt) > 1:
            # The last token is left to the step below: a recurrent layer must not see it twice.
            network.fill(
                torch.tensor([prompt[:-1]], device=device),
                [(first[row : row + 1], second[row : row + 1]) for first, second in caches],
            )
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    last = torch.tensor([prompt[-1] for prompt in prompts], device=device)
    return caches, network.step(last, lengths - 1, caches), lengths


def decode(tokenizer: Tokenizer, answer: list[int]) -> str:
    """The text of an answer without its end token."""
    return str(
        tokenizer.decode([token for token in answer if token not in EOS_IDS], skip_special_tokens=False)
    )
