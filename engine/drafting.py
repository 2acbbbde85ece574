"""What drafting costs, promises and does: plain frozen data, of the server (`AsyncEngine.speculation`) and of a step.

"Lately" is a fading count: what happened 256 passes ago counts half.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

_Undrafted = Literal[
    "rows_too_dear", "network_too_slow", "no_guess", "not_worth_asking", "plain_measured", "switched_off"
]
# What became of a pass that could carry drafts.
Outcome = Literal["drafted"] | _Undrafted
# Why nothing is drafted.
WhyNot = Literal["no_drafter", "not_asked_for"] | _Undrafted
# Asked: in most passes. Tried: now and then.
Treatment = Literal["asked", "tried", "left_out", "switched_off"]


@dataclass(frozen=True, slots=True)
class Step:
    """What one step drafted for a reply, and what was kept of it."""

    index: int  # of the reply's steps, from 0: the pass that ends the prompt
    drafter: str | None = None  # who made most of the draft; None: nothing was drafted
    token_ids: tuple[int, ...] = ()  # drafted, at most n_max of them
    pieces: tuple[str, ...] = ()  # what each would write, control tokens by their names
    n_accepted: int = 0  # of them kept
    # Why nothing was drafted; None also where nothing could be: with prompt tokens, at the limit, in a pass run again.
    why_not: WhyNot | None = None


@dataclass(frozen=True, slots=True)
class WidthCost:
    """What is known of passes of so many rows."""

    n_rows: int
    seconds: float  # what is reckoned with
    measured_s: float  # what was measured last, at today's pace
    age_s: float  # seconds of work since
    error: float  # standard deviation of the measured seconds' logarithm


@dataclass(frozen=True, slots=True)
class PlaceBelief:
    """How often tokens at a place of a drafter's guesses are believed to be right, if those before them are."""

    place: int  # from 0; holds up to the next place listed
    acceptance: float
    n_judged: int  # tokens confirmed or refuted by the text since the start


@dataclass(frozen=True, slots=True)
class DrafterState:
    """What is believed of a drafter, and how it is treated."""

    treatment: Treatment
    asked_share: float  # of the passes lately that could carry drafts
    guess_s: float  # of a position for a network, of an ask for a text drafter; 0: not measured
    fed_row_s: float  # of a row that a network is fed before it can guess
    places: Sequence[PlaceBelief]


@dataclass(frozen=True, slots=True)
class Drafting:
    """What speculation costs, promises and does."""

    why_not: WhyNot | None  # None while something is drafted
    drafted_share: float  # of the passes lately that could carry drafts
    off_s: float  # seconds of work since the last draft token, while requests asked for drafts
    widths: Sequence[WidthCost]
    gap_s: float
    drafters: Mapping[str, DrafterState]
    lengths: Sequence[float]  # [i]: slots' passes lately with i draft tokens to verify
    n_lengths: Sequence[int]  # the same since the start
    n_outcomes: Mapping[Outcome, int]  # passes since the start that could carry drafts
