"""The checkpoint folders of the draft heads, in the layouts that published heads have.

EAGLE-3 as SpecForge writes it, the MTP layer as in MiMo-7B, DFlash as z-lab publishes it. A DSpark checkpoint repeats
the DFlash that it is made from; to keep the repository small its folder holds only what is added to `dflash/`, and
`demo.assemble_dspark` writes the whole one.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from demo.checkpoint import config
from demo.heads import DFlashHead, DSparkHead, Eagle3Head, MtpHead
from demo.network import Shape
from demo.tokenizer import VOCAB_SIZE

# Layers of the target whose outputs are read; the last layer's is left out, as loaders differ in what it is.
EAGLE_LAYERS = [0, 2, 3]
DFLASH_LAYERS = [0, 1, 2, 3]
# Tap k is the stream entering layer k, transformers' hidden_states[k]: one more than the layer it comes out of.
EAGLE_TAPS = [layer + 1 for layer in EAGLE_LAYERS]
DFLASH_TAPS = [layer + 1 for layer in DFLASH_LAYERS]
DRAFT_VOCAB_SIZE = 2048
BLOCK_SIZE = 8
# <|endoftext|>: it never stands inside a text.
MASK_TOKEN = 0
MTP_PREFIX = "model.mtp_layers.0."
MARKOV_RANK = 32
# What DSpark adds to the DFlash in BACKBONE, the folder beside its own.
DSPARK_PREFIXES = ("markov_head.", "confidence_head.")
BACKBONE = "dflash"
NAMES = ("eagle3", "mtp", "dflash", "dspark")

EAGLE_SHAPE = Shape(
    vocab_size=VOCAB_SIZE,
    hidden_size=256,
    intermediate_size=576,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=128,
)
# An MTP layer has the dimensions of its target's layers, from whose config it is read.
MTP_SHAPE = replace(EAGLE_SHAPE, num_hidden_layers=5)
DFLASH_SHAPE = replace(
    EAGLE_SHAPE, intermediate_size=1344, num_attention_heads=8, num_key_value_heads=8, head_dim=64
)

Head = Eagle3Head | MtpHead | DFlashHead


def make(name: str, draft_ids: Tensor | None = None) -> Head:
    """A new head; EAGLE-3 is given the ids [draft vocabulary] that it can draft, DSpark needs `take_backbone`."""
    if name == "mtp":
        return MtpHead(MTP_SHAPE)
    if name == "dflash":
        return DFlashHead(DFLASH_SHAPE, len(DFLASH_TAPS))
    if name == "dspark":
        return DSparkHead(DFLASH_SHAPE, len(DFLASH_TAPS), MARKOV_RANK)
    return Eagle3Head(EAGLE_SHAPE, torch.arange(DRAFT_VOCAB_SIZE) if draft_ids is None else draft_ids)


def head_config(head: Head) -> dict[str, object]:
    """The config.json of a head."""
    fields = config(head.shape)
    if isinstance(head, MtpHead):
        # The target's own config, as in a checkpoint that ships the layer; the folder holds nothing else of it.
        return {**fields, "num_nextn_predict_layers": 1}
    if isinstance(head, DFlashHead):
        return {
            **fields,
            "architectures": ["DFlashDraftModel"],
            "block_size": BLOCK_SIZE,
            "layer_types": ["full_attention"],
            "num_target_layers": MTP_SHAPE.num_hidden_layers,
            "dflash_config": {"mask_token_id": MASK_TOKEN, "target_layer_ids": DFLASH_LAYERS},
            **(dspark_fields(head) if isinstance(head, DSparkHead) else {}),
        }
    return {
        **fields,
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "mlp_bias": False,
        "draft_vocab_size": len(head.d2t),
        "tie_word_embeddings": False,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": EAGLE_LAYERS,
            "use_aux_hidden_state": True,
        },
    }


def dspark_fields(head: DSparkHead) -> dict[str, object]:
    """What a DSpark's config says beside DFlash's; as in DFlash, the anchor's own row drafts nothing."""
    return {
        "architectures": ["DSparkDraftModel"],
        "confidence_head_with_markov": True,
        "enable_confidence_head": True,
        "markov_head_type": "vanilla",
        "markov_rank": head.rank,
        "sample_from_anchor": False,
    }


def tensors(head: Head) -> dict[str, Tensor]:
    """What the file holds: bfloat16 weights, and EAGLE-3's tables as int64 and bool."""
    prefix = MTP_PREFIX if isinstance(head, MtpHead) else ""
    held = {f"{prefix}{name}": value.detach().cpu() for name, value in head.state_dict().items()}
    if isinstance(head, DSparkHead):
        held = {name: value for name, value in held.items() if name.startswith(DSPARK_PREFIXES)}
    return {
        name: (value.to(torch.bfloat16) if value.is_floating_point() else value).contiguous()
        for name, value in held.items()
    }


def export(head: Head, folder: Path) -> None:
    """Write config and weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(head_config(head), indent=2) + "\n")
    # A rename is atomic, so a reader never sees half a file.
    partial = folder / "model.safetensors.partial"
    save_file(tensors(head), str(partial), metadata={"format": "pt"})
    partial.chmod(0o644)
    partial.replace(folder / "model.safetensors")


def load(folder: Path) -> Head:
    """The head of a folder in float32, with the values that bfloat16 left."""
    fields = json.loads((folder / "config.json").read_text())
    held = load_file(str(folder / "model.safetensors"))
    shape = Shape(**{name: fields[name] for name in Shape.__dataclass_fields__})
    head: Head
    if "markov_rank" in fields:
        held |= load_file(str(folder.parent / BACKBONE / "model.safetensors"))
        head = DSparkHead(shape, len(fields["dflash_config"]["target_layer_ids"]), fields["markov_rank"])
    elif "dflash_config" in fields:
        head = DFlashHead(shape, len(fields["dflash_config"]["target_layer_ids"]))
    elif "eagle_config" in fields:
        n_taps = len(fields["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
        head = Eagle3Head(shape, held["d2t"] + torch.arange(len(held["d2t"])), n_taps)
    else:
        head = MtpHead(shape)
    head.load_state_dict(
        {
            name.removeprefix(MTP_PREFIX): value.float() if value.is_floating_point() else value
            for name, value in held.items()
        }
    )
    return head


def parameter_count(head: nn.Module) -> int:
    """Trained values; the vocabulary tables are not among them, nor is a DSpark's frozen backbone."""
    return sum(weight.numel() for weight in head.parameters() if weight.requires_grad)


def states(head: Head, found: list[Tensor]) -> Tensor:
    """The states that a head reads [B, T, n * hidden], of the target's streams (transformers' order)."""
    if isinstance(head, Eagle3Head | DFlashHead):
        taps = DFLASH_TAPS if isinstance(head, DFlashHead) else EAGLE_TAPS
        return torch.cat([found[tap] for tap in taps], -1)
    return found[-1]
