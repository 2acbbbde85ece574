"""MTP heads of several layers with windows, MiMo-V2's and Step's, made of blocks of transformers' own.

Neither family's MTP layers are in transformers, or not as they are released; their blocks are its decoder layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.mimo_v2_flash.modeling_mimo_v2_flash import MiMoV2FlashModel, MiMoV2FlashRMSNorm
from transformers.models.step3p7.modeling_step3p7 import Step3p7RMSNorm, Step3p7TextModel

from slipstream.engine.models.network import Network
from slipstream.engine.models.registry import load_network
from slipstream.kernels import select
from tests import head_checkpoints as made
from tests.checkpoints import edited, tiny_checkpoint
from tests.oracle.head_rounds import CPU, VOCAB
from tests.released import release_step, released_mimo
from tests.tiny_families import FULL, SLIDING

N_LAYERS = 3
D_MODEL = 64
# What a released file calls parts of a block.
RENAMED = {
    "mimo": {
        "self_attn.sinks": "self_attn.attention_sink_bias",
        "post_attention_layernorm": "pre_mlp_layernorm",
    },
    "step": {},
}
STEP_LAYERS = {
    "num_nextn_predict_layers": N_LAYERS,
    "layer_types": [FULL, SLIDING, SLIDING, SLIDING, FULL] + [SLIDING] * N_LAYERS,
    "mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse"] + ["dense"] * N_LAYERS,
}


@dataclass
class Layers:
    """A head as its family defines it, over a whole text. A sequence of guesses starts behind the last token."""

    blocks: Any  # a model of transformers that has them
    embedding: Tensor  # [vocab, d_model]
    heads: Sequence[Tensor]  # [vocab, d_model], of each layer
    norms: Sequence[dict[str, nn.Module]]  # of each layer: token, hidden, last
    joints: Sequence[Tensor]  # [d_model, 2 * d_model]
    window: int
    recycled: str  # "raw", "normed" or "target"

    @torch.inference_mode()
    def logits(self, ids: Sequence[int], guesses: Sequence[int], hidden: Tensor) -> list[Tensor]:
        """Of each guess, [vocab]. ids: x_0 … x_n; hidden: the target's states at 0 … n - 1, [n, d_model]."""
        whole, found = [*ids, *guesses], list[Tensor]()
        reads = states = hidden
        for j in range(len(guesses)):
            k = min(j, N_LAYERS - 1)
            if j >= N_LAYERS:  # the last layer once more, with its own state of the row before
                reads = torch.cat((reads, states[-1:]))
            else:
                reads = hidden if self.recycled == "target" else states
            tokens = torch.tensor([*whole, *[0] * N_LAYERS][1 + k : 1 + k + len(reads)])
            raw, normed = self.run(k, tokens, reads)
            states = raw if self.recycled == "raw" else normed
            row = len(hidden) - 1 if j < N_LAYERS else len(reads) - 1
            found.append(self.heads[k] @ normed[row])
        return found

    def run(self, k: int, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Layer k over rows at positions 0, 1, …: its block's output and the same normed, [n, d_model] each."""
        norms, at = self.norms[k], torch.arange(len(tokens))
        halves = norms["token"](self.embedding[tokens]), norms["hidden"](hidden)
        x = (torch.cat(halves, -1) @ self.joints[k].T)[None]
        distance = at[:, None] - at
        hides = (distance < 0) | (distance >= self.window)
        mask = torch.zeros(hides.shape).masked_fill(hides, float("-inf"))[None, None]
        turns = self.blocks.rotary_emb(x, at[None], SLIDING)
        raw = self.blocks.layers[k](x, attention_mask=mask, position_embeddings=turns)[0]
        return raw, norms["last"](raw)


def checkpoint(family: str, folder: Path) -> Path:
    """A tiny target."""
    if family == "mimo":
        return tiny_checkpoint("mimo_v2_flash", folder)
    return tiny_checkpoint("step3p7", folder, changes=STEP_LAYERS)


def blocks_of(family: str, target: Path) -> Any:
    """transformers' blocks of the layers, random."""
    config = AutoConfig.from_pretrained(target, attn_implementation="eager").get_text_config()
    config.num_hidden_layers, config.layer_types = N_LAYERS, [SLIDING] * N_LAYERS
    config.mlp_layer_types = ["dense"] * N_LAYERS
    if family == "step":
        heads = {"num_attention_heads": config.num_sliding_attention_heads}
        config.per_layer_config = {str(i): heads for i in range(N_LAYERS)}
        config.swiglu_limits = config.swiglu_limits_shared = None
    torch.manual_seed(8)
    model = (MiMoV2FlashModel if family == "mimo" else Step3p7TextModel)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
            else:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.requires_grad_(requires_grad=False)


def released(family: str, blocks: Any, target: Network, recycled: str) -> tuple[made.Tensors, Layers]:
    """The tensors as a released file has them, and the head that they make."""
    generator = torch.Generator().manual_seed(9)

    def noise(*shape: int, scale: float) -> Tensor:
        return scale * torch.randn(*shape, generator=generator)

    embedding = target.decoder.embedding.weight
    assert isinstance(embedding, Tensor)
    names = ("enorm", "hnorm", "final_layernorm" if family == "mimo" else "transformer.shared_head.norm")
    kind, mean = (MiMoV2FlashRMSNorm, 1.0) if family == "mimo" else (Step3p7RMSNorm, 0.0)
    prefix = "model.mtp.layers.{}" if family == "mimo" else "model.layers.{}"
    tensors: made.Tensors = {}
    heads, all_norms, joints = [], [], []
    for i in range(N_LAYERS):
        layer = prefix.format(i if family == "mimo" else 5 + i)
        for name, one in blocks.layers[i].state_dict().items():
            for ours, theirs in RENAMED[family].items():
                name = name.replace(ours, theirs)
            tensors[f"{layer}.{name}"] = one.clone()
        norms: dict[str, nn.Module] = {}
        for key, name in zip(("token", "hidden", "last"), names, strict=True):
            norms[key] = kind(D_MODEL, eps=target.spec.norm.eps)
            weight = mean + noise(D_MODEL, scale=0.2)
            norms[key].load_state_dict({"weight": weight})
            tensors[f"{layer}.{name}.weight"] = weight
        joint = noise(D_MODEL, 2 * D_MODEL, scale=0.05)
        joint[:, :D_MODEL] += torch.eye(D_MODEL)  # what the target makes of a token in part
        joints.append(joint)
        tensors[f"{layer}.eh_proj.weight"] = joints[-1]
        heads.append(noise(VOCAB, D_MODEL, scale=0.15))
        if family == "step":
            tensors[f"{layer}.transformer.shared_head.output.weight"] = heads[-1]
            tensors[f"{layer}.embed_tokens.weight"] = embedding.clone()
        all_norms.append(norms)
    if family == "mimo":  # its layers share the target's head
        with torch.inference_mode():
            heads = [target.decoder.head(torch.eye(D_MODEL)).T.clone()] * N_LAYERS
    window = blocks.config.sliding_window
    return tensors, Layers(blocks, embedding, heads, all_norms, joints, window, recycled)


def with_head(family: str, target: Path, head: made.Tensors, folder: Path) -> Path:
    """The target's folder with the head in it, as released; Step's in the names of its own files."""
    names = {"model.language_model.": "model."} if family == "step" else {}

    def add(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            for ours, theirs in names.items():
                tensors[name.replace(ours, theirs)] = tensors.pop(name)
        tensors.update(head)

    return edited(target, folder, add)


def with_window_head(family: str, target: Path, folder: Path) -> Path:
    """A copy of a target's folder with a head in it."""
    select(CPU, torch.float32)
    network = load_network(target, torch.float32, CPU, 64)
    return with_head(family, target, released(family, blocks_of(family, target), network, "auto")[0], folder)


def released_checkpoint(family: str, scratch: Path) -> Path:
    """A tiny checkpoint as its model was released, with a head in it."""
    folder = with_window_head(family, checkpoint(family, scratch / "target"), scratch / "both")
    if family == "mimo":
        return released_mimo(folder, scratch / "released")
    release_step(folder, [SLIDING] * N_LAYERS)
    return folder
