"""The multi-token-prediction layer of a hybrid network, as Qwen3.5's checkpoints ship it in `mtp.*`."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from demo.checkpoint import MTP_PREFIX, load_shape
from demo.heads import Attend, ChainHead
from demo.hybrid_network import GatedAttention, HybridShape, OffsetNorm
from demo.network import Cache, FeedForward, Linear, Network


class MtpBlock(nn.Module):
    """A full attention layer whose keys `attend` holds."""

    def __init__(self, shape: HybridShape) -> None:
        super().__init__()
        self.self_attn = GatedAttention(shape)
        self.mlp = FeedForward(shape)
        self.input_layernorm = OffsetNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = OffsetNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, rope: Cache, attend: Attend) -> Tensor:
        """Output [B, T, hidden] for x [B, T, hidden]."""
        q, k, v, gate = self.self_attn.project(self.input_layernorm(x), rope)
        x = x + self.self_attn.finish(attend(q, k, v), gate)
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class HybridMtp(ChainHead):
    """[embedding | state], each normed, through one layer; embeddings and output matrix are the target's."""

    def __init__(self, shape: HybridShape) -> None:
        super().__init__()
        self.shape = shape
        self.pre_fc_norm_embedding = OffsetNorm(shape.hidden_size, shape.rms_norm_eps)
        self.pre_fc_norm_hidden = OffsetNorm(shape.hidden_size, shape.rms_norm_eps)
        self.fc = Linear(2 * shape.hidden_size, shape.hidden_size)
        self.layers = nn.ModuleList([MtpBlock(shape)])
        self.norm = OffsetNorm(shape.hidden_size, shape.rms_norm_eps)

    def carry(self, states: Tensor) -> Tensor:
        """The target's state after its final norm [B, T, hidden], as it is."""
        return states

    def forward(
        self, carried: Tensor, embedded: Tensor, rope: Cache, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        both = torch.cat((self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(carried)), -1)
        scored = self.norm(self.layers[0](self.fc(both), rope, attend))  # [B, T, hidden]
        return scored, scored

    def scores(self, scored: Tensor, target: Network) -> Tensor:
        return target.logits(scored)


def load(folder: Path) -> HybridMtp:
    """The layer that a hybrid checkpoint ships, in float32 with the values that bfloat16 left."""
    shape = load_shape(folder)
    assert isinstance(shape, HybridShape)
    head = HybridMtp(shape)
    held = load_file(str(folder / "model.safetensors"))
    head.load_state_dict(
        {
            name.removeprefix(MTP_PREFIX): weight.float()
            for name, weight in held.items()
            if name.startswith(MTP_PREFIX)
        }
    )
    return head
