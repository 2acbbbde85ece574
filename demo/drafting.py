"""Drafting with the heads as a server does: a cache of true states, provisional entries that are dropped.

A drafter is shown the target's states of the kept positions together with the tokens that follow them, and then
drafts after the newest token. Drafting again, or being shown more, first drops what the last draft left.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from demo.head_files import BLOCK_SIZE, MASK_TOKEN
from demo.head_training import BlockAttention
from demo.heads import ChainHead, DFlashHead
from demo.network import Cache, Network, rope_tables


class Drafter(Protocol):
    """What the evaluation needs of a drafter."""

    def observe(self, states: Tensor, tokens: list[int]) -> None:
        """Take the states [n, width] of the next n positions, and for each the token that came after it."""

    def draft(self, count: int) -> list[int]:
        """At most `count` tokens after the newest one."""


class Held:
    """Keys and values that grow by what is attended to and can be cut back."""

    def __init__(self) -> None:
        self.held: Cache | None = None

    @property
    def length(self) -> int:
        return 0 if self.held is None else self.held[0].shape[2]

    def append(self, k: Tensor, v: Tensor) -> Cache:
        """All keys and values [1, Hkv, length, D], the new ones [1, Hkv, n, D] included."""
        if self.held is None:
            self.held = (k, v)
        else:
            self.held = (torch.cat((self.held[0], k), 2), torch.cat((self.held[1], v), 2))
        return self.held

    def cut(self, length: int) -> None:
        """Forget all but the first positions."""
        if self.held is not None:
            self.held = (self.held[0][:, :, :length], self.held[1][:, :, :length])

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention [1, H, n, D] of n new queries over everything held, themselves included."""
        before = self.length
        k, v = self.append(k, v)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)  # [1, H, before + n, D]
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(before)  # [n, before + n]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)


class ChainDrafter:
    """EAGLE-3 and MTP: one token after the other on the head's own outputs."""

    def __init__(self, head: ChainHead, target: Network) -> None:
        self.head, self.target, self.cache = head, target, Held()
        self.n_true = 0
        self.carried = self.scored = torch.empty(0)  # both [1, 1, hidden] once something was observed

    def observe(self, states: Tensor, tokens: list[int]) -> None:
        """Run the true states [n, width] over what the last draft left; position p goes with token p + 1."""
        self.cache.cut(self.n_true)
        self._run(self.head.carry(states[None]), tokens)
        self.n_true = self.cache.length
        self.first = (self.carried, self.scored)

    def draft(self, count: int) -> list[int]:
        """`count` tokens, each the head's first choice."""
        self.cache.cut(self.n_true)
        self.carried, self.scored = self.first
        found = [self._choice()]
        while len(found) < count:
            self._run(self.carried, [found[-1]])
            found.append(self._choice())
        return found

    def _run(self, carried: Tensor, tokens: list[int]) -> None:
        begin = self.cache.length
        positions = torch.arange(begin, begin + len(tokens))[None]  # [1, n]
        rope = rope_tables(self.head.shape, positions, torch.float32)
        embedded = self.target.embed_tokens(torch.tensor([tokens]))  # [1, n, hidden]
        carried, scored = self.head(carried, embedded, rope, self.cache)
        self.carried, self.scored = carried[:, -1:], scored[:, -1:]

    def _choice(self) -> int:
        drafted = self.head.scores(self.scored[0, 0], self.target).argmax()  # in the draft vocabulary
        return int(self.head.tokens(drafted))


class BlockDrafter:
    """DFlash and DSpark: the context grows by true states, a whole block is drafted in one pass."""

    def __init__(self, head: DFlashHead, target: Network) -> None:
        self.head, self.target, self.cache = head, target, Held()
        self.newest = MASK_TOKEN

    def observe(self, states: Tensor, tokens: list[int]) -> None:
        """Add the states [n, width] of the next positions to the context; the last token becomes the anchor."""
        begin = self.cache.length
        positions = torch.arange(begin, begin + len(tokens))[None]  # [1, n]
        self.cache.append(
            *self.head.context(states[None], rope_tables(self.head.shape, positions, torch.float32))
        )
        self.newest = tokens[-1]

    def draft(self, count: int) -> list[int]:
        """At most BLOCK_SIZE - 1 tokens, those at the places of the masks, picked from left to right."""
        begin = self.cache.length
        assert self.cache.held is not None
        positions = torch.arange(begin, begin + BLOCK_SIZE)[None]  # [1, size]
        block = torch.tensor([[self.newest] + [MASK_TOKEN] * (BLOCK_SIZE - 1)])
        visible = torch.ones(1, 1, begin, dtype=torch.bool)
        out = self.head(
            self.target.embed_tokens(block),
            rope_tables(self.head.shape, positions, torch.float32),
            BlockAttention(self.cache.held, visible, BLOCK_SIZE),
        )  # [1, size, hidden]
        found = [self.newest]
        for logits in self.target.logits(out[0, 1 : count + 1]):  # [V] each
            found.append(int(self.head.correct(logits, torch.tensor(found[-1])).argmax()))
        return found[1:]


def drafter(head: ChainHead | DFlashHead, target: Network) -> Drafter:
    """A new drafter of a head for one reply."""
    return BlockDrafter(head, target) if isinstance(head, DFlashHead) else ChainDrafter(head, target)
