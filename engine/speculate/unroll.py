"""Guessing token by token with a network, for all slots at once: what every recurrent drafter does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from engine.sample.pick import pick
from engine.speculate.drafter import Guess, Want

# Logits [n_active, vocab] float32 of the next guesses; and how likely each guess is to be accepted, [n_active], where
# the network has an estimate of its own.
Rows = tuple[Tensor, Tensor | None]
# (which wants go on, their last guesses' rows in the logits before) -> rows of what follows
Step = Callable[[Sequence[int], Sequence[int]], Rows]


class Unrolled:
    """The guesses of a call while they grow; `tokens[i]` are those for want i."""

    def __init__(self, wants: Sequence[Want]) -> None:
        self.tokens: list[list[int]] = [[] for _ in wants]
        self._survival: list[list[float]] = [[] for _ in wants]
        self._wants = wants

    def run(self, able: Sequence[int], first: Rows, step: Step) -> list[Guess]:
        """Guess until every slot has what it wants or is no longer sure.

        able: the wants that can draft; first: their rows, edited in place. A pick uses the target's noise and
        processing. A slot stops, without stopping others, at its `n_max`, or where the probability of its guess is
        below `p_min`: that guess is not made.
        """
        active, (logits, confidence) = list(able), first
        while active:
            rows = [self._wants[i].slot.row(self.tokens[i]) for i in active]
            choice = pick(logits, rows, want_probability=confidence is None)
            sure = choice.probability if confidence is None else confidence
            assert sure is not None
            going_on, from_rows = [], []
            found = zip(active, choice.token_ids.tolist(), sure.tolist(), strict=True)
            for row, (i, token_id, probability) in enumerate(found):
                want = self._wants[i]
                if token_id < 0 or probability < want.slot.speculate.p_min:
                    continue
                self.tokens[i].append(token_id)
                self._survival[i].append(probability)
                if len(self.tokens[i]) < want.n_max:
                    going_on.append(i)
                    from_rows.append(row)
            active = going_on
            if active:
                logits, confidence = step(active, from_rows)
        return [Guess(*one) for one in zip(self.tokens, self._survival, strict=True)]
