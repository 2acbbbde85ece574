"""Definition of `choose` in plain torch: a full sort and noise for every token of every row."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.choose import noise
from slipstream.kernels.choose.mass import masses, weights
from slipstream.kernels.choose.row_params import (
    LEAST_TEMPERATURE,
    Choice,
    Edits,
    Masks,
    RowParams,
    edit_columns,
    mask_columns,
    row_columns,
)


class Values(NamedTuple):
    """`RowParams` of one row."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    position: int


EXACT = True  # sums are of integers


def choose(
    logits: Tensor,
    params: RowParams,
    edits: Edits | None = None,
    masks: Masks | None = None,
    *,
    want_probability: bool = False,
) -> Choice:
    picked, probability = [], []
    columns = [column.tolist() for column in row_columns(params, len(logits))]
    rows = masked(edited(logits.to(torch.float32), edits), masks)
    for row, values in zip(rows, zip(*columns, strict=True), strict=True):
        largest = row.max()
        token = _pick(row, Values(*values)) if bool(largest.isfinite()) else -1
        mass = masses(row - largest) if token >= 0 else torch.ones_like(row, dtype=torch.int64)
        picked.append(token)
        probability.append(mass[token].item() / mass.sum().item() if token >= 0 else 0.0)
    chances = (
        torch.tensor(probability, dtype=torch.float32, device=logits.device) if want_probability else None
    )
    return Choice(torch.tensor(picked, dtype=torch.int64, device=logits.device), chances)


def edited(logits: Tensor, edits: Edits | None) -> Tensor:
    """The logits after their entries. logits: [n_rows, vocab] float32, left as they are."""
    if edits is None:
        return logits
    edit_columns(edits, len(logits))
    n_entries = edits.starts.diff()  # [n_rows] int32
    rows = torch.arange(len(n_entries), device=logits.device).repeat_interleave(n_entries)  # [n] int64
    inside = (edits.token_ids >= 0) & (edits.token_ids < logits.shape[1])  # [n] bool
    places = rows[inside], edits.token_ids[inside].long()
    biased = logits[places] + edits.bias[inside]
    repeat = edits.repeat[inside]
    repeated = torch.where(biased > 0, biased / repeat, biased * repeat)
    changed = logits.clone()
    changed[places] = repeated - edits.penalty[inside]
    return changed


def masked(logits: Tensor, masks: Masks | None) -> Tensor:
    """The logits, -inf where a token may not be picked. logits: [n_rows, vocab] float32, left as they are."""
    if masks is None:
        return logits
    mask_columns(masks, *logits.shape)
    bits = torch.arange(32, device=logits.device, dtype=torch.int32)  # [32]
    forbidden = ((masks.allowed[:, :, None] >> bits) & 1 == 0).flatten(1)  # [n_masked, 32 * n_words]
    ruled = masks.index >= 0  # [n_rows] bool
    changed = logits.clone()
    lines = forbidden[masks.index[ruled].long(), : logits.shape[1]]
    changed[ruled] = changed[ruled].masked_fill(lines, float("-inf"))
    return changed


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
