"""What `choose` takes and gives, per row of logits."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

# Below it a row is greedy: logit / temperature would leave float32's range or precision.
LEAST_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True)
class RowParams:
    """How each row is to be chosen from."""

    temperature: Tensor  # [n_rows] float32; 0 takes the largest logit
    top_k: Tensor  # [n_rows] int32; 0 off
    top_p: Tensor  # [n_rows] float32; 1 off
    min_p: Tensor  # [n_rows] float32; 0 off
    seed: Tensor  # [n_rows] int64: the bits of an unsigned 64-bit seed
    position: Tensor  # [n_rows] int64: index of the *picked* token in its sequence, prompt included


COLUMNS = {
    "temperature": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "seed": torch.int64,
    "position": torch.int64,
}


@dataclass(frozen=True, slots=True)
class Edits:
    """Single logits to change. Those of row i are the entries starts[i] … starts[i + 1] - 1, each token once.

    An entry makes three steps, each rounded to float32: l += bias; l = l / repeat where l > 0, l * repeat elsewhere;
    l -= penalty. One whose token the row does not have is passed over.
    """

    starts: Tensor  # [n_rows + 1] int32
    token_ids: Tensor  # [n] int32
    bias: Tensor  # [n] float32; 0 off
    repeat: Tensor  # [n] float32; 1 off
    penalty: Tensor  # [n] float32; 0 off


EDIT_COLUMNS = {
    "starts": torch.int32,
    "token_ids": torch.int32,
    "bias": torch.float32,
    "repeat": torch.float32,
    "penalty": torch.float32,
}


@dataclass(frozen=True, slots=True)
class Masks:
    """Which tokens may be picked: bit i of word w stands for token 32 * w + i."""

    index: Tensor  # [n_rows] int32: the row's line of `allowed`; -1 where every token may be picked
    allowed: Tensor  # [n_masked, n_words] int32; 32 * n_words >= vocab


class Choice(NamedTuple):
    """What was picked."""

    token_ids: Tensor  # [n_rows] int64; -1 where a row has a NaN or +inf, or nothing above -inf
    # [n_rows] float32: softmax of the row after edits and mask, at temperature 1; None unless wanted
    probability: Tensor | None


def row_columns(params: RowParams, n_rows: int) -> tuple[Tensor, ...]:
    """The fields in their order. Raises ValueError where their memory would be read as something else."""
    return _columns(params, COLUMNS, (n_rows,) * len(COLUMNS))


def edit_columns(edits: Edits, n_rows: int) -> tuple[Tensor, ...]:
    """The same of entries."""
    n = edits.token_ids.shape[0]
    return _columns(edits, EDIT_COLUMNS, (n_rows + 1, n, n, n, n))


def _columns(
    of: RowParams | Edits, dtypes: dict[str, torch.dtype], lengths: tuple[int, ...]
) -> tuple[Tensor, ...]:
    columns: tuple[Tensor, ...] = attrgetter(*dtypes)(of)
    for column, dtype, length in zip(columns, dtypes.values(), lengths, strict=True):
        if column.dtype != dtype or not column.is_contiguous() or column.shape != (length,):
            name = type(of).__name__
            raise ValueError(f"{name}: fields are contiguous, one per row or entry, of the types it names")
    return columns


def mask_columns(masks: Masks, n_rows: int, vocab: int) -> tuple[Tensor, ...]:
    """The same of masks."""
    columns = masks.index, masks.allowed
    fits = (
        masks.index.shape == (n_rows,) and masks.allowed.dim() == 2 and 32 * masks.allowed.shape[1] >= vocab
    )
    if not fits or any(one.dtype != torch.int32 or not one.is_contiguous() for one in columns):
        raise ValueError("masks are contiguous int32: a line per row, and in each a bit for every token")
    return columns
