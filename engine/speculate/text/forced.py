"""forced: what a request's grammar leaves no choice about. Such a guess is always right.

A slot's grammar allows only the canonical tokens of forced text, with speculation on or off, so this drafter says what
the target is bound to pick. Source of the idea: fast-forward tokens of llguidance, jump-forward decoding of SGLang.
"""

from __future__ import annotations

from slipstream.engine.speculate.drafter import NO_GUESS, Guess, TextDrafter, Want


class Forced(TextDrafter):
    """Drafts the forced text of slots with a grammar. It keeps no state: all it needs is the slot's constraint."""

    name = "forced"

    def guess(self, want: Want) -> Guess:
        constraint = want.slot.constraint
        if constraint is None:
            return NO_GUESS
        token_ids = constraint.forced(want.after, want.n_max)
        return Guess(token_ids, [1.0] * len(token_ids))
