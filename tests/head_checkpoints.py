"""Tiny random draft heads on disk, in each published layout, named exactly as the published files name them.

Matrices and norms are large enough to show a wrong position, a missed norm or an exchanged half.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

D_MODEL, D_FFN, N_HEADS, N_KV_HEADS, D_HEAD, VOCAB = 64, 96, 4, 2, 16, 384
Tensors = dict[str, Tensor]
# What a head's config has in common with a Llama's; the number of layers is wrong, as in published files.
SHAPE: dict[str, Any] = {
    "hidden_size": D_MODEL,
    "intermediate_size": D_FFN,
    "num_hidden_layers": 36,
    "num_attention_heads": N_HEADS,
    "num_key_value_heads": N_KV_HEADS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}


class Maker:
    """Random tensors of one seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def matrix(self, d_out: int, d_in: int) -> Tensor:
        """[d_out, d_in], outputs about as large as inputs."""
        return torch.randn(d_out, d_in, generator=self.generator) * 1.2 * d_in**-0.5

    def scale(self, d: int, *, one_plus: bool = False) -> Tensor:
        """[d]: the scale of a norm, or what is added to 1."""
        return 0.3 * torch.randn(d, generator=self.generator) + (0.0 if one_plus else 1.0)

    def bias(self, d: int) -> Tensor:
        """[d]."""
        return 0.3 * torch.randn(d, generator=self.generator)

    def block(self, prefix: str, d_in: int = D_MODEL, *, d_head: int = D_HEAD, **options: bool) -> Tensors:
        """An ordinary block. options: `bias` of q, k and v; `head_norms`; `one_plus`."""
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        widths = {"q": N_HEADS * d_head, "k": N_KV_HEADS * d_head, "v": N_KV_HEADS * d_head}
        one_plus = options.get("one_plus", False)
        made = {f"{attention}{part}_proj.weight": self.matrix(d, d_in) for part, d in widths.items()}
        if options.get("bias"):
            made |= {f"{attention}{part}_proj.bias": self.bias(d) for part, d in widths.items()}
        if options.get("head_norms"):
            made |= {f"{attention}{part}_norm.weight": self.scale(d_head, one_plus=one_plus) for part in "qk"}
        made[f"{attention}o_proj.weight"] = self.matrix(D_MODEL, N_HEADS * d_head)
        for part in ("gate", "up"):
            made[f"{mlp}{part}_proj.weight"] = self.matrix(D_FFN, D_MODEL)
        made[f"{mlp}down_proj.weight"] = self.matrix(D_MODEL, D_FFN)
        for name in ("input_layernorm", "post_attention_layernorm"):
            made[f"{prefix}{name}.weight"] = self.scale(D_MODEL, one_plus=one_plus)
        return made


def write(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any] | None) -> Path:
    """A folder with one safetensors file and, if it has one, its config."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def eagle3(
    prefix: str, seed: int, *, d_head: int = D_HEAD, n_draft_ids: int = 0, bias: bool = False
) -> Tensors:
    """An EAGLE-3 head. n_draft_ids: size of its vocabulary, with `d2t`; 0: all of the target's, without.

    The draft's ids are every third of the target's from the end, a table that no shift by one can fake.
    """
    make = Maker(seed)
    made = make.block(f"{prefix}.", 2 * D_MODEL, d_head=d_head, bias=bias)
    made[f"{prefix}.hidden_norm.weight"] = make.scale(D_MODEL)
    made["fc.weight"] = make.matrix(D_MODEL, 3 * D_MODEL)
    made["norm.weight"] = make.scale(D_MODEL)
    made["lm_head.weight"] = make.matrix(n_draft_ids or VOCAB, D_MODEL)
    if n_draft_ids:
        ids = torch.arange(n_draft_ids)  # [n_draft_ids]
        known = VOCAB - 3 * (n_draft_ids - ids)  # [n_draft_ids]: ids of the target
        made["d2t"] = known - ids
        made["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, known, value=True)
    return made


def mtp_deepseek(prefix: str, seed: int, *, d_head: int = D_HEAD, head_norms: bool = False) -> Tensors:
    """One MTP layer in the names of DeepSeek-V3 and GLM-4.5."""
    make = Maker(seed)
    made = make.block(prefix, d_head=d_head, head_norms=head_norms)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        made[f"{prefix}{name}.weight"] = make.scale(D_MODEL)
    made[f"{prefix}eh_proj.weight"] = make.matrix(D_MODEL, 2 * D_MODEL)
    return made


def mtp_mimo(seed: int) -> Tensors:
    """The MTP layer of MiMo-7B: a Qwen2 block."""
    make = Maker(seed)
    prefix = "model.mtp_layers.0."
    made = make.block(prefix, bias=True)
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        made[f"{prefix}{name}.weight"] = make.scale(D_MODEL)
    made[f"{prefix}input_proj.weight"] = make.matrix(D_MODEL, 2 * D_MODEL)
    return made


def mtp_qwen(seed: int, *, d_head: int) -> Tensors:
    """The MTP layer in the names of Qwen3-Next, with a dense block and no gate."""
    make = Maker(seed)
    made = make.block("mtp.layers.0.", d_head=d_head, head_norms=True, one_plus=True)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        made[f"mtp.{name}.weight"] = make.scale(D_MODEL, one_plus=True)
    made["mtp.fc.weight"] = make.matrix(D_MODEL, 2 * D_MODEL)
    return made


def dflash(seed: int, *, n_layers: int, n_taps: int, d_head: int = D_HEAD) -> Tensors:
    """A DFlash draft: Qwen3 blocks, no embedding, no head."""
    make = Maker(seed)
    made: Tensors = {"fc.weight": make.matrix(D_MODEL, n_taps * D_MODEL)}
    for i in range(n_layers):
        made |= make.block(f"layers.{i}.", d_head=d_head, head_norms=True)
    for name in ("hidden_norm", "norm"):
        made[f"{name}.weight"] = make.scale(D_MODEL)
    return made


def dspark(seed: int, *, n_layers: int, n_taps: int, rank: int) -> Tensors:
    """A DSpark draft: DFlash's with its own ends, the table of followers and the estimate of acceptance."""
    make = Maker(seed + 100)
    return dflash(seed, n_layers=n_layers, n_taps=n_taps) | {
        "embed_tokens.weight": make.matrix(VOCAB, D_MODEL),
        "lm_head.weight": make.matrix(VOCAB, D_MODEL),
        "markov_head.markov_w1.weight": make.matrix(VOCAB, rank) * 2,
        "markov_head.markov_w2.weight": make.matrix(VOCAB, rank),
        "confidence_head.proj.weight": make.matrix(1, D_MODEL + rank),
        "confidence_head.proj.bias": make.bias(1),
    }


def add_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> Path:
    """Put more tensors into a checkpoint folder's file, as targets carry their MTP heads."""
    path = folder / "model.safetensors"
    save_file({**load_file(path), **tensors}, path, metadata={"format": "pt"})
    return folder


NESTED = {key: value for key, value in SHAPE.items() if key != "vocab_size"}
EAGLE3: dict[str, dict[str, Any]] = {
    "SafeAILab": {
        "config": {**SHAPE, "architectures": ["LlamaForCausalLM"], "draft_vocab_size": 100},
        "n_draft_ids": 100,
        "taps": (2, 3, 3),
    },
    "SpecForge": {
        "config": {
            **SHAPE,
            "architectures": ["LlamaForCausalLMEagle3"],
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4], "use_aux_hidden_state": True},
        },
        "n_draft_ids": 60,
        "taps": (1, 3, 5),
        "bias": True,
        "own_embedding": True,
    },
    "AngelSlim": {
        "config": {
            **SHAPE,
            "architectures": ["Eagle3LlamaForCausalLM"],
            "aux_hidden_states_layer_ids": [1, 3, 4],
            "head_dim": 128,  # wrong, as in published files: the tensors say 32
        },
        "taps": (2, 4, 5),
        "d_head": 32,
        "fc_norm": True,
    },
    "speculators": {
        "config": {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": NESTED,
            "eagle_aux_hidden_state_layer_ids": [1, 3, 6],
            "norm_before_fc": True,
            "norm_output": True,
        },
        "prefix": "layers.0",
        "n_draft_ids": 128,
        "taps": (1, 3, 6),
        "options": {"norm_before_residual", "norm_before_fc", "norm_output"},
        "second_layer": True,
    },
}
DFLASH_CONFIG = {
    **SHAPE,
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 6,
    "num_target_layers": 6,
    "layer_types": ["full_attention"] * 3,
    "dflash_config": {"mask_token_id": 381, "target_layer_ids": [0, 2, 4]},
}
DSPARK_CONFIG = {
    **SHAPE,
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 5,
    "mask_token_id": 380,
    "target_layer_ids": [1, 4],
    "markov_rank": 12,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
}


def eagle3_tensors(case: dict[str, Any]) -> Tensors:
    """The tensors of a case."""
    make = Maker(9)
    sizes = {key: case[key] for key in ("d_head", "n_draft_ids", "bias") if key in case}
    tensors = eagle3(case.get("prefix", "midlayer"), 8, **sizes)
    if "bias" in case:
        tensors["fc.bias"] = make.bias(D_MODEL)
    if "own_embedding" in case:
        tensors["embed_tokens.weight"] = make.matrix(VOCAB, D_MODEL)
    if "fc_norm" in case:
        tensors |= {f"fc_norm.{i}.weight": make.scale(D_MODEL) for i in range(3)}
    if "second_layer" in case:
        tensors |= make.block("layers.1.")
        tensors["input_norm.weight"] = make.scale(3 * D_MODEL)
    return tensors
