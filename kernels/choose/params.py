"""What `choose` takes and gives, per row of logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

LEAST_TEMPERATURE = (
    1e-5  # below it a row is greedy: logit / temperature would leave float32's range or precision
)


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


class Choice(NamedTuple):
    """What was picked."""

    token_ids: Tensor  # [n_rows] int64; -1 where a row has a NaN or +inf, or nothing above -inf
    probability: (
        Tensor | None
    )  # [n_rows] float32: softmax of the row as given, at temperature 1; None unless wanted
