"""A small Qwen3 in plain torch, made for training on a CPU.

Parameter names are those of transformers' Qwen3ForCausalLM, so a checkpoint is its state dict.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Cache = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Shape:
    """The dimensions of a network, named as in config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0

    @property
    def rotary_dim(self) -> int:
        """How many dimensions of a head are rotated: the first ones."""
        return self.head_dim


class RMSNorm(nn.Module):
    """Root-mean-square normalisation with a learnt scale."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight).to(x.dtype)


class Linear(nn.Linear):
    """A matrix kept in float32 and used in the precision of its input."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.to(input.dtype))


class Attention(nn.Module):
    """Grouped-query attention with normalised queries and keys."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            shape.num_attention_heads,
            shape.num_key_value_heads,
            shape.head_dim,
        )
        self.q_proj = Linear(shape.hidden_size, self.heads * self.head_dim)
        self.k_proj = Linear(shape.hidden_size, self.kv_heads * self.head_dim)
        self.v_proj = Linear(shape.hidden_size, self.kv_heads * self.head_dim)
        self.o_proj = Linear(self.heads * self.head_dim, shape.hidden_size)
        self.q_norm = RMSNorm(self.head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, shape.rms_norm_eps)

    def forward(
        self, x: Tensor, rope: Cache, past: Cache | None = None, mask: Tensor | None = None
    ) -> Tensor:
        batch, length, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(batch, length, self.heads, self.head_dim))
        k = self.k_norm(self.k_proj(x).view(batch, length, self.kv_heads, self.head_dim))
        v = self.v_proj(x).view(batch, length, self.kv_heads, self.head_dim)
        q, k, v = rotate(q, rope).transpose(1, 2), rotate(k, rope).transpose(1, 2), v.transpose(1, 2)
        if past is not None and mask is not None:
            k, v = write_cache(past, (k, v), mask)
            # The heads of a group become the queries of their shared key head, so nothing is copied.
            grouped = q.view(batch, self.kv_heads, -1, self.head_dim)
            out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask)  # [B, Hkv, H / Hkv, D]
        else:
            if past is not None:
                past[0][:, :, :length], past[1][:, :, :length] = k, v
            group = self.heads // self.kv_heads
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)  # [B, H, T, D]
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        result: Tensor = self.o_proj(out.reshape(batch, length, -1))
        return result


def write_cache(past: Cache, new: Cache, mask: Tensor) -> Cache:
    """Put one new position per row behind the row's last visible one; mask is [B, 1, 1, S]."""
    rows = torch.arange(mask.shape[0], device=mask.device)
    slots = mask[:, 0, 0].sum(-1) - 1  # [B]
    for held, fresh in zip(past, new, strict=True):
        held[rows, :, slots] = fresh[:, :, 0].to(held.dtype)
    size = mask.shape[-1]
    return past[0][:, :, :size], past[1][:, :, :size]


def rope_tables(shape: Shape, positions: Tensor, dtype: torch.dtype) -> Cache:
    """Cosine and sine tables [B, T, 1, R] of positions [B, T], R the rotary dimensions."""
    half = torch.arange(0, shape.rotary_dim, 2, device=positions.device, dtype=torch.float32)  # [R / 2]
    angles = positions[..., None].float() * shape.rope_theta ** (-half / shape.rotary_dim)
    angles = torch.cat((angles, angles), -1)[:, :, None]  # [B, T, 1, R]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, rope: Cache) -> Tensor:
    """Apply rotary positions to the first R dimensions of [B, T, H, D]; the tables are [B or 1, T, 1, R]."""
    cos, sin = rope
    turned, still = x.tensor_split((cos.shape[-1],), -1)
    left, right = turned.chunk(2, -1)
    turned = turned * cos + torch.cat((-right, left), -1) * sin
    return torch.cat((turned, still), -1) if still.shape[-1] else turned


class FeedForward(nn.Module):
    """The gated SiLU block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.up_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = Linear(shape.intermediate_size, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class Layer(nn.Module):
    """One pre-normalised transformer layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = FeedForward(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(
        self, x: Tensor, rope: Cache, past: Cache | None = None, mask: Tensor | None = None
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, past, mask)
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class Network(nn.Module):
    """The decoder with tied embeddings; forward gives final hidden states, logits are a second step."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(self.build_layers(shape))
        self.norm = self.build_norm(shape)
        self._initialise()

    def build_layers(self, shape: Shape) -> Iterable[nn.Module]:
        """The layers, each called as Layer is."""
        return (Layer(shape) for _ in range(shape.num_hidden_layers))

    def build_norm(self, shape: Shape) -> nn.Module:
        """The norm after the last layer."""
        return RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def caches(self, rows: int, size: int) -> list[Cache]:
        """One empty cache per layer for `rows` texts of at most `size` tokens."""
        shape, device = self.shape, self.embed_tokens.weight.device
        each = (rows, shape.num_key_value_heads, size, shape.head_dim)
        return [(torch.zeros(each, device=device), torch.zeros(each, device=device)) for _ in self.layers]

    def _initialise(self) -> None:
        nn.init.normal_(self.embed_tokens.weight, std=0.04)
        for name, weight in self.named_parameters():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                # Each layer starts as the identity, which lets the high learning rates below hold.
                nn.init.zeros_(weight)
            elif "_proj" in name and weight.ndim == 2:
                nn.init.normal_(weight, std=0.5 * weight.shape[1] ** -0.5)

    def rope(self, positions: Tensor, dtype: torch.dtype) -> Cache:
        """Cosine and sine tables [B, T, 1, D] of positions [B, T]."""
        return rope_tables(self.shape, positions, dtype)

    def forward(self, tokens: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Final hidden states [B, T, hidden] of tokens [B, T], each row from position 0."""
        rope = self.rope(torch.arange(tokens.shape[1], device=tokens.device)[None], dtype)
        x = self.embed_tokens(tokens).to(dtype)
        for layer in self.layers:
            x = layer(x, rope)
        result: Tensor = self.norm(x)
        return result

    def fill(self, tokens: Tensor, caches: list[Cache]) -> Tensor:
        """As forward, and leave the keys and values in the caches."""
        rope = self.rope(torch.arange(tokens.shape[1], device=tokens.device)[None], torch.float32)
        x = self.embed_tokens(tokens)
        for layer, past in zip(self.layers, caches, strict=True):
            x = layer(x, rope, past)
        result: Tensor = self.norm(x)
        return result

    def step(self, tokens: Tensor, lengths: Tensor, caches: list[Cache]) -> Tensor:
        """Hidden states [B, hidden] of one token per row [B], each at position lengths[b] of its cache."""
        size = int(lengths.max()) + 1
        mask = (torch.arange(size, device=tokens.device)[None] <= lengths[:, None])[
            :, None, None
        ]  # [B, 1, 1, S]
        dtype = caches[0][0].dtype
        rope = self.rope(lengths[:, None], dtype)
        x = self.embed_tokens(tokens[:, None]).to(dtype)
        for layer, past in zip(self.layers, caches, strict=True):
            x = layer(x, rope, past, mask)
        result: Tensor = self.norm(x)[:, 0]
        return result

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the vocabulary, in the precision of the hidden states."""
        return F.linear(hidden, self.embed_tokens.weight.to(hidden.dtype))
