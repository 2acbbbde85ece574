"""Guessing token by token with a network, for all slots at once: what every network drafter does.

A device works ahead of the program that feeds it; every value read back would make it wait. So a guess goes into the
network's next pass as it lies on the device, and all guesses are read together, after the last or later still.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.engine.batch import Download, upload
from slipstream.engine.sample.pick import Row, pick, row_params
from slipstream.engine.speculate.drafter import Guess, Want
from slipstream.kernels.choose.op import RowParams

# Logits [n_active, vocab] float32 of the next guesses; and how likely each guess is to be accepted, [n_active], where
# the network has an estimate of its own.
Rows = tuple[Tensor, Tensor | None]


@dataclass(frozen=True, slots=True)
class Going:
    """The slots that are to guess once more."""

    wants: Sequence[int]  # which wants
    rows: Sequence[int]  # where each of them was among the slots of the guess before
    n_made: int  # guesses that each of them has
    token_ids: Tensor  # [n_going] int64: the last of these
    _index: Tensor | None  # [n_going] int64: `rows`; None: all that there were, in order

    def of(self, values: Tensor) -> Tensor:
        """values: [n_before, …], one for each slot of the guess before -> [n_going, …]."""
        return values if self._index is None else values.index_select(0, self._index)


Step = Callable[[Going], Rows]
# All further guesses at once: (slots, params of their next guess, guesses of each at most) -> picks and how sure of
# them, [n_guesses, n_going] each; None: step by step.
Loop = Callable[[Going, RowParams, Sequence[int]], tuple[Tensor, Tensor] | None]


class Unrolled:
    """The guesses of a call: `launch` makes them, `token_ids` is where they lie, `read` waits for them.

    A slot stops, without stopping others, at its `n_max`, or where the probability of its guess is below `p_min`: that
    guess is not made. As a rule the latter is found out at the end, and what was computed behind it is thrown away.
    Values are looked at on the way only where that costs nothing and may save a pass, on the CPU, and where a slot's
    penalties or grammar depend on the guesses before.
    """

    def __init__(
        self,
        wants: Sequence[Want],
        n_lost: Tensor | None = None,
        when_read: Callable[[Sequence[Sequence[int]]], None] = lambda picked: None,
    ) -> None:
        """n_lost: [n_able] int64, for guesses behind an unread pass (`engine.speculate.tails`).

        when_read: is called with the picks of every want, those behind its last guess too, once they are read.
        """
        # Per want: its picks as far as they have been read, those behind its last guess too; -1 where a row had NaN.
        self.picked: list[list[int]] = [[] for _ in wants]
        self._sure: list[list[float]] = [[] for _ in wants]
        # Wants, their picks, how sure they are: [n_active] each.
        self._unread: list[tuple[Sequence[int], Tensor, Tensor]] = []
        self._arriving: tuple[NDArray[np.int64], Download, Download] | None = None  # whose, picks, how sure
        self._wants = wants
        self._n_lost = n_lost
        self._when_read = when_read

    def launch(self, able: Sequence[int], first: Rows, step: Step, loop: Loop | None = None) -> Unrolled:
        """Guess until every slot has what it wants. A pick uses the target's noise and processing.

        able: the wants that can draft; first: their rows. loop: asked before each step, if there is one and rows depend
        on nothing that the host has to work out.
        """
        active, (logits, confidence), n_made = list(able), first, 0
        looks = self._looks(able, logits.device)
        plain = not looks and not any(self._wants[i].slot.sampling.edits for i in able)
        params = row_params([self._row(i) for i in able], logits.device)
        if self._n_lost is not None:
            params = replace(params, position=params.position - self._n_lost)
        while active:
            rows = [self._row(i) for i in active]
            choice = pick(logits, rows, params=params, want_probability=confidence is None)
            sure = choice.probability if confidence is None else confidence  # [n_active]
            assert sure is not None
            self._unread.append((active, choice.token_ids, sure))
            n_made += 1
            if looks:
                self._read()
            going = self._going(active, n_made, choice.token_ids)
            active = list(going.wants)
            if active:
                params = _next(params, going)
                limits = [self._wants[i].n_max - n_made for i in active]
                made = loop(going, params, limits) if plain and loop is not None else None
                if made is not None:
                    picked, sure = made
                    self._unread.append((active * len(picked), picked.flatten(), sure.flatten()))
                    break
                logits, confidence = step(going)
        return self

    @property
    def token_ids(self) -> Tensor:
        """[n_guesses of all wants] int64, want after want. Asked for once; the host's copy is then on its way."""
        owners, token_ids, sure = self._launched()
        order = np.concatenate(
            [np.flatnonzero(owners == i)[: want.n_max] for i, want in enumerate(self._wants)]
        )
        (index,) = upload((order,), token_ids.device)
        token_ids = token_ids[index]
        self._arriving = owners[order], Download(token_ids), Download(sure[index])
        return token_ids

    def read(self) -> list[Guess]:
        """Wait for the guesses, one per want."""
        if self._arriving is not None:
            owners, token_ids, sure = self._arriving
            self._take_in(owners, token_ids.read(), sure.read())
        self._read()
        self._when_read(self.picked)
        return [self._guess(i) for i in range(len(self._wants))]

    def _row(self, i: int) -> Row:
        want = self._wants[i]
        return want.slot.row([*want.after, *self.picked[i]])

    def _looks(self, able: Sequence[int], device: torch.device) -> bool:
        slots = [self._wants[i].slot for i in able]
        free = device.type == "cpu" and any(slot.speculate.p_min > 0 for slot in slots)
        return free or any(slot.reads_drafts for slot in slots)

    def _going(self, active: Sequence[int], n_made: int, token_ids: Tensor) -> Going:
        """The slots that go on after a pick. token_ids: [n_active] int64."""
        rows = [
            row
            for row, i in enumerate(active)
            if n_made < self._wants[i].n_max and self._n_sure(i) == len(self.picked[i])
        ]
        index = None
        if rows and len(rows) < len(active):
            (index,) = upload((np.asarray(rows, np.int64),), token_ids.device)
            token_ids = token_ids.index_select(0, index)
        # A row of NaN has no token; what it leads to will not be used, but must be a token.
        return Going([active[row] for row in rows], rows, n_made, token_ids.clamp_min(0), index)

    def _read(self) -> None:
        """Wait for the device, and take in what it has picked since."""
        if self._unread:
            self._take_in(*self._launched())

    def _launched(self) -> tuple[NDArray[np.int64], Tensor, Tensor]:
        """What is unread: whose, picks [n] int64 and how sure of them [n] float32, in the order of picking."""
        owners = np.array([i for active, _, _ in self._unread for i in active])
        token_ids = torch.cat([one for _, one, _ in self._unread])
        sure = torch.cat([one for _, _, one in self._unread])
        self._unread.clear()
        return owners, token_ids, sure

    def _take_in(self, owners: NDArray[np.int64], token_ids: Tensor, sure: Tensor) -> None:
        read = zip(owners.tolist(), token_ids.tolist(), sure.tolist(), strict=True)
        for i, token_id, probability in read:
            if len(self.picked[i]) < self._wants[i].n_max:  # a loop goes on for the longest
                self.picked[i].append(token_id)
                self._sure[i].append(probability)

    def _n_sure(self, i: int) -> int:
        """How many of a want's picks, as far as read, are guesses."""
        p_min = self._wants[i].slot.speculate.p_min
        for n, (token_id, probability) in enumerate(zip(self.picked[i], self._sure[i], strict=True)):
            if token_id < 0 or probability < p_min:
                return n
        return len(self.picked[i])

    def _guess(self, i: int) -> Guess:
        n = self._n_sure(i)
        return Guess(self.picked[i][:n], self._sure[i][:n])


def _next(params: RowParams, going: Going) -> RowParams:
    """The same for the next position of the slots that go on."""
    kept = RowParams(*(going.of(getattr(params, field.name)) for field in fields(params)))
    return replace(kept, position=kept.position + 1)
