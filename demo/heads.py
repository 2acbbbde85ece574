"""The four draft heads as small networks: EAGLE-3, an MTP layer in MiMo's form, a one-layer DFlash, and DSpark.

Parameter names are those of the published checkpoints. Embeddings are the target's and are passed in. How queries
meet keys is left to the caller: training unrolls a head over a whole row, drafting feeds a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from demo.network import Cache, FeedForward, Linear, Network, RMSNorm, Shape, rotate

# Queries [B, H, T, D], keys and values [B, Hkv, T, D] of the same positions to the outputs [B, H, T, D].
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Variant:
    """What the attentions of the heads differ in."""

    inputs: int  # width of what is projected to queries, keys and values
    bias: bool = False
    normalised: bool = False


class HeadAttention(nn.Module):
    """Grouped-query attention over keys that `attend` holds."""

    def __init__(self, shape: Shape, variant: Variant) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            shape.num_attention_heads,
            shape.num_key_value_heads,
            shape.head_dim,
        )
        make = BiasedLinear if variant.bias else Linear
        self.q_proj = make(variant.inputs, self.heads * self.head_dim)
        self.k_proj = make(variant.inputs, self.kv_heads * self.head_dim)
        self.v_proj = make(variant.inputs, self.kv_heads * self.head_dim)
        self.o_proj = Linear(self.heads * self.head_dim, shape.hidden_size)
        self.normalised = variant.normalised
        if variant.normalised:
            self.q_norm = RMSNorm(self.head_dim, shape.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, shape.rms_norm_eps)

    def forward(self, x: Tensor, rope: Cache, attend: Attend) -> Tensor:
        """Output [B, T, hidden] for x [B, T, inputs] at the positions of the tables [B or 1, T, 1, D]."""
        q = self.q_proj(x).unflatten(-1, (self.heads, self.head_dim))  # [B, T, H, D]
        q = self.q_norm(q) if self.normalised else q
        k, v = self.keys(x, rope)
        out = attend(rotate(q, rope).transpose(1, 2), k, v)  # [B, H, T, D]
        result: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return result

    def keys(self, x: Tensor, rope: Cache) -> Cache:
        """Keys and values [B, Hkv, T, D] of x [B, T, inputs]."""
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))  # [B, T, Hkv, D]
        k = rotate(self.k_norm(k) if self.normalised else k, rope)
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))  # [B, T, Hkv, D]
        return k.transpose(1, 2), v.transpose(1, 2)


class BiasedLinear(Linear):
    """A matrix with a bias, both kept in float32 and used in the precision of the input."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.bias = nn.Parameter(torch.zeros(outputs))  # [outputs]

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.to(input.dtype), self.bias.to(input.dtype))


class ChainHead(nn.Module):
    """A head that drafts one token after the other, each from the token before and a carried vector."""

    shape: Shape

    def carry(self, states: Tensor) -> Tensor:
        """The vector carried into a position [B, T, hidden], from the target's states there."""
        raise NotImplementedError

    def forward(
        self, carried: Tensor, embedded: Tensor, rope: Cache, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """From the carried vector of position p and the embedding of token p + 1, both [B, T, hidden].

        Returns what is carried into position p + 1 and what is scored for token p + 2, both [B, T, hidden].
        """
        raise NotImplementedError

    def scores(self, scored: Tensor, target: Network) -> Tensor:
        """Logits [..., draft vocabulary] of scored vectors [..., hidden]."""
        raise NotImplementedError

    def tokens(self, drafted: Tensor) -> Tensor:
        """The target's token ids of ids in the draft vocabulary."""
        return drafted


class EagleLayer(nn.Module):
    """A Llama layer whose attention reads the embedding beside the carried vector."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = HeadAttention(shape, Variant(2 * shape.hidden_size))
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = FeedForward(shape)

    def forward(self, carried: Tensor, embedded: Tensor, rope: Cache, attend: Attend) -> Tensor:
        both = torch.cat(
            (self.input_layernorm(embedded), self.hidden_norm(carried)), -1
        )  # [B, T, 2 * hidden]
        x = carried + self.self_attn(both, rope, attend)  # [B, T, hidden]
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class Eagle3Head(ChainHead):
    """EAGLE-3: three residual streams of the target fused, one layer, its own reduced vocabulary."""

    d2t: Tensor  # [draft vocabulary], target id minus draft id
    t2d: Tensor  # [vocabulary], whether the token can be drafted

    def __init__(self, shape: Shape, draft_ids: Tensor, n_taps: int = 3) -> None:
        super().__init__()
        self.shape = shape
        self.fc = Linear(n_taps * shape.hidden_size, shape.hidden_size)
        self.midlayer = EagleLayer(shape)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = Linear(shape.hidden_size, len(draft_ids))
        self.register_buffer("d2t", draft_ids - torch.arange(len(draft_ids)))
        self.register_buffer(
            "t2d", torch.zeros(shape.vocab_size, dtype=torch.bool).index_fill(0, draft_ids, 1)
        )

    def carry(self, states: Tensor) -> Tensor:
        """From the three streams side by side [B, T, 3 * hidden]."""
        result: Tensor = self.fc(states)
        return result

    def forward(
        self, carried: Tensor, embedded: Tensor, rope: Cache, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        out = self.midlayer(carried, embedded, rope, attend)  # [B, T, hidden]
        return out, self.norm(out)

    def scores(self, scored: Tensor, target: Network) -> Tensor:
        result: Tensor = self.lm_head(scored)
        return result

    def draft_ids(self) -> Tensor:
        """The target's id of every row of the draft vocabulary [draft vocabulary]."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def tokens(self, drafted: Tensor) -> Tensor:
        return drafted + self.d2t[drafted]


class MtpHead(ChainHead):
    """MiMo's multi-token-prediction layer: a Qwen2 layer over [state | embedding], the target's own output."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.token_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.hidden_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.input_proj = Linear(2 * shape.hidden_size, shape.hidden_size)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = HeadAttention(shape, Variant(shape.hidden_size, bias=True))
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = FeedForward(shape)
        self.final_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def carry(self, states: Tensor) -> Tensor:
        """The target's state after its final norm [B, T, hidden], as it is."""
        return states

    def forward(
        self, carried: Tensor, embedded: Tensor, rope: Cache, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        # [state | embedding] is MiMo's order; the other families have it the other way round.
        both = torch.cat((self.hidden_layernorm(carried), self.token_layernorm(embedded)), -1)
        x = self.input_proj(both)  # [B, T, hidden]
        x = x + self.self_attn(self.input_layernorm(x), rope, attend)
        x = x + self.mlp(self.post_attention_layernorm(x))
        scored = self.final_layernorm(x)  # [B, T, hidden]
        return scored, scored

    def scores(self, scored: Tensor, target: Network) -> Tensor:
        return target.logits(scored)


class BlockLayer(nn.Module):
    """A Qwen3 layer over a block of tokens."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = HeadAttention(shape, Variant(shape.hidden_size, normalised=True))
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, rope: Cache, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, attend)
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class DFlashHead(nn.Module):
    """DFlash: one pass over [newest token, mask, ...] that attends to the target's states as context."""

    def __init__(self, shape: Shape, n_taps: int) -> None:
        super().__init__()
        self.shape = shape
        self.fc = Linear(n_taps * shape.hidden_size, shape.hidden_size)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList([BlockLayer(shape)])
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def context(self, states: Tensor, rope: Cache) -> Cache:
        """Permanent keys and values [B, Hkv, T, D] of the target's streams [B, T, n_taps * hidden]."""
        # The layer's input norm is for the block alone; hidden_norm takes its place here.
        fused = self.hidden_norm(self.fc(states))  # [B, T, hidden]
        layer: BlockLayer = self.layers[0]  # type: ignore[assignment]
        return layer.self_attn.keys(fused, rope)

    def forward(self, embedded: Tensor, rope: Cache, attend: Attend) -> Tensor:
        """What is scored [B, T, hidden]: row i predicts the token at its own position."""
        result: Tensor = self.norm(self.layers[0](embedded, rope, attend))
        return result

    def correct(self, logits: Tensor, previous: Tensor) -> Tensor:
        """Logits [..., V] of rows once the tokens before them [...] are known: the same, DSpark's differ."""
        return logits


class MarkovHead(nn.Module):
    """What a token says about the next one: a table [V, V] as the product of two thin ones."""

    def __init__(self, shape: Shape, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(shape.vocab_size, rank)
        self.markov_w2 = Linear(rank, shape.vocab_size)
        nn.init.normal_(self.markov_w1.weight, std=0.5)
        nn.init.zeros_(self.markov_w2.weight)  # training starts from the backbone's own logits


class ConfidenceHead(nn.Module):
    """How likely a drafted token is to be accepted, before the sigmoid."""

    def __init__(self, shape: Shape, rank: int) -> None:
        super().__init__()
        self.proj = BiasedLinear(shape.hidden_size + rank, 1)
        nn.init.zeros_(self.proj.weight)


class DSparkHead(DFlashHead):
    """DSpark: a trained DFlash, frozen, whose logits a Markov head corrects from left to right.

    A row of DFlash's block does not know which token was picked for the row before. The Markov head adds to its
    logits what that token makes likely, and the confidence head estimates whether the pick will be accepted.
    """

    def __init__(self, shape: Shape, n_taps: int, rank: int) -> None:
        super().__init__(shape, n_taps)
        self.requires_grad_(requires_grad=False)  # what is made below is all that is trained
        self.markov_head = MarkovHead(shape, rank)
        self.confidence_head = ConfidenceHead(shape, rank)

    def take_backbone(self, trained: DFlashHead) -> None:
        """Make another head's weights the frozen ones."""
        self.load_state_dict(self.state_dict() | trained.state_dict())

    @property
    def rank(self) -> int:
        """Width of the Markov head's tables."""
        return self.markov_head.markov_w1.embedding_dim

    def correct(self, logits: Tensor, previous: Tensor) -> Tensor:
        before = self.markov_head.markov_w1(previous).to(logits.dtype)  # [..., rank]
        result: Tensor = logits + self.markov_head.markov_w2(before)
        return result

    def confidence(self, scored: Tensor, previous: Tensor) -> Tensor:
        """Log-odds [...] that a pick is accepted, from what is scored [..., hidden] and the tokens before [...]."""
        # The table learns from the drafts alone, so that the estimate costs them nothing.
        before = self.markov_head.markov_w1(previous).detach().to(scored.dtype)  # [..., rank]
        result: Tensor = self.confidence_head.proj(torch.cat((scored, before), -1))[..., 0]
        return result


def attention_weights(q: Tensor, k: Tensor) -> Tensor:
    """Scaled scores [..., T, S] in float32 of queries [..., T, D] and keys [..., S, D]."""
    scores: Tensor = (q @ k.mT).float() * q.shape[-1] ** -0.5
    return scores


def streams(target: Network, tokens: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """The residual stream entering each layer, then the state after the final norm: L + 1 of [B, T, hidden].

    The order is that of transformers' `hidden_states`.
    """
    rope = target.rope(torch.arange(tokens.shape[1], device=tokens.device)[None], dtype)
    x = target.embed_tokens(tokens).to(dtype)  # [B, T, hidden]
    found = []
    for layer in target.layers:
        found.append(x)
        x = layer(x, rope)
    return [*found, target.norm(x)]


def initialise(head: nn.Module, target: Network) -> None:
    """Start as the identity around the residual stream, and score as the target does."""
    for name, weight in head.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(weight)
        elif name.endswith(("_proj.weight", "fc.weight")):
            nn.init.normal_(weight, std=0.5 * weight.shape[1] ** -0.5)
    final = head.final_layernorm if isinstance(head, MtpHead) else head.norm
    with torch.no_grad():
        final.weight.copy_(target.norm.weight)  # type: ignore[union-attr, operator]
        if isinstance(head, Eagle3Head):
            head.lm_head.weight.copy_(target.embed_tokens.weight[head.draft_ids()])
