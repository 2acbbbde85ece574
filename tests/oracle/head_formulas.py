"""The published formulas of draft heads as plain torch loops over whole texts: no cache, no pages, no batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.head_checkpoints import N_HEADS, N_KV_HEADS, Tensors


@dataclass
class Formula:
    """A head's tensors and what its config says."""

    tensors: Tensors
    theta: float
    eps: float
    d_head: int
    one_plus: bool = False
    options: set[str] = field(default_factory=set)

    def norm(self, name: str, x: Tensor) -> Tensor:
        scale = self.tensors[f"{name}.weight"] + (1 if self.one_plus else 0)
        return scale * x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt()

    def linear(self, name: str, x: Tensor) -> Tensor:
        out = x @ self.tensors[f"{name}.weight"].T
        return out + self.tensors[f"{name}.bias"] if f"{name}.bias" in self.tensors else out

    def rotate(self, x: Tensor, positions: Sequence[int]) -> Tensor:
        """x: [n, n_heads, d_head], dimension j turned with j + d_head / 2."""
        half = self.d_head // 2
        out = torch.empty_like(x)
        for j in range(half):
            angles = torch.tensor([position * self.theta ** (-2 * j / self.d_head) for position in positions])
            cos, sin = angles.cos()[:, None], angles.sin()[:, None]  # [n, 1] each
            out[..., j] = x[..., j] * cos - x[..., j + half] * sin
            out[..., j + half] = x[..., j + half] * cos + x[..., j] * sin
        return out

    def heads(self, name: str, x: Tensor, n_heads: int, positions: Sequence[int] | None) -> Tensor:
        """A projection of rows, normed where there is a norm, rotated unless positions is None."""
        out = self.linear(f"{name}_proj", x).view(len(x), n_heads, self.d_head)
        if positions is None:
            return out
        if f"{name}_norm.weight" in self.tensors:
            out = self.norm(f"{name}_norm", out)
        return self.rotate(out, positions)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sees: Callable[[int, int], bool]) -> Tensor:
        """q: [n, n_heads, d_head]; k, v: [m, n_kv_heads, d_head]; sees(row, key). Returns [n, n_heads * d_head]."""
        mask = torch.tensor([[sees(i, j) for j in range(len(k))] for i in range(len(q))])
        out = torch.empty_like(q)
        for head in range(q.shape[1]):
            shared = head // (N_HEADS // N_KV_HEADS)
            scores = q[:, head] @ k[:, shared].T * self.d_head**-0.5
            out[:, head] = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v[:, shared]
        return out.flatten(1)

    def mlp(self, name: str, x: Tensor) -> Tensor:
        gate = self.linear(f"{name}.gate_proj", x)
        return self.linear(f"{name}.down_proj", gate * gate.sigmoid() * self.linear(f"{name}.up_proj", x))

    def causal(self, name: str, x: Tensor) -> Tensor:
        """Self-attention over rows at positions 0, 1, …"""
        at = range(len(x))
        q = self.heads(f"{name}.q", x, N_HEADS, at)
        k, v = self.heads(f"{name}.k", x, N_KV_HEADS, at), self.heads(f"{name}.v", x, N_KV_HEADS, None)
        return self.linear(f"{name}.o_proj", self.attend(q, k, v, lambda i, j: j <= i))

    def block(self, name: str, x: Tensor) -> Tensor:
        """An ordinary block, causal."""
        x = x + self.causal(f"{name}.self_attn", self.norm(f"{name}.input_layernorm", x))
        return x + self.mlp(f"{name}.mlp", self.norm(f"{name}.post_attention_layernorm", x))


def eagle3_fuse(head: Formula, streams: Sequence[Tensor]) -> Tensor:
    """streams: [n, d_target] each. Returns [n, d_model]."""
    if "fc_norm" in head.options:
        streams = [head.norm(f"fc_norm.{i}", stream) for i, stream in enumerate(streams)]
    joined = torch.cat(list(streams), -1)
    return head.linear("fc", head.norm("input_norm", joined) if "norm_before_fc" in head.options else joined)


def eagle3(head: Formula, prefix: str, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Rows at positions 0, 1, …: embedded tokens and fused features or recurrences, [n, d_model] each.

    Returns the logits of the head's own vocabulary and the recurrence of all rows.
    """
    normed = head.norm(f"{prefix}.hidden_norm", hidden)
    u = torch.cat((head.norm(f"{prefix}.input_layernorm", embedded), normed), -1)
    attended = head.causal(f"{prefix}.self_attn", u)
    s = attended + (normed if "norm_before_residual" in head.options else hidden)
    out = s + head.mlp(f"{prefix}.mlp", head.norm(f"{prefix}.post_attention_layernorm", s))
    if "layers.1.input_layernorm.weight" in head.tensors:
        out = head.block("layers.1", out)
    last = head.norm("norm", out)
    return last @ head.tensors["lm_head.weight"].T, last if "norm_output" in head.options else out


@dataclass
class MtpNames:
    """What one layout calls the five parts."""

    token_norm: str
    hidden_norm: str
    joint: str
    block: str
    norm: str
    hidden_first: bool = False


def mtp(head: Formula, names: MtpNames, embedded: Tensor, hidden: Tensor) -> Tensor:
    """Rows at positions 0, 1, … -> the normed output of all rows, which the target's head reads."""
    halves = [head.norm(names.token_norm, embedded), head.norm(names.hidden_norm, hidden)]
    if names.hidden_first:
        halves.reverse()
    return head.norm(names.norm, head.block(names.block, head.linear(names.joint, torch.cat(halves, -1))))


def dflash(head: Formula, n_layers: int, streams: Sequence[Tensor], block: Tensor) -> Tensor:
    """One round. streams: [n, d_target] each, of positions 0 … n - 1; block: [n_block, d_model], embedded, after it.

    Returns the normed output of the block's rows, [n_block, d_model].
    """
    context = head.norm("hidden_norm", head.linear("fc", torch.cat(list(streams), -1)))
    n = len(context)
    at = range(n, n + len(block))
    for i in range(n_layers):
        name = f"layers.{i}.self_attn"
        z = head.norm(f"layers.{i}.input_layernorm", block)
        k = (
            head.heads(f"{name}.k", context, N_KV_HEADS, range(n)),
            head.heads(f"{name}.k", z, N_KV_HEADS, at),
        )
        v = [head.heads(f"{name}.v", rows, N_KV_HEADS, None) for rows in (context, z)]
        q = head.heads(f"{name}.q", z, N_HEADS, at)
        block = block + head.linear(
            f"{name}.o_proj", head.attend(q, torch.cat(k), torch.cat(v), lambda i, j: True)
        )
        normed = head.norm(f"layers.{i}.post_attention_layernorm", block)
        block = block + head.mlp(f"layers.{i}.mlp", normed)
    return head.norm("norm", block)
