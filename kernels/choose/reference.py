"""Definition of `choose` in plain torch: a full sort and noise for every token of every row."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.choose import noise
from kernels.choose.mass import masses, weights
from kernels.choose.params import LEAST_TEMPERATURE, Choice, RowParams


class Values(NamedTuple):
    """`RowParams` of one row."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    position: int


EXACT = True  # sums are of integers


def refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    return None


def choose(logits: Tensor, params: RowParams, *, want_probability: bool = False) -> Choice:
    picked, probability = [], []
    columns = [getattr(params, field.name).tolist() for field in fields(params)]
    for row, values in zip(logits.to(torch.float32), zip(*columns, strict=True), strict=True):
        largest = row.max()
        token = _pick(row, Values(*values)) if bool(largest.isfinite()) else -1
        mass = masses(row - largest) if token >= 0 else torch.ones_like(row, dtype=torch.int64)
        picked.append(token)
        probability.append(mass[token].item() / mass.sum().item() if token >= 0 else 0.0)
    chances = (
        torch.tensor(probability, dtype=torch.float32, device=logits.device) if want_probability else None
    )
    return Choice(torch.tensor(picked, dtype=torch.int64, device=logits.device), chances)


def survivors(
    row: Tensor,  # [vocab] float32, the largest finite
    top_k: int,
    top_p: float,
    min_p: float,
) -> Tensor:  # [n] int64: token ids that may be picked, largest logit first
    order = torch.sort(row, descending=True, stable=True).indices
    distance = row[order] - row[order[0]]
    n = top_k if 0 < top_k < len(row) else len(row)
    if top_p < 1:
        mass = masses(distance[:n])
        need = math.ceil(top_p * mass.sum().item())
        n = int((mass.cumsum(0) < need).sum()) + 1
    kept = (weights(distance) >= min_p) & (distance > float("-inf"))
    return order[:n][kept[:n]]


def _pick(row: Tensor, values: Values) -> int:
    if values.temperature < LEAST_TEMPERATURE:
        return int(row.argmax())
    kept = survivors(row, values.top_k, values.top_p, values.min_p)
    seed, position = (torch.tensor([x], device=row.device) for x in (values.seed, values.position))
    word = noise.words(seed, position, len(row))[0]
    value = torch.full_like(row, float("-inf"))
    # as a tensor: a Python scalar becomes a product with its reciprocal on some devices
    divisor = torch.tensor(values.temperature, device=row.device)
    value[kept] = row[kept] / divisor + noise.gumbel(word[kept])
    return int(value.argmax())
