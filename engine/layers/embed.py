"""Token embedding and output head.

The matrices of a checkpoint are padded past the tokenizer's vocabulary. The head is cut to the real ids, so
that a padding row can never be picked; the embedding keeps all rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.engine.checkpoint.tensor_source import TensorSource
from slipstream.engine.ranks import ALONE, Ranks
from slipstream.kernels.gated.op import soft_cap
from slipstream.kernels.matmul.blocks import BlockWeight
from slipstream.kernels.matmul.op import Packed, linear, pack, take_rows


@dataclass(frozen=True, slots=True)
class Embedding:
    """Rows of the residual stream by token id."""

    weight: Tensor | BlockWeight  # [vocab_rows, d_model]
    scale: Tensor | None = None  # [] of the weight's dtype: rows are multiplied by it, and rounded
    name: str = ""  # of its tensor, for a head that is tied to it

    def __call__(self, token_ids: Tensor) -> Tensor:
        """token_ids: [n_tokens] int64. Returns [n_tokens, d_model]."""
        rows = take_rows(self.weight, token_ids)
        return rows if self.scale is None else rows * self.scale


@dataclass(frozen=True, slots=True)
class Head:
    """Logits of the real vocabulary."""

    packed: Packed
    vocab_size: int
    cap: float | None = None  # logits are softly kept below it
    ranks: Ranks = ALONE  # each has as many rows of the matrix, the last with rows past the vocabulary

    def __call__(self, x: Tensor) -> Tensor:
        """x: [n_logits, d_model]. Returns [n_logits, vocab] float32."""
        logits = linear(x, self.packed, torch.float32)
        if self.ranks.n > 1:
            logits = self.ranks.join(logits)[:, : self.vocab_size]
        return logits if self.cap is None else soft_cap(logits, self.cap)


def load_embedding(
    weights: TensorSource, name: str, vocab_rows: int, d_model: int, scale: float | None = None
) -> Embedding:
    """The embedding whose matrix is the tensor `name.weight`. scale: of its rows, rounded to their dtype."""
    weight = weights.take_matrix(f"{name}.weight", (vocab_rows, d_model))
    factor = None if scale is None else torch.tensor(scale, dtype=weight.dtype, device=weight.device)
    return Embedding(weight, factor, name)


def load_head(
    weights: TensorSource,
    name: str,
    embedding: Embedding,
    vocab_size: int,
    *,
    tied: bool | None,
    cap: float | None = None,
) -> Head:
    """The head whose matrix is `name.weight`, or the embedding's if they are tied.

    tied: what the checkpoint says; None leaves it to whether the tensor is there. A tied checkpoint may
    repeat the embedding as the head, equal in every number. cap: of logits, softly; None: none.
    """
    full, tensor, ranks = embedding.weight, f"{name}.weight", weights.ranks
    n_rows, d_model = full.shape
    if tied is None:
        tied = tensor not in weights
    if tied:
        weights.drop_copy(tensor, full)
        full = weights.take_tied(embedding.name, full)
        return Head(pack(_rows_of(full, ranks, vocab_size)), vocab_size, cap, ranks)
    if n_rows % ranks.n:  # read in whole
        matrix = weights.take_matrix(tensor, (n_rows, d_model), for_rows=False)
        return Head(pack(_rows_of(matrix, ranks, vocab_size)), vocab_size, cap, ranks)
    part = weights.take_matrix(tensor, (n_rows // ranks.n, d_model), for_rows=False)
    return Head(pack(_rows_of(part, ALONE, vocab_size)), vocab_size, cap, ranks)


def _rows_of(matrix: Tensor | BlockWeight, ranks: Ranks, vocab_size: int) -> Tensor | BlockWeight:
    """A rank's rows of a matrix [vocab_rows, d_model], as many on each: padded where the matrix ends."""
    n_each = vocab_size if ranks.n == 1 else -(-matrix.shape[0] // ranks.n)
    rows = matrix.data if isinstance(matrix, BlockWeight) else matrix  # [vocab_rows, ...]
    own = rows[ranks.rank * n_each :][:n_each]
    if ranks.n > 1 and len(own) < n_each:
        own = torch.cat((own, own.new_zeros(n_each - len(own), own.shape[1])))
    return replace(matrix, data=own) if isinstance(matrix, BlockWeight) else own
