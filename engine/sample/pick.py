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
        mask(logits, *upload((np.array(places), np.stack(words)), logits.device))
    if params is None:
        params = row_params(rows, logits.device)
    return choose(logits, params, want_probability=want_probability)


def row_params(rows: Sequence[Row], device: torch.device) -> RowParams:
    """How each row is picked, as far as `choose` needs it."""

    columns = (
        np.array([row.params.temperature for row in rows], np.float32),
        np.array([row.params.top_k for row in rows], np.int32),
        np.array([row.params.top_p for row in rows], np.float32),
        np.array([row.params.min_p for row in rows], np.float32),
        np.array([row.params.seed for row in rows], np.uint64).view(np.int64),
        np.array([len(row.tokens) + len(row.drafts) for row in rows], np.int64),
    )
    return RowParams(*upload(columns, device))


def _penalties(rows: Sequence[Row], device: torch.device) -> Penalties:
    names = ("repeat_penalty", "presence_penalty", "frequency_penalty")
    columns = [np.array([getattr(row.params, name) for row in rows], np.float32) for name in names]
    return Penalties(*upload(columns, device))


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
    types: Sequence[type[np.generic]] = (np.int64, np.int64, np.float32, np.int32, np.bool_)
    arrays = [np.array(column, dtype) for column, dtype in zip(columns, types, strict=True)]
    return Entries(*upload(arrays, logits.device))


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
