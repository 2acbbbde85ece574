"""DFlash (z-lab): a block of tokens in one pass, conditioned on the target's hidden states as keys and values.

The network is `engine.models.heads.block_backbone`; a DFlash folder adds nothing to it. Usually it has neither
embedding nor head: both are the target's, and the mask token is a row of the target's embedding.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from slipstream.engine.checkpoint.weights import Weights
from slipstream.engine.models.heads.block_backbone import BlockDraft, load_block_draft
from slipstream.engine.models.heads.head_choices import NO_CHOICE, HeadChoices
from slipstream.engine.models.network import Network


def is_dflash(names: Collection[str]) -> bool:
    """Whether a folder with these tensors holds a DFlash draft, or a draft that adds to it."""
    return "fc.weight" in names and "hidden_norm.weight" in names


def load_dflash(
    path: Path | str, target: Network, n_ctx: int, choices: HeadChoices = NO_CHOICE
) -> BlockDraft:
    """The draft network of a folder, in the target's dtype on its device.

    n_ctx: positions of a sequence, at which a block may begin. choices: its hidden states are read instead of those
    that the config asks for. Raises `LoadError` and its subclasses naming file, tensor and value.
    """
    weights = Weights(path, target.dtype, target.device)
    draft = load_block_draft(weights, target, n_ctx, choices.taps)
    weights.leave(["t2d"])  # which ids the draft has: for training
    weights.finish()
    return draft
