"""DSpark (DeepSpec): DFlash's block, corrected from left to right, with an estimate of what will be accepted.

The block's logits come from one pass, and no row depends on another row's token. A table of low rank then adds to
each row what the token before it suggests (`correct`), row after row as tokens are picked; a linear layer estimates
from the row and that token how likely the pick is to be accepted (`confidence`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from slipstream.engine.checkpoint.weights import Weights
from slipstream.engine.errors import LoadError
from slipstream.engine.layers.decoder import AnyHead, logits_of
from slipstream.engine.layers.embed import Embedding
from slipstream.engine.models.heads.block_backbone import BlockDraft, load_block_draft
from slipstream.engine.models.heads.draft_parts import (
    load_any_linear,
    load_draft_head,
    matrix_shape,
    refuse_tensors,
)
from slipstream.engine.models.heads.head_choices import NO_CHOICE, HeadChoices
from slipstream.engine.models.network import Network
from slipstream.engine.models.reading.documents import read_documents
from slipstream.kernels.matmul.op import Packed, linear

MARKOV = "markov_head.markov_w1.weight"
BIAS = "markov_head.markov_w2"
# Pieces of names of the heads that do more than add a table's row.
VARIANTS = {
    "markov_head.gate": "the gated correction",
    "markov_head.joint": "the recurrent correction",
    "markov_head.rnn": "the recurrent correction",
    "correction_head": "the causal correction",
    "draft_adapter": "an adapter before the head",
}


@dataclass(frozen=True, slots=True)
class Confidence:
    """How likely a row's pick is to be accepted if all before it are."""

    matrix: Packed  # [1, d_model], or [1, d_model + rank]
    with_markov: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DSpark(BlockDraft):
    """A block draft and its two small heads. It holds no state of any sequence."""

    before: Embedding  # [vocab_rows, rank]: what a token says about the next
    bias: AnyHead  # rank -> vocabulary
    confidence_head: Confidence | None

    def correct(self, logits: Tensor, previous: Tensor) -> Tensor:
        """Logits of rows whose token before is known, [n_rows, vocab] float32.

        logits: rows of `run`, [n_rows, vocab]. previous: [n_rows] int64, the anchor for the first row of a
        block, then the token picked before. Ids outside a reduced vocabulary stay at minus infinity.
        """
        return logits + logits_of(self.bias, self.before(previous))

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor | None:
        """Probability that a row's pick is accepted if all before it are, [n_rows] float32; None: no estimate.

        hidden: [n_rows, d_model] from `run`. previous: [n_rows] int64 as for `correct`.
        """
        head = self.confidence_head
        if head is None:
            return None
        read = torch.cat((hidden, self.before(previous)), -1) if head.with_markov else hidden
        return torch.sigmoid(linear(read, head.matrix, torch.float32))[:, 0]


def is_dspark(names: Collection[str]) -> bool:
    """Whether a folder with these tensors holds a DSpark draft."""
    return MARKOV in names


def load_dspark(path: Path | str, target: Network, n_ctx: int, choices: HeadChoices = NO_CHOICE) -> DSpark:
    """The draft network of a folder, in the target's dtype on its device.

    n_ctx: positions of a sequence, at which a block may begin. choices: its hidden states are read instead of those
    that the config asks for. Raises `LoadError` and its subclasses naming file, tensor and value.
    """
    weights = Weights(path, target.dtype, target.device)
    config = read_documents(weights.folder)[0]
    refuse_tensors(weights, VARIANTS)
    if config.text("markov_head_type", "vanilla") != "vanilla":
        raise config.refuse("markov_head_type", "only vanilla is supported")
    block = load_block_draft(weights, target, n_ctx, choices.taps)
    n_rows, rank = matrix_shape(weights, MARKOV)
    weights.shape(f"{BIAS}.weight")  # it has to be there: no other head stands in for it
    if n_rows < target.vocab_size:
        raise LoadError(f"{weights.folder}: tensor {MARKOV} has {n_rows} rows for {target.vocab_size} tokens")
    parts = {one.name: getattr(block, one.name) for one in fields(block) if one.name != "n_params"}
    draft = DSpark(
        **parts,
        before=Embedding(weights.take(MARKOV, [n_rows, rank])),
        bias=load_draft_head(weights, BIAS, rank, target),
        confidence_head=load_confidence(weights, block.d_model, rank),
        n_params=weights.n_params,  # last: all tensors have been taken
    )
    weights.leave(["t2d"])  # which ids the draft has: for training
    weights.finish()
    return draft


def load_confidence(weights: Weights, d_model: int, rank: int) -> Confidence | None:
    """The head `confidence_head.proj`, or None if the folder has none."""
    name = "confidence_head.proj"
    if f"{name}.weight" not in weights:
        return None
    d_in = matrix_shape(weights, f"{name}.weight")[1]
    if d_in not in (d_model, d_model + rank):
        raise LoadError(
            f"{weights.folder}: tensor {name}.weight reads {d_in} numbers, neither {d_model} nor {d_model + rank}"
        )
    return Confidence(load_any_linear(weights, name, d_in, 1), with_markov=d_in != d_model)
