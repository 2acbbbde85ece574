"""The losses of the draft heads: divergence from the frozen target's distributions.

EAGLE-3 and MTP are unrolled on their own outputs, as they are used; DFlash and DSpark see random blocks of each row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from demo import head_files
from demo.heads import ChainHead, DFlashHead, DSparkHead, Eagle3Head, MtpHead, attention_weights, streams
from demo.network import Cache, Network, rope_tables

# Later steps of a draft count less: they are only reached if the earlier ones were right.
STEP_DECAY = 0.9
BLOCK_DECAY = 0.55
# One block per so many tokens of a row.
BLOCK_EVERY = 6
ROWS_AT_ONCE = 256
DTYPE = torch.bfloat16


class Unrolled:
    """Attention of a head unrolled over whole rows, every position being a start of its own.

    Step 0 is plain causal attention. In step s, the query that started at p sees the keys of step 0 up to p, and
    the keys of steps 1 to s that started at p: what a cache holds when s tokens are drafted after position p.
    """

    def __init__(self) -> None:
        self.first: Cache | None = None
        self.later: list[Cache] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)  # [B, H, T, D]
        if self.first is None:
            self.first = (k, v)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [B, H, T, D]
        self.later.append((k, v))
        length = q.shape[2]
        visible = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()  # [T, T]
        shared = attention_weights(q, self.first[0]).masked_fill(~visible, -torch.inf)  # [B, H, T, T]
        own = [(q * held).sum(-1, keepdim=True).float() * q.shape[-1] ** -0.5 for held, _ in self.later]
        shares = torch.cat((shared, *own), -1).softmax(-1).to(q.dtype)  # [B, H, T, T + s]
        out = shares[..., :length] @ self.first[1]  # [B, H, T, D]
        for index, (_, held) in enumerate(self.later):
            out = out + shares[..., length + index, None] * held
        return out


@dataclass(frozen=True)
class BlockAttention:
    """Attention of several blocks per row: each sees the context before it and all of itself."""

    context: Cache  # [B, Hkv, T, D]
    visible: Tensor  # [B, n_blocks, T], which context keys a block sees
    size: int

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        held_k, held_v, k, v = (x.repeat_interleave(group, 1) for x in (*self.context, k, v))
        blocks = (-1, self.size)
        q, k, v = (x.unflatten(2, blocks) for x in (q, k, v))  # [B, H, n_blocks, size, D]
        shared = attention_weights(q.flatten(2, 3), held_k).unflatten(2, blocks)  # [B, H, n_blocks, size, T]
        shared = shared.masked_fill(~self.visible[:, None, :, None], -torch.inf)
        shares = torch.cat((shared, attention_weights(q, k)), -1).softmax(-1).to(q.dtype)
        length = held_k.shape[2]
        out = (shares[..., :length].flatten(2, 3) @ held_v).unflatten(2, blocks)
        result: Tensor = (out + shares[..., length:] @ v).flatten(2, 3)
        return result  # [B, H, n_blocks * size, D]


class Divergence(torch.autograd.Function):
    """KL [N] of the distributions of logits `given` from those of `wanted`, both [N, V].

    Some rows at a time: the float32 copies then stay in the processor's cache, which is several times quicker.
    """

    @staticmethod
    def forward(ctx: Any, wanted: Tensor, given: Tensor) -> Tensor:
        losses, slope = [], torch.empty_like(given)  # [N, V]
        for begin in range(0, len(given), ROWS_AT_ONCE):
            rows = slice(begin, begin + ROWS_AT_ONCE)
            target, draft = wanted[rows].float().log_softmax(-1), given[rows].float().log_softmax(-1)
            shares = target.exp()  # [rows, V]
            losses.append((shares * target.sub_(draft)).sum(-1))
            slope[rows] = draft.exp_().sub_(shares)
        ctx.save_for_backward(slope)
        return torch.cat(losses)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        (slope,) = ctx.saved_tensors
        return None, slope * gradient[:, None].to(slope.dtype)


def divergence(wanted: Tensor, given: Tensor) -> Tensor:
    """KL [N] of the distributions of logits `given` from those of `wanted`, both [N, V]."""
    result: Tensor = Divergence.apply(wanted, given)  # type: ignore[no-untyped-call]
    return result


@torch.no_grad()
def overlap(wanted: Tensor, given: Tensor) -> Tensor:
    """What the distributions of two times N logits [N, V] have in common [N]: 1 if they are equal, else less."""
    shares = []
    for begin in range(0, len(given), ROWS_AT_ONCE):
        rows = slice(begin, begin + ROWS_AT_ONCE)
        target, draft = wanted[rows].float().softmax(-1), given[rows].float().softmax(-1)
        shares.append(torch.minimum(target, draft).sum(-1))
    return torch.cat(shares)


def thin(weights: Tensor) -> Tensor:
    """Weights [S, N] of which small columns are dropped by chance and the others raised: as much on average."""
    chance = weights.max(0).values.clamp(max=1.0)  # [N]
    kept = torch.rand(chance.shape, device=weights.device) < chance
    return torch.where(kept, weights / chance.clamp(min=1e-6), 0.0)


def unroll(head: ChainHead, carried: Tensor, embedded: Tensor, n_steps: int) -> list[Tensor]:
    """What each step scores, n_steps of [B, T, hidden].

    carried [B, T, hidden] is carried into positions 0 to T - 1, embedded [B, T + n_steps, hidden] are the
    embeddings of the tokens at 0 to T + n_steps - 1. Row p of step s scores the token at p + s + 2.
    """
    length = carried.shape[1]
    positions = torch.arange(length + n_steps, device=carried.device)[None]  # [1, T + n_steps]
    cos, sin = rope_tables(head.shape, positions, carried.dtype)
    attend, scored = Unrolled(), []
    for step in range(n_steps):
        here = slice(step, step + length)
        tokens = embedded[:, step + 1 : step + 1 + length]  # [B, T, hidden]
        carried, found = head(carried, tokens, (cos[:, here], sin[:, here]), attend)
        scored.append(found)
    return scored


def chain_loss(
    target: Network, n_steps: Callable[[], int]
) -> Callable[[Eagle3Head | MtpHead, Tensor, Tensor], Tensor]:
    """The loss over (head, tokens, weights [B, T + 1]) of a head that is unrolled n_steps deep."""

    def fit(
        head: Eagle3Head | MtpHead, states: Tensor, seen: Tensor, rows: Tensor, weights: Tensor
    ) -> Tensor:
        # The states are [B, T, n * hidden]; seen are embeddings and final states, each [B, T + S, hidden];
        # of the B * T starts only `rows` [N] are scored, with weights [S, N].
        embedded, final = seen
        length, matrix = states.shape[1], target.embed_tokens.weight.to(states.dtype)  # [V, hidden]
        if isinstance(head, Eagle3Head):
            matrix = matrix[head.draft_ids()]
        total = torch.zeros((), device=states.device)
        for step, scored in enumerate(unroll(head, head.carry(states), embedded, len(weights))):
            after = final[:, step + 1 : step + 1 + length].flatten(0, 1)[rows]  # [N, hidden]
            given = head.scores(scored.flatten(0, 1)[rows], target)  # [N, draft vocabulary]
            losses = divergence(F.linear(after, matrix), given)  # [N]
            total = total + STEP_DECAY**step * (losses * weights[step]).sum() / weights[step].sum()
        return total / sum(STEP_DECAY**step for step in range(len(weights)))

    def loss(head: Eagle3Head | MtpHead, tokens: Tensor, weights: Tensor) -> Tensor:
        depth, length = n_steps(), tokens.shape[1] - 1
        tokens = F.pad(tokens, (0, depth))  # [B, T + 1 + S]
        wanted = torch.stack([F.pad(weights, (0, depth))[:, s + 2 : s + 2 + length] for s in range(depth)])
        with torch.no_grad():
            found = streams(target, tokens[:, : length + depth], DTYPE)
        if isinstance(head, Eagle3Head):
            ahead = torch.stack([tokens[:, s + 2 : s + 2 + length] for s in range(depth)])  # [S, B, T]
            wanted = wanted * head.t2d[ahead]
        wanted = thin(wanted.flatten(1))  # [S, B * T]
        rows = wanted.sum(0).nonzero()[:, 0]  # [N]
        states = head_files.states(head, found)[:, :length]  # [B, T, width]
        return fit(head, states, torch.stack((found[0], found[-1])), rows, wanted[:, rows])

    return loss


def block_loss(target: Network) -> Callable[[DFlashHead, Tensor, Tensor], Tensor]:
    """The loss over (head, tokens, weights [B, T + 1]) of DFlash or DSpark, on blocks that begin at random tokens.

    DSpark's rows are given the text's token before them: what they were drafted from if they are reached at all.
    """
    size = head_files.BLOCK_SIZE

    def fit(
        head: DFlashHead, states: Tensor, embedded: Tensor, starts: Tensor, wanted: tuple[Tensor, ...]
    ) -> Tensor:
        # The states are [B, T, n_taps * hidden], the embeddings [B, n * size, hidden], the starts [B, n]; wanted
        # are the target's final states [N, hidden], weights [N] and tokens before [N], N = B * n * (size - 1).
        final, weights, previous = wanted
        every = torch.arange(states.shape[1], device=states.device)  # [T]
        places = (starts[..., None] + torch.arange(size, device=states.device)).flatten(1)  # [B, n * size]
        context = head.context(states, rope_tables(head.shape, every[None], states.dtype))
        attend = BlockAttention(context, every < starts[..., None], size)
        out = head(embedded, rope_tables(head.shape, places, states.dtype), attend)  # [B, n * size, hidden]
        drafted = out.unflatten(1, (-1, size))[:, :, 1:].flatten(0, 2)  # [N, hidden]
        goal, given = target.logits(final), head.correct(target.logits(drafted), previous)  # [N, V] each
        losses = divergence(goal, given)
        if isinstance(head, DSparkHead):
            odds = head.confidence(drafted, previous).float()  # [N]
            # A token drawn from one distribution and verified against another survives as often as they overlap.
            losses = losses + F.binary_cross_entropy_with_logits(odds, overlap(goal, given), reduction="none")
        return (losses * weights).sum() / weights.sum()

    def loss(head: DFlashHead, tokens: Tensor, weights: Tensor) -> Tensor:
        tokens, weights = F.pad(tokens, (0, size)), F.pad(weights, (0, size))
        with torch.no_grad():
            found = streams(target, tokens, DTYPE)
        starts, masked = draw_blocks(tokens, weights)  # [B, n], [B, n, size]
        ahead = starts[..., None] + torch.arange(1, size, device=tokens.device)  # [B, n, size - 1]
        rows = torch.arange(len(tokens), device=tokens.device)[:, None, None]
        decay = BLOCK_DECAY ** torch.arange(size - 1, device=tokens.device)  # [size - 1]
        return fit(
            head,
            head_files.states(head, found),
            target.embed_tokens(masked.flatten(1)).to(DTYPE),
            starts,
            (
                found[-1][rows, ahead - 1].flatten(0, 2),
                (weights[rows, ahead] * decay).flatten(),
                tokens[rows, ahead - 1].flatten(),
            ),
        )

    return loss


def draw_blocks(tokens: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Starts [B, n] in rows [B, T + size] of tokens, and the tokens [B, n, size] of the blocks that begin there.

    A start is drawn by the weight of the token that follows it.
    """
    length = tokens.shape[1] - head_files.BLOCK_SIZE
    count = max(1, length // BLOCK_EVERY)
    starts = torch.multinomial(weights[:, 2 : length + 1], count, replacement=True) + 1  # [B, n]
    shape = (*starts.shape, head_files.BLOCK_SIZE)
    masked = torch.full(shape, head_files.MASK_TOKEN, device=tokens.device)
    masked[..., 0] = tokens.gather(1, starts)
    return starts, masked
