"""A small Qwen3.5 in plain torch: gated delta net layers with a full attention layer now and then.

Parameter names are those of transformers' Qwen3_5ForCausalLM, so a checkpoint is its state dict. What the layers of
demo/network.py have in common with these is taken from there. Source of the layer: Gated Delta Networks (Yang et
al., 2024); source of the chunked form: its appendix and DeltaNet's (Yang et al., 2024).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from demo.network import Cache, FeedForward, Linear, Network, RMSNorm, Shape, rotate, write_cache

CHUNK = 64
# Added to the sum of squares of a query or key under the root.
UNIT_EPS = 1e-6
# Time constants that the value heads of a layer start from, in tokens; geometric in between.
SHORTEST, LONGEST = 20.0, 1000.0


@dataclass(frozen=True)
class HybridShape(Shape):
    """The dimensions of a hybrid network, named as in config.json."""

    partial_rotary_factor: float = 0.25
    full_attention_interval: int = 4
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 1
    linear_num_value_heads: int = 2

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def layer_types(self) -> list[str]:
        """What each layer mixes tokens with."""
        return [
            "linear_attention" if (layer + 1) % self.full_attention_interval else "full_attention"
            for layer in range(self.num_hidden_layers)
        ]

    @property
    def key_width(self) -> int:
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_width(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim


class OffsetNorm(nn.Module):
    """Root-mean-square normalisation whose scale is one plus what is learnt."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * (1.0 + self.weight)).to(x.dtype)


class GatedAttention(nn.Module):
    """Grouped-query attention whose output passes a gate that is projected beside the queries."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            shape.num_attention_heads,
            shape.num_key_value_heads,
            shape.head_dim,
        )
        self.q_proj = Linear(shape.hidden_size, 2 * self.heads * self.head_dim)
        self.k_proj = Linear(shape.hidden_size, self.kv_heads * self.head_dim)
        self.v_proj = Linear(shape.hidden_size, self.kv_heads * self.head_dim)
        self.o_proj = Linear(self.heads * self.head_dim, shape.hidden_size)
        self.q_norm = OffsetNorm(self.head_dim, shape.rms_norm_eps)
        self.k_norm = OffsetNorm(self.head_dim, shape.rms_norm_eps)

    def forward(
        self, x: Tensor, rope: Cache, past: Cache | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Output [B, T, hidden] for x [B, T, hidden]; with a mask [B, 1, 1, S], one new position per row."""
        q, k, v, gate = self.project(x, rope)
        if past is not None and mask is not None:
            k, v = write_cache(past, (k, v), mask)
            grouped = q.view(len(q), self.kv_heads, -1, self.head_dim)  # [B, Hkv, H / Hkv, D]
            out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask).view(q.shape)
        else:
            if past is not None:
                past[0][:, :, : x.shape[1]], past[1][:, :, : x.shape[1]] = k, v
            out = causal(q, k, v)
        return self.finish(out, gate)

    def project(self, x: Tensor, rope: Cache) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries [B, H, T, D], keys and values [B, Hkv, T, D] and the gate [B, T, H * D] of x [B, T, hidden]."""
        # Each head's rows are its query and then its gate.
        both = self.q_proj(x).unflatten(-1, (self.heads, 2 * self.head_dim))  # [B, T, H, 2 * D]
        q, gate = both.chunk(2, -1)
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))  # [B, T, Hkv, D]
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        q, k = rotate(self.q_norm(q), rope), rotate(self.k_norm(k), rope)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), gate.flatten(2)

    def finish(self, out: Tensor, gate: Tensor) -> Tensor:
        """The layer's output [B, T, hidden] of attended values [B, H, T, D] and their gate [B, T, H * D]."""
        result: Tensor = self.o_proj(out.transpose(1, 2).flatten(2) * gate.sigmoid())
        return result


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention [B, H, T, D] of queries [B, H, T, D] over keys and values [B, Hkv, T, D]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)  # [B, H, T, D]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class ShortConv(nn.Module):
    """A causal convolution over time, each channel by itself, then SiLU."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel))
        nn.init.normal_(self.weight, std=0.1)
        # Starts as the identity: the last column belongs to the current token.
        self.weight.data[:, 0, -1] += 1.0

    def forward(self, padded: Tensor) -> Tensor:
        """[B, T, C] in float32 of inputs [B, T + kernel - 1, C], the first of which lie before the text."""
        kernel = self.weight.shape[-1]
        length = padded.shape[1] - kernel + 1
        taps = [padded[:, tap : tap + length].float() * self.weight[:, 0, tap] for tap in range(kernel)]
        return F.silu(sum(taps[1:], taps[0]))


class GatedDelta(nn.Module):
    """Gated delta rule: one matrix per value head, corrected towards each token's value and decayed."""

    def __init__(self, shape: HybridShape) -> None:
        super().__init__()
        self.shape = shape
        channels = 2 * shape.key_width + shape.value_width
        self.in_proj_qkv = Linear(shape.hidden_size, channels)
        self.in_proj_z = Linear(shape.hidden_size, shape.value_width)
        self.in_proj_b = Linear(shape.hidden_size, shape.linear_num_value_heads)
        self.in_proj_a = Linear(shape.hidden_size, shape.linear_num_value_heads)
        self.conv1d = ShortConv(channels, shape.linear_conv_kernel_dim)
        spread = torch.linspace(0.0, 1.0, shape.linear_num_value_heads)
        rates = 1.0 / (SHORTEST * (LONGEST / SHORTEST) ** spread)  # [Vh], decay per token
        self.A_log = nn.Parameter(torch.zeros(shape.linear_num_value_heads))
        self.dt_bias = nn.Parameter(rates.expm1().log())  # softplus of it is the rate
        self.norm = RMSNorm(shape.linear_value_head_dim, shape.rms_norm_eps)
        self.out_proj = Linear(shape.value_width, shape.hidden_size)

    def forward(
        self, x: Tensor, rope: Cache, past: Cache | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Output [B, T, hidden] for x [B, T, hidden]; what was before is in `past`, which moves on.

        past is the state [B, Vh, dk, dv] and the last inputs of the convolution [B, kernel - 1, C]. There are no
        positions, so rope and mask are not needed.
        """
        shape, mixed = self.shape, self.in_proj_qkv(x)  # [B, T, C]
        before = shape.linear_conv_kernel_dim - 1
        if past is None:
            padded = F.pad(mixed, (0, 0, before, 0))  # [B, T + kernel - 1, C]
        else:
            padded = torch.cat((past[1].to(mixed.dtype), mixed), 1)
            past[1].copy_(padded[:, -before:])
        q, k, v = self.conv1d(padded).split((shape.key_width, shape.key_width, shape.value_width), -1)
        q, k = (unit(side.unflatten(-1, (-1, shape.linear_key_head_dim))) for side in (q, k))  # [B, T, K, dk]
        v = v.unflatten(-1, (-1, shape.linear_value_head_dim))  # [B, T, Vh, dv]
        decay = -self.A_log.exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)  # [B, T, Vh]
        beta = self.in_proj_b(x).float().sigmoid()  # [B, T, Vh]
        rule = chunked if x.shape[1] > 1 else recurrent
        out, state = rule(
            (q * shape.linear_key_head_dim**-0.5, k, v), (decay, beta), None if past is None else past[0]
        )  # [B, T, Vh, dv]
        if past is not None:
            past[0].copy_(state)
        z = self.in_proj_z(x).unflatten(-1, (-1, shape.linear_value_head_dim)).float()
        result: Tensor = self.out_proj((self.norm(out) * F.silu(z)).flatten(2).to(x.dtype))
        return result


def unit(x: Tensor) -> Tensor:
    """Vectors [..., D] scaled to length one."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT_EPS)


def recurrent(
    qkv: tuple[Tensor, Tensor, Tensor], gates: tuple[Tensor, Tensor], state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gated delta rule token by token: outputs [B, T, Vh, dv] and the last state [B, Vh, dk, dv].

    Queries and keys are [B, T, K, dk], values [B, T, Vh, dv]; the gates are log-decay and beta, both [B, T, Vh].
    """
    q, k, v = qkv
    decay, beta = gates
    group = v.shape[2] // k.shape[2]
    q, k = q.repeat_interleave(group, 2), k.repeat_interleave(group, 2)  # [B, T, Vh, dk]
    if state is None:
        state = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1])
    found = []
    for token in range(v.shape[1]):
        state = state * decay[:, token, :, None, None].exp()
        key = k[:, token, :, :, None]  # [B, Vh, dk, 1]
        wrong = v[:, token] - (state * key).sum(-2)  # [B, Vh, dv]
        state = state + key * (beta[:, token, :, None] * wrong)[:, :, None]
        found.append((state * q[:, token, :, :, None]).sum(-2))  # [B, Vh, dv]
    return torch.stack(found, 1), state


def chunked(
    qkv: tuple[Tensor, Tensor, Tensor],
    gates: tuple[Tensor, Tensor],
    state: Tensor | None,
    size: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """As `recurrent`, a chunk of tokens at a time.

    Inside a chunk each token's correction depends on those before it; that is one triangular system, solved for what
    the state at the chunk's start will multiply and for what it will not. Only then are the chunks walked through.
    """
    length, extra = qkv[2].shape[1], -qkv[2].shape[1] % size
    # Tokens of padding have beta 0 and decay 1: they leave the state as it is.
    q, k, v = (split(side, extra, size) for side in qkv)  # [B, K, N, C, dk] twice, [B, Vh, N, C, dv]
    decay, beta = (split(gate[..., None], extra, size)[..., 0] for gate in gates)  # [B, Vh, N, C]
    heads = (k.shape[1], -1)
    q, k, v = q[:, :, None], k[:, :, None], v.unflatten(1, heads)  # r value heads share a key head
    decay, beta = decay.unflatten(1, heads).cumsum(-1), beta.unflatten(1, heads)[..., None]
    fade = fading(decay)  # [B, K, r, N, C, C]
    risen = decay.exp()[..., None]  # [B, K, r, N, C, 1], decay since the start of the chunk
    # Unit lower triangular, the diagonal being understood.
    system = (k @ k.mT) * fade * beta  # [B, K, r, N, C, C]
    sides = torch.cat((v, k * risen), -1) * beta  # [B, K, r, N, C, dv + dk]
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    inside, asked = (q @ k.mT) * fade, q * risen  # [B, K, r, N, C, C], [B, K, r, N, C, dk]
    left = k * (decay[..., -1:] - decay).exp()[..., None]  # [B, K, r, N, C, dk]
    if state is None:
        state = v.new_zeros(v.shape[0], qkv[2].shape[2], k.shape[-1], v.shape[-1])
    held, found = state.unflatten(1, heads), []  # [B, K, r, dk, dv]
    for chunk in range(v.shape[3]):
        values, weights = solved[:, :, :, chunk].split((v.shape[-1], k.shape[-1]), -1)
        deltas = values - weights @ held  # [B, K, r, C, dv]
        found.append(asked[:, :, :, chunk] @ held + inside[:, :, :, chunk] @ deltas)
        held = held * risen[:, :, :, chunk, -1:] + left[:, :, :, chunk].mT @ deltas
    out = torch.cat(found, -2).flatten(1, 2)[:, :, :length]  # [B, Vh, T, dv]
    return out.transpose(1, 2), held.flatten(1, 2)


def fading(decay: Tensor) -> Tensor:
    """What is left of token j at token i >= j [..., C, C], from the log-decay since the chunk's start [..., C]."""
    lower = torch.ones(decay.shape[-1], decay.shape[-1], dtype=torch.bool, device=decay.device).tril()
    gaps = decay[..., :, None] - decay[..., None, :]  # [..., C, C]
    # The other half would overflow; it is masked before the exponential, or its gradient would be NaN.
    return gaps.masked_fill(~lower, -torch.inf).exp()


def split(x: Tensor, extra: int, size: int) -> Tensor:
    """[B, T, H, D] with `extra` zeros after T, as chunks [B, H, N, C, D]."""
    padded = F.pad(x, (0, 0, 0, 0, 0, extra)) if extra else x
    return padded.transpose(1, 2).unflatten(2, (-1, size))


class HybridLayer(nn.Module):
    """One pre-normalised layer around either kind of mixing."""

    def __init__(self, shape: HybridShape, kind: str) -> None:
        super().__init__()
        if kind == "full_attention":
            self.self_attn = GatedAttention(shape)
        else:
            self.linear_attn = GatedDelta(shape)
        self.mixer = "self_attn" if kind == "full_attention" else "linear_attn"
        self.mlp = FeedForward(shape)
        self.input_layernorm = OffsetNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = OffsetNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(
        self, x: Tensor, rope: Cache, past: Cache | None = None, mask: Tensor | None = None
    ) -> Tensor:
        x = x + getattr(self, self.mixer)(self.input_layernorm(x), rope, past, mask)
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class HybridNetwork(Network):
    """The decoder with tied embeddings, layers of both kinds."""

    shape: HybridShape

    def build_layers(self, shape: Shape) -> Iterable[nn.Module]:
        assert isinstance(shape, HybridShape)
        return (HybridLayer(shape, kind) for kind in shape.layer_types)

    def build_norm(self, shape: Shape) -> nn.Module:
        return OffsetNorm(shape.hidden_size, shape.rms_norm_eps)

    def caches(self, rows: int, size: int) -> list[Cache]:
        """Keys and values where a layer attends, else its state and the last inputs of its convolution."""
        shape, device = self.shape, self.embed_tokens.weight.device
        state = (rows, shape.linear_num_value_heads, shape.linear_key_head_dim, shape.linear_value_head_dim)
        window = (rows, shape.linear_conv_kernel_dim - 1, 2 * shape.key_width + shape.value_width)
        recurrent_cache = [
            (torch.zeros(state, device=device), torch.zeros(window, device=device)) for _ in self.layers
        ]
        return [
            keys if kind == "full_attention" else held
            for kind, keys, held in zip(
                shape.layer_types, super().caches(rows, size), recurrent_cache, strict=True
            )
        ]
