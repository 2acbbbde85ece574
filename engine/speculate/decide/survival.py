"""How likely a drafted token is to be accepted, given that those before it were: learnt while serving.

Per drafter a table over (grade, place): the grade is the class of the drafter's own estimate, the place how far into
the draft the token stands. Only tokens up to the first rejection were judged; those after it followed a wrong
prefix and say nothing, so *conditional* rates are counted, with old rounds fading. A slot differs from the server's
average by an offset of log-odds, learnt from what was accepted against what the table expected and shrunk: the more,
the less requests were found to differ. Before a draft is made, when no estimate tells one request from another, it is
shrunk to the offset of the last requests (like follows like, and the table takes many requests to move), else to zero.

The evidence comes from guesses that are watched until the text itself has judged them, whether they were verified or
not: however a token came about, it shows whether a guess made for its place was right. So a drafter that loses to
another, or is not verified because nothing pays, is still learnt about, at the cost of a comparison.

Source: calibrated acceptance with a slot's residual, as in goodput planning (SmartSpec, arXiv 2406.14066) and online
logistic calibration of draft confidences; how far slots differ by the moments of a beta-binomial distribution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.engine.drafting import PlaceBelief
from slipstream.engine.slot import Slot

Floats = NDArray[np.float64]
Grades = NDArray[np.int64]

MOST_PLACES = 64  # of a draft; `--draft-max` allows no more

# A drafter's own estimates fall into grades 1 … 6; grade 0 counts every token, whatever its estimate.
_EDGES = np.array([0.35, 0.6, 0.75, 0.87, 0.95])
# Rates assumed of the grades before anything was judged.
_NOMINAL = np.array([0.75, 0.2, 0.48, 0.68, 0.81, 0.91, 0.975])
_NOMINAL_WEIGHT = 6.0  # judged tokens that assumption counts for
_ROW_WEIGHT = 6.0  # judged tokens a grade's average over all places counts for at one place
# The bucket of each place.
_PLACES = np.searchsorted([1, 2, 3, 4, 6, 9, 14, 22], np.arange(MOST_PLACES), side="right")
_PLACE: list[int] = _PLACES.tolist()
_N_PLACES = _PLACE[-1] + 1
_FIRST_PLACES: list[int] = np.unique(_PLACES, return_index=True)[1].tolist()

_FADE = 0.998  # what a round's evidence is worth to the table one round later
_REFRESH = 8  # rounds after which the table's rates are worked out again
_SLOT_FADE = 0.98  # what a token's evidence is worth to its slot one token later, judged or not
# Judged tokens of the usual deviation that a slot begins with: at first, and at least and most by what was learnt.
_SLOT_WEIGHT, _LEAST_WEIGHT, _MOST_WEIGHT = 2.0, 0.5, 10.0
_STRETCH = 8  # judged tokens of a slot that are compared with what was expected of them
_STRETCH_FADE = 0.99  # what a stretch is worth one stretch later
_STRETCHES_AT_FIRST = 12.0  # for which that weight stands, where tokens have a rate of 0.75
_USUAL_WEIGHT = 0.3  # of a request in the usual deviation,
_USUAL_JUDGED = 4.0  # half of that where so many of its tokens were judged
_LEAST, _MOST = 0.01, 0.997
_PLAIN, _GRADED = 0, 1  # two views of a token: without and with its drafter's own estimate


def grades(survival: Sequence[float], n: int) -> Grades:  # [n]
    """The class of each token's own estimate; 0 without estimates. Raises `ValueError` if only some tokens have it."""
    if not len(survival):
        return np.zeros(n, np.int64)
    if len(survival) < n:
        raise ValueError(f"{len(survival)} estimates for {n} tokens")
    return _EDGES.searchsorted(np.asarray(survival[:n])) + 1


def _logit(p: float) -> float:
    p = min(max(p, _LEAST), _MOST)
    return math.log(p / (1.0 - p))


def _moved(p: float, by: float) -> float:
    """A probability moved by log-odds."""
    return 1.0 / (1.0 + math.exp(-_logit(p) - by))


class _Table:
    """Judged and accepted tokens of a drafter, fading, and the rates that follow: [grades, places]."""

    def __init__(self) -> None:
        self._judged = [0.0] * (len(_NOMINAL) * _N_PLACES)
        self._accepted = list(self._judged)
        self._n_rounds = 0
        self.n_judged = [0] * _N_PLACES  # since the start
        self._refresh()

    def _refresh(self) -> None:
        """Rate per cell, shrunk to its grade's average, and that to the assumed rate."""
        judged, accepted = (
            np.array(one).reshape(-1, _N_PLACES) * _FADE**self._n_rounds
            for one in (self._judged, self._accepted)
        )
        rows = (accepted.sum(1) + _NOMINAL_WEIGHT * _NOMINAL) / (judged.sum(1) + _NOMINAL_WEIGHT)
        rates = (accepted + _ROW_WEIGHT * rows[:, None]) / (judged + _ROW_WEIGHT)
        rates = np.clip(rates, _LEAST, _MOST)
        self._judged, self._accepted = judged.ravel().tolist(), accepted.ravel().tolist()
        self._n_rounds = 0
        self.rates: list[list[float]] = rates.tolist()
        self.odds: Floats = np.log(rates / (1.0 - rates))

    def add(self, grade: Sequence[int], start: int, n_accepted: int) -> None:
        judged, accepted = self._judged, self._accepted
        for i, one in enumerate(grade):
            place = _PLACE[start + i]  # also the cell of grade 0, which counts every token
            judged[place] += 1.0
            self.n_judged[place] += 1
            accepted[place] += i < n_accepted
            if one:
                cell = one * _N_PLACES + place
                judged[cell] += 1.0
                accepted[cell] += i < n_accepted
        self._n_rounds += 1
        if self._n_rounds >= _REFRESH:
            self._refresh()


class _Requests:
    """How requests deviate from the table, in one view.

    `weight`: the judged tokens that `usual` stands for. Of n judged tokens the accepted ones vary by the sum v of
    p (1 - p), and by (n - 1) v / (weight + 1) more if every slot has rates of its own, beta-distributed around p.
    """

    def __init__(self) -> None:
        self._within = _STRETCHES_AT_FIRST * (_STRETCH - 1) * _STRETCH * 0.75 * 0.25
        self._between = self._within / (_SLOT_WEIGHT + 1.0)
        self.weight = _SLOT_WEIGHT
        self.usual = (0.0, 0.0)  # log-odds of the first token, of later tokens, of the last requests

    def compare(self, n_judged: int, n_accepted: int, expected: float, variance: float) -> None:
        """A stretch of a slot's text. variance: v."""
        self._between = _STRETCH_FADE * self._between + (n_accepted - expected) ** 2 - variance
        self._within = _STRETCH_FADE * self._within + (n_judged - 1) * variance
        weight = self._within / max(self._between, 1e-9) - 1.0
        self.weight = min(max(weight, _LEAST_WEIGHT), _MOST_WEIGHT)

    def ended(self, n_judged: float, first: float, later: float) -> None:
        """A request is over that deviated so far."""
        share = _USUAL_WEIGHT * n_judged / (n_judged + _USUAL_JUDGED)
        self.usual = (
            self.usual[0] + share * (first - self.usual[0]),
            self.usual[1] + share * (later - self.usual[1]),
        )


class _Deviation:
    """A slot against the table, in one view."""

    def __init__(self, requests: _Requests) -> None:
        self._requests = requests
        self._rates: list[float] = []  # of a stretch under way, as expected
        self._n_accepted = 0  # in it
        self._sums = [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]  # first, all: judged, accepted, expected; fading
        self._at = 0  # tokens of the slot when a token was last judged

    def add(self, expected: Sequence[float], start: int, n_accepted: int, at: int) -> None:
        """expected: per judged token the table's rate; at: tokens of the slot."""
        fade = _SLOT_FADE ** (at - self._at)
        self._at = at
        for sums in self._sums:
            sums[0], sums[1], sums[2] = fade * sums[0], fade * sums[1], fade * sums[2]
        for i, rate in enumerate(expected):
            # A first token counts for later tokens too, which are judged only after it is accepted.
            for sums in self._sums[min(start + i, 1) :]:
                sums[0] += 1.0
                sums[1] += i < n_accepted
                sums[2] += rate
        self._rates += expected
        self._n_accepted += n_accepted
        if len(self._rates) >= _STRETCH:
            variance = sum(rate * (1.0 - rate) for rate in self._rates)
            self._requests.compare(len(self._rates), self._n_accepted, sum(self._rates), variance)
            self._rates, self._n_accepted = [], 0

    def offsets(self, at: int) -> tuple[float, float]:
        """Log-odds of the first token, of later tokens. They fade as the text goes on without being judged."""
        fade = _SLOT_FADE ** (at - self._at)
        first, every = self._sums
        usual = self._requests.usual
        return self._offset(fade, usual[0], *first), self._offset(fade, usual[1], *every)

    def _offset(self, fade: float, usual: float, judged: float, accepted: float, expected: float) -> float:
        if fade * judged < 1e-9:
            return usual
        mean = expected / judged
        weight = self._requests.weight / fade
        return _logit((accepted + weight * _moved(mean, usual)) / (judged + weight)) - _logit(mean)

    def end(self) -> None:
        """The slot's request is over."""
        self._requests.ended(self._sums[1][0], *self.offsets(self._at))


def _survivals(odds: Floats, offsets: Sequence[tuple[float, float]]) -> Floats:  # [n_offsets, n_tokens]
    """odds: [n_tokens], of a token if those before it are accepted; offsets: what is added to the first, to others."""
    first, later = np.array(offsets).T
    own = odds + later[:, None]
    own[:, 0] += first - later
    return np.multiply.accumulate(1.0 / (1.0 + np.exp(-own)), axis=1)


class Survival:
    """Acceptance estimates for every (slot, drafter)."""

    def __init__(self) -> None:
        self._tables: dict[str, _Table] = {}
        self._requests: dict[str, tuple[_Requests, _Requests]] = {}  # by drafter, in both views
        self._deviations: dict[tuple[int, str], tuple[_Deviation, _Deviation]] = {}

    def begin(self, slot_id: int) -> None:
        """Forget what the slot's last request taught; the server's average stays, and what is usual of requests."""
        for key in [key for key in self._deviations if key[0] == slot_id]:
            # A drafter's own estimates tell one request from another; without them, like follows like.
            self._deviations.pop(key)[_PLAIN].end()

    def of(self, name: str, slot: Slot, grade: Grades) -> Floats:  # [n_tokens], never increasing
        """Probability that each token of a draft is accepted together with all before it. grade: [n_tokens]."""
        odds = self._table(name).odds[grade, _PLACES[: len(grade)]]
        survivals = _survivals(odds, [self._offsets(name, slot, _GRADED if grade[0] else _PLAIN)])
        return survivals[0]  # type: ignore[no-any-return]

    def places(self, name: str) -> list[PlaceBelief]:
        """What is believed of a drafter's guesses by place, of all slots together."""
        table = self._table(name)
        return [PlaceBelief(*one) for one in zip(_FIRST_PLACES, table.rates[0], table.n_judged, strict=True)]

    def expected(self, name: str, slots: Sequence[Slot], n: int) -> Floats:  # [n_slots, n], never increasing
        """The same for each slot before its draft is made, when only the author is known."""
        odds = self._table(name).odds[0, _PLACES[:n]]
        return _survivals(odds, [self._offsets(name, slot, _PLAIN) for slot in slots])

    def _offsets(self, name: str, slot: Slot, view: int) -> tuple[float, float]:
        """What a slot adds to the table's log-odds: of the first token, of later tokens."""
        requests = self._requests.get(name)
        if requests is None:
            return 0.0, 0.0
        own = self._deviations.get((slot.id, name))
        return own[view].offsets(len(slot.tokens)) if own else requests[view].usual

    def judge(self, name: str, slot: Slot, grade: Sequence[int], start: int, n_accepted: int) -> None:
        """Learn from a draft's tokens from place `start` on.

        grade: of the tokens that were judged: those accepted and, if there was one, the rejected token.
        """
        if not grade:
            return
        table, at = self._table(name), len(slot.tokens)
        own = self._deviations.get((slot.id, name))
        if own is None:
            plain, graded = self._requests.setdefault(name, (_Requests(), _Requests()))
            own = self._deviations[slot.id, name] = _Deviation(plain), _Deviation(graded)
        places = _PLACE[start : start + len(grade)]
        own[_PLAIN].add([table.rates[0][place] for place in places], start, n_accepted, at)
        if grade[0]:
            expected = [table.rates[one][place] for one, place in zip(grade, places, strict=True)]
            own[_GRADED].add(expected, start, n_accepted, at)
        table.add(grade, start, n_accepted)

    def _table(self, name: str) -> _Table:
        if name not in self._tables:
            self._tables[name] = _Table()
        return self._tables[name]


@dataclass(slots=True)
class _Watched:
    token_ids: Sequence[int]
    grade: Grades  # [n_tokens]
    start: int  # tokens of the slot when the guess was made
    n_judged: int = 0


class Shadows:
    """Guesses being watched, at most one per slot and drafter; the next is watched once the text has judged it."""

    def __init__(self, survival: Survival) -> None:
        self._survival = survival
        self._watched: dict[Slot, dict[str, _Watched]] = {}  # of the requests that have begun

    def begin(self, slot: Slot) -> None:
        """A request begins, or starts over."""
        self._watched[slot] = {}

    def watch(self, slot: Slot, name: str, token_ids: Sequence[int], grade: Grades) -> None:
        """Remember a guess of what follows the slot's tokens, unless an earlier guess is still open.

        Where a guess is read when its request is over, no text is to judge it.
        """
        own = self._watched.get(slot)
        if own is not None and name not in own:
            own[name] = _Watched(token_ids, grade, len(slot.tokens))

    def judge(self, slot: Slot) -> None:
        """Compare what is watched with the tokens that a pass has added."""
        own = self._watched.get(slot, {})
        for name, one in list(own.items()):
            rest = one.token_ids[one.n_judged :]
            start = one.start + one.n_judged
            came = slot.tokens[start : start + len(rest)]
            if not came:
                continue
            n_right = _common(rest, came)
            n_judged = min(n_right + 1, len(came))
            grade = one.grade[one.n_judged : one.n_judged + n_judged].tolist()
            self._survival.judge(name, slot, grade, one.n_judged, n_right)
            one.n_judged += n_judged
            if n_right < n_judged or n_judged == len(rest):
                del own[name]

    def drop(self, slot: Slot) -> None:
        """The request is over: forget its guesses."""
        self._watched.pop(slot, None)


def _common(guessed: Sequence[int], came: Sequence[int]) -> int:
    """Length of the common beginning."""
    for i, (a, b) in enumerate(zip(guessed, came, strict=False)):
        if a != b:
            return i
    return min(len(guessed), len(came))
