"""suffix: what followed the longest suffix of the context where it stood before, put to a vote.

Source: suffix decoding (Oliaro et al., arXiv 2411.04975), which keeps suffix trees with counts; here hash chains over a
few run lengths find the newest places of the suffix, and comparing backwards finds how far each really matches.

A guess is defined as follows; `tests/unit/test_suffix.py` holds it against a plain search.

- Places: the greatest run length of `LENGTHS` at which the context's end occurred before in the slot's tokens; of
  those occurrences the newest `VOTERS`. A place's match is how many tokens before it equal the context's last tokens,
  64 at most.
- Each place votes for the token that follows it with weight match^2. The token with most weight wins, in a tie the
  token with the newest place. Places that voted otherwise drop out, the others move on one token and vote again. A
  place that comes to the end of the text goes on into `after` and then the guess itself, so a loop is guessed on.
- With match m the longest of the c places that agree, i tokens guessed before, the odds of a token are
  ((m + i) * c)^1.25 / 3 if all agree, else the weight for it over three times the weight against it.
- The guess ends before the token at which the product of all survivals falls below 1/20, and after 2 m + 4 tokens.

The odds were fitted offline by logistic regression on 150k positions of Python files, edits of them, chat tasks and
English prose, walked with the true text: unanimous places gave 0.30 ((m + i) * c)^1.35, contested
places 0.33 (for / against). On these texts neither the number of voters (8 to 64), recency in the weights nor more run
lengths changed tokens per pass by more than 1 %.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from slipstream.engine.slot import Slot
from slipstream.engine.speculate.drafter import NO_GUESS, Guess, TextDrafter, Want
from slipstream.engine.speculate.text.loops import compiled
from slipstream.engine.speculate.text.occurrences import Occurrences
from slipstream.engine.speculate.text.shared_history import SharedHistory

LENGTHS = (1, 2, 4, 8, 16, 32)
VOTERS = 16
LONGEST = 64  # matches are compared no further back
_FLOOR = 0.05

Tokens = NDArray[np.int32]
Spans = NDArray[np.int64]
Voters = tuple[Tokens, Spans, Tokens]  # places, the documents they are in, matches
# Where each of `VOTERS` places of a slot's own text may be followed to: without end, as the guess goes on behind it.
_OWN: Spans = np.full((VOTERS, 2), (0, 2**62), np.int64)


class Suffix(TextDrafter):
    """Drafts from the slot's own tokens and, with `shared`, from finished outputs that its request may see.

    Finished outputs are drafted from only where they match further back than the slot's own text does, and where that
    matches less than the greatest run length.
    """

    name = "suffix"

    def __init__(self, n_slots: int, shared: SharedHistory | None = None) -> None:
        """Compiles what it uses."""
        self._seen = [Occurrences(LENGTHS) for _ in range(n_slots)]
        self._shared = shared
        text = np.zeros(3, np.int32)
        _longest_match(text, text, text[:1], _OWN[:1])
        _guess(text, text, text[1:2], _OWN[:1], (1, 0))

    def begin(self, slot: Slot) -> None:
        self._seen[slot.id].clear()
        self._seen[slot.id].learn(slot.history)

    def end(self, slot: Slot) -> None:
        self._seen[slot.id].clear()
        if self._shared is not None:
            self._shared.add(self._shared.key(slot.request), slot.history[slot.n_prompt :])

    def guess(self, want: Want) -> Guess:
        text, context = want.slot.history, want.context(LONGEST + len(want.after))
        seen = self._seen[want.slot.id]
        seen.learn(text)
        length, places = seen.longest(text, context, VOTERS)
        spans = _OWN[: len(places)]
        if self._shared is not None and length < LENGTHS[-1]:
            key = self._shared.key(want.slot.request)
            found = self._shared.find(key, context, VOTERS)
            if len(found.places) and _longest_match(found.text, context, found.places, found.spans) > (
                _longest_match(text, context, places, spans)
            ):
                text, places, spans = found.text, found.places, found.spans
                self._shared.use(found)
        if not len(places):
            return NO_GUESS
        token_ids, survival = _guess(text, context, places, spans, (want.n_max, len(want.after)))
        return Guess(token_ids.tolist(), survival.tolist())


@compiled
def _match(text: Tokens, context: Tokens, place: int, first: int) -> int:
    """How many tokens before `place`, none of them before `first`, equal the context's last tokens."""
    n = 0
    most = min(LONGEST, min(place - first, len(context)))
    while n < most and text[place - 1 - n] == context[len(context) - 1 - n]:
        n += 1
    return n


@compiled
def _longest_match(text: Tokens, context: Tokens, places: Tokens, spans: Spans) -> int:
    longest = 0
    for k in range(len(places)):
        longest = max(longest, _match(text, context, places[k], spans[k, 0]))
    return longest


@compiled
def _poll(text: Tokens, tail: Tokens, voters: Voters, i: int, votes: Tokens) -> None:
    """Write each voter's token after `i` guessed tokens into `votes`, -1 where its document is over."""
    places, spans, _ = voters
    for k in range(len(places)):
        at = places[k] + i
        votes[k] = -1
        if at < spans[k, 1]:
            votes[k] = text[at] if at < len(text) else tail[at - len(text)]


@compiled
def _elect(votes: Tokens, matches: Tokens) -> tuple[int, int, int, int]:
    """(token, weight for it, weight against it, longest match for it); token -1: there are no votes."""
    best, most, total, longest = -1, 0, 0, 0
    for k in range(len(votes)):
        total += matches[k] * matches[k] if votes[k] >= 0 else 0
        known = votes[k] < 0
        for q in range(k):
            known = known or votes[q] == votes[k]
        if known:
            continue
        weight, match = 0, 0
        for q in range(k, len(votes)):
            if votes[q] == votes[k]:
                weight += matches[q] * matches[q]
                match = max(match, matches[q])
        if weight > most:
            best, most, longest = votes[k], weight, match
    return best, most, total - most, longest


@compiled
def _keep(voters: Voters, votes: Tokens, token: int) -> int:
    """Move the voters for the token to the front; returns how many they are."""
    places, spans, matches = voters
    n_live = 0
    for k in range(len(votes)):
        if votes[k] == token:
            places[n_live], matches[n_live] = places[k], matches[k]
            spans[n_live, 0], spans[n_live, 1] = spans[k, 0], spans[k, 1]
            n_live += 1
    return n_live


@compiled
def _guess(
    text: Tokens, context: Tokens, places: Tokens, spans: Spans, shape: tuple[int, int]
) -> tuple[Tokens, NDArray[np.float64]]:
    """(token ids [n_guessed] int32, survival [n_guessed] float64); see the module's text.

    `places` [n_places] int32; `spans` [n_places, 2] int64: where the documents that they are in begin and end.
    `shape`: the most tokens to guess, and how many of the context's last are not in the text.
    """
    n_max, n_after = shape
    tail = np.empty(n_after + n_max, np.int32)
    for i in range(n_after):
        tail[i] = context[len(context) - n_after + i]
    survival = np.empty(n_max, np.float64)
    places, spans = places.copy(), spans.copy()
    matches, votes = np.empty(len(places), np.int32), np.empty(len(places), np.int32)
    for k in range(len(places)):
        matches[k] = _match(text, context, places[k], spans[k, 0])
    n_live, n_guessed, product = len(places), 0, 1.0
    while n_guessed < n_max:
        voters = (places[:n_live], spans[:n_live], matches[:n_live])
        _poll(text, tail, voters, n_guessed, votes)
        token, weight, against, match = _elect(votes[:n_live], matches[:n_live])
        if token < 0:
            break
        n_live = _keep(voters, votes[:n_live], token)
        # ^1.25 by square roots, which are exact to the last bit everywhere
        evidence = float((match + n_guessed) * n_live)
        odds = weight / (3.0 * against) if against else evidence * math.sqrt(math.sqrt(evidence)) / 3.0
        survival[n_guessed] = odds / (1.0 + odds)
        product *= survival[n_guessed]
        if product < _FLOOR or n_guessed >= 2 * match + 4:
            break
        tail[n_after + n_guessed] = token
        n_guessed += 1
    return tail[n_after : n_after + n_guessed], survival[:n_guessed]
