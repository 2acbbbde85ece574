"""The pick of every logits row: bias, penalties, grammar, truncation, temperature, noise, argmax, in that order.

Target and draft networks call the same function. A row is scored as if the drafts before it had been
accepted, so penalties count them and the noise is that of the position the pick would take.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import upload
from engine.sample.params import SamplingParams
from kernels.choose.op import Choice, RowParams, choose
from kernels.edit.op import Entries, Penalties, edit
from kernels.mask.op import mask


@dataclass(frozen=True, slots=True)
class Row:
    """One logits row: the sequence before it is `tokens + drafts`."""

    params: SamplingParams
    tokens: Sequence[int]
    n_prompt: int
    counts: Counter[int]  # of output tokens in `tokens`; filled only if the penalties need it
    drafts: Sequence[int] = ()
    allowed: NDArray[np.int32] | None = None  # [n_words]: bits of the tokens that a grammar allows; None: all


def pick(
    logits: Tensor, rows: Sequence[Row], *, params: RowParams | None = None, want_probability: bool = False
) -> Choice:
    """Pick one token per row.

    logits: [n_rows, vocab] float32, edited in place where a row has bias, penalties or a grammar. params: those of the
    rows, if they are at hand; where they count drafts by their positions, the rows of sequences whose `counts_drafts`
    is false need not name them. An id of -1 marks a row with NaN, or one whose grammar allows nothing.
    """
    if any(row.params.edits for row in rows):
        edit(logits, _entries(rows, logits), _penalties(rows, logits.device))
    ruled = [(i, row.allowed) for i, row in enumerate(rows) if row.allowed is not None]
    if ruled:
        places, words = zip(*ruled, strict=True)
        mask(logits, torch.tensor(places, device=logits.device), upload(np.stack(words), logits.device))
    if params is None:
        params = row_params(rows, logits.device)
    return choose(logits, params, want_probability=want_probability)


def row_params(rows: Sequence[Row], device: torch.device) -> RowParams:
    """How each row is picked, as far as `choose` needs it."""

    def column(values: Sequence[float | int], dtype: type[np.generic]) -> Tensor:  # [n_rows]
        return torch.from_numpy(np.array(values, dtype=dtype)).to(device)

    seeds = np.array([row.params.seed for row in rows], dtype=np.uint64).view(np.int64)
    return RowParams(
        temperature=column([row.params.temperature for row in rows], np.float32),
        top_k=column([row.params.top_k for row in rows], np.int32),
        top_p=column([row.params.top_p for row in rows], np.float32),
        min_p=column([row.params.min_p for row in rows], np.float32),
        seed=torch.from_numpy(seeds).to(device),
        position=column([len(row.tokens) + len(row.drafts) for row in rows], np.int64),
    )


def _penalties(rows: Sequence[Row], device: torch.device) -> Penalties:
    def column(name: str) -> Tensor:  # [n_rows] float32
        return torch.tensor([getattr(row.params, name) for row in rows], dtype=torch.float32, device=device)

    return Penalties(column("repeat_penalty"), column("presence_penalty"), column("frequency_penalty"))


def _entries(rows: Sequence[Row], logits: Tensor) -> Entries:
    """Every (row, token) whose logit changes. Drafted ids past the vocabulary have no logit and are left out."""
    found = [
        (i, *entry)
        for i, row in enumerate(rows)
        if row.params.edits
        for entry in _row_entries(row)
        if entry[0] < logits.shape[1]
    ]
    columns = list(zip(*found, strict=True)) or [()] * 5
    types = (torch.int64, torch.int64, torch.float32, torch.int32, torch.bool)
    return Entries(
        *(
            torch.tensor(column, dtype=dtype, device=logits.device)
            for column, dtype in zip(columns, types, strict=True)
        )
    )


def _row_entries(row: Row) -> Iterator[tuple[int, float, int, bool]]:
    """(token, bias, count in the output, inside the repeat window) of one row, each token once."""
    params = row.params
    counts = row.counts + Counter(row.drafts) if params.counts_output else Counter[int]()
    window: set[int] = set()
    if params.repeats:
        n_old = max(0, params.repeat_last_n - len(row.drafts))
        old = row.tokens[max(0, len(row.tokens) - n_old) :]
        window = {*old, *row.drafts[max(0, len(row.drafts) - params.repeat_last_n) :]}
    bias = params.bias
    if len(row.tokens) - row.n_prompt + len(row.drafts) < params.n_min:
        bias = {**bias, **dict.fromkeys(params.end_ids, -math.inf)}
    for token_id in {*bias, *counts, *window}:
        yield token_id, bias.get(token_id, 0.0), counts[token_id], token_id in window
