"""The pick of every logits row: bias, penalties, grammar, truncation, temperature, noise, argmax, in that order.

Target and draft networks call the same function. A row is scored as if the drafts before it had been
accepted, so penalties count them and the noise is that of the position the pick would take.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.engine.batch import AnyArray, upload
from slipstream.engine.sample.params import SamplingParams
from slipstream.kernels.choose.op import Choice, Edits, Masks, RowParams, choose

TOKEN_BITS = 32  # of a (row, token) in one number


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

    logits: [n_rows, vocab] float32, left as they are. params: those of the rows, if they are at hand; their positions
    then count the drafts, so rows whose `counts_drafts` is false need not list them. An id of -1 marks a row with NaN,
    or a row whose grammar allows nothing.
    """
    columns = [] if params is not None else _columns(rows)
    entries = _entries(rows) if any(row.params.edits for row in rows) else []
    words = _masks(rows)
    arrays = [*columns, *entries, *words]
    uploaded = upload(arrays, logits.device) if arrays else []
    ends = len(columns), len(columns) + len(entries)
    return choose(
        logits,
        RowParams(*uploaded[: ends[0]]) if params is None else params,
        Edits(*uploaded[ends[0] : ends[1]]) if entries else None,
        Masks(*uploaded[ends[1] :]) if words else None,
        want_probability=want_probability,
    )


def row_params(rows: Sequence[Row], device: torch.device) -> RowParams:
    """How each row is picked, except for its edits and its mask."""
    return RowParams(*upload(_columns(rows), device))


def _columns(rows: Sequence[Row]) -> list[AnyArray]:
    """The fields of `RowParams`."""
    return [
        np.array([row.params.temperature for row in rows], np.float32),
        np.array([row.params.top_k for row in rows], np.int32),
        np.array([row.params.top_p for row in rows], np.float32),
        np.array([row.params.min_p for row in rows], np.float32),
        np.array([row.params.seed for row in rows], np.uint64).view(np.int64),
        np.array([len(row.tokens) + len(row.drafts) for row in rows], np.int64),
    ]


def _masks(rows: Sequence[Row]) -> list[AnyArray]:
    """The fields of `Masks`; nothing if no row has one."""
    masks = [_allowed(row) for row in rows]
    words = [one for one in masks if one is not None]
    if not words:
        return []
    places = iter(range(len(words)))
    index = [-1 if one is None else next(places) for one in masks]
    n_words = max(map(len, words))  # a grammar's mask may be longer than the vocabulary
    words = [one if len(one) == n_words else np.pad(one, (0, n_words - len(one))) for one in words]
    return [np.array(index, np.int32), np.concatenate(words).reshape(len(words), -1)]


def _allowed(row: Row) -> NDArray[np.int32] | None:
    """[n_words]: bits of the tokens that both its grammar and its parameters allow; None: all."""
    given = row.params.allowed
    if given is None or row.allowed is None:
        return row.allowed if given is None else given
    n_words = min(len(row.allowed), len(given))
    return row.allowed[:n_words] & given[:n_words]


def _entries(rows: Sequence[Row]) -> list[AnyArray]:
    """The fields of `Edits`; nothing if there are no entries."""
    biases = [_bias(row) for row in rows]
    if any(row.params.counts_output or row.params.repeats for row in rows):
        return _penalised(rows, biases)
    bias = np.array([amount for one in biases for amount in one.values()], np.float32)
    if not len(bias):
        return []
    starts = np.array([*accumulate(map(len, biases), initial=0)], np.int32)
    token_ids = np.array([token_id for one in biases for token_id in one], np.int32)
    return [starts, token_ids, bias, np.ones_like(bias), np.zeros_like(bias)]


def _penalised(rows: Sequence[Row], biases: Sequence[Mapping[int, float]]) -> list[AnyArray]:
    """The same if a token may have a bias, be recent and be in the output: one entry for all three."""
    counts = [_output(row) for row in rows]
    biased, recent = _places(biases), _places([_recent(row) for row in rows])
    output = _places([token_ids for token_ids, _ in counts])
    found, entries = np.unique(np.concatenate([biased, recent, output]), return_inverse=True)
    n, ends = len(found), (len(biased), len(biased) + len(recent))
    owners = found >> TOKEN_BITS

    bias, repeat = np.zeros(n, np.float32), np.ones(n, np.float32)
    bias[entries[: ends[0]]] = [amount for one in biases for amount in one.values()]
    is_recent = entries[ends[0] : ends[1]]
    repeat[is_recent] = _per_row(rows, "repeat_penalty")[owners[is_recent]]
    times = np.fromiter(chain.from_iterable(times for _, times in counts), np.float64, len(output))
    count = np.bincount(entries[ends[1] :], times, n).astype(np.float32)
    presence, frequency = (_per_row(rows, f"{name}_penalty")[owners] for name in ("presence", "frequency"))
    return [
        np.searchsorted(owners, np.arange(len(rows) + 1)).astype(np.int32),
        (found & (1 << TOKEN_BITS) - 1).astype(np.int32),
        bias,
        repeat,
        presence * (count > 0) + frequency * count,
    ]


def _places(parts: Sequence[Collection[int]]) -> NDArray[np.int64]:
    """(row, token) of every token of every row as one number. parts: the tokens of each row."""
    lengths = [len(part) for part in parts]
    token_ids = np.fromiter(chain.from_iterable(parts), np.int64, sum(lengths))
    return np.repeat(np.arange(len(parts)) << TOKEN_BITS, lengths) | token_ids


def _per_row(rows: Sequence[Row], name: str) -> NDArray[np.float32]:
    return np.array([getattr(row.params, name) for row in rows], np.float32)


def _bias(row: Row) -> Mapping[int, float]:
    """What is added to logits; end tokens are banned while the output is short, and what would complete a bad word."""
    banned = _completing(row)
    if len(row.tokens) - row.n_prompt + len(row.drafts) < row.params.n_min:
        banned = [*banned, *row.params.end_ids]
    return {**row.params.bias, **dict.fromkeys(banned, -math.inf)} if banned else row.params.bias


def _completing(row: Row) -> list[int]:
    """The last tokens of bad words whose others are the end of the output."""
    words = row.params.bad_words
    if not words:
        return []
    n_tail = max(map(len, words)) - 1
    tail = (*row.tokens[max(row.n_prompt, len(row.tokens) - n_tail) :], *row.drafts)
    return [one[-1] for one in words if tail[1 - len(one) :] == one[:-1]]


def bans_all_allowed(row: Row) -> str | None:
    """The field that bans all that the row's grammar or its parameters allow, if there is nothing left to pick."""
    mask = _allowed(row)
    if mask is None:
        return None
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    if not allowed:
        return None if row.params.allowed is None else "allowed_token_ids"
    words = {**row.params.bias, **dict.fromkeys(_completing(row), -math.inf)}
    for param, bias in (("logit_bias", row.params.bias), ("bad_words", words), ("min_tokens", _bias(row))):
        if all(bias.get(token_id) == -math.inf for token_id in allowed):
            return param
    return None


def _recent(row: Row) -> Sequence[int]:
    """The tokens in the repeat penalty's window; a token may come more than once."""
    n_last, n_drafts = row.params.repeat_last_n, len(row.drafts)
    if not row.params.repeats:
        return ()
    n_old = max(0, n_last - n_drafts)
    return [*row.tokens[max(0, len(row.tokens) - n_old) :], *row.drafts[max(0, n_drafts - n_last) :]]


def _output(row: Row) -> tuple[Sequence[int], Sequence[int]]:
    """Tokens of the output, and how often each is there; a token may come more than once."""
    if not row.params.counts_output:
        return (), ()
    return [*row.counts, *row.drafts], [*row.counts.values(), *[1] * len(row.drafts)]
