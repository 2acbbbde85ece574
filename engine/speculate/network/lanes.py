"""A draft network's loop of guesses on the device alone: pick, feed, move on by one position, captured and replayed.

A lane is one slot's next row. What moves it is on the device: its token is the last pick, its place follows from its
page table, its noise from its position. So a draft network's guesses after the first cost the host one launch each.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from slipstream.engine.batch import Batch, upload
from slipstream.engine.cache.store import Store
from slipstream.engine.frames import Frame
from slipstream.engine.models.captured import Capture, Pass, Replay
from slipstream.kernels.choose.op import RowParams, choose
from slipstream.kernels.choose.row_params import COLUMNS

MOST = 64  # guesses of a lane


class Lanes:
    """The loop of one network, over the frames in which a span may have one row only.

    For stores of pages alone: what else a pass moves has to be planned by the host.
    """

    def __init__(self, run: Pass, store: Store, capture: Capture, states: Sequence[Tensor] = ()) -> None:
        """run: (batch, states) -> logits [n_rows, vocab] float32, then the next states [n_rows, …].

        states: what a row hands to the next row of its lane, beside its pick; [1, …] each, as an example.
        """
        # Per number of spans the frame with the fewest rows.
        frames = {one.n_spans: one for one in reversed(store.frames.frames)}.values()
        self._run, self._store, self._n_lanes = run, store, max(one.n_spans for one in frames)
        most = max(one.n_rows for one in frames)

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=store.device)

        self._states = [zeros(most, *one.shape[1:], dtype=one.dtype) for one in states]
        self._picked, self._sure = zeros(MOST, most), zeros(MOST, most, dtype=torch.float32)
        self._n_made = zeros(1)
        self._limits = zeros(most)  # guesses that a lane makes; 0: no lane
        self._params = RowParams(**{name: zeros(most, dtype=dtype) for name, dtype in COLUMNS.items()})
        by_size = sorted(frames, key=lambda one: one.n_rows, reverse=True)
        self._replays: dict[object, Replay] = {one: capture(partial(self._guess, one)) for one in by_size}

    def takes(self, n_lanes: int) -> bool:
        return n_lanes <= self._n_lanes

    def __call__(
        self, batch: Batch, params: RowParams, limits: Sequence[int], states: Sequence[Tensor] = ()
    ) -> tuple[Tensor, Tensor]:
        """Guess so many times per lane; returns picks [n_guesses, n_lanes] int64 and their probabilities, float32.

        batch: a row per lane, in a frame, with the token before its first guess. params: of these first guesses. What a
        lane picks behind its limit means nothing. Holds until the next call.
        """
        n, n_guesses = len(limits), max(limits)
        self._n_made.zero_()
        self._limits.zero_()
        (uploaded,) = upload((np.asarray(limits, np.int64),), self._limits.device)
        self._limits[:n].copy_(uploaded)
        for name in COLUMNS:
            getattr(self._params, name)[:n].copy_(getattr(params, name))
        for kept, one in zip(self._states, states, strict=True):
            kept[:n].copy_(one)
        for _ in range(n_guesses):
            self._replays[batch.frame]()
        return self._picked[:n_guesses, :n], self._sure[:n_guesses, :n]

    def _guess(self, frame: Frame) -> None:
        """What is captured: a guess of every lane, and its next row."""
        n = frame.n_rows
        logits, *states = self._run(frame.batch, [one[:n] for one in self._states])
        params = RowParams(**{name: getattr(self._params, name)[:n] for name in COLUMNS})
        choice = choose(logits, params, want_probability=True)
        assert choice.probability is not None
        self._picked[:, :n].index_copy_(0, self._n_made, choice.token_ids[None])
        self._sure[:, :n].index_copy_(0, self._n_made, choice.probability[None])
        for kept, one in zip(self._states, states, strict=True):
            kept[:n].copy_(one)
        self._n_made += 1
        self._move_on(frame.batch, params, choice.token_ids)

    def _move_on(self, batch: Batch, params: RowParams, picked: Tensor) -> None:
        """A lane that guesses again feeds its pick one position on. Others stay, and write to the spare page.

        picked: [n_rows] int64; -1 of a row with NaN, whose lane goes on with some token.
        """
        n_rows, n_spans = len(picked), len(batch.n_past)
        goes_on = self._n_made < self._limits[:n_rows]  # [n_rows] bool
        batch.token_ids.copy_(picked.clamp_min(0))
        batch.positions.add_(goes_on)
        batch.n_past.add_(goes_on[:n_spans])
        params.position.add_(goes_on)
        size = self._store.sizes.page_size
        # A lane is a span. [n_rows]
        spans = torch.arange(n_rows, device=picked.device).clamp_max(n_spans - 1)
        place = batch.n_past[spans].long()  # [n_rows]: of the row in the lane's page table
        page = batch.page_table[spans, place // size].long()  # [n_rows]
        batch.row_pages.copy_(torch.where(goes_on, page, self._store.sizes.n_pages))
        batch.row_offsets.copy_(place % size)
