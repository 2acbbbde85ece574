"""prediction: the reply the caller expects, drafted from wherever the output stands in it.

Source of the idea: OpenAI's Predicted Outputs; the alignment is the textbook's with affine gaps (Gotoh 1982) in a
band, fed one output token at a time.

The output follows the prediction until a token differs. From there a band of places ahead in the prediction is scored:
a place's score is that of the best way to turn the predicted tokens before it into the output since, by matches,
substitutions, insertions and deletions. Besides, the last four output tokens are looked up in the whole prediction, so
that text that was moved, or comes after a long piece that was dropped, is found as well. The best place is drafted
from at every step, and followed again once eight tokens in a row have matched there.

Replacements are remembered: where the same predicted tokens come again, after the same token or once the replacement
has proved right, it is drafted, so that a renamed identifier costs a rejection once and not at every use.

All of it is a fold over the output tokens, whatever steps they came in: the state after them never depends on how they
were drafted, and `begin` reaches the same state from `slot.tokens`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from slipstream.engine.slot import Slot
from slipstream.engine.speculate.drafter import NO_GUESS, Guess, TextDrafter, Want
from slipstream.engine.speculate.text.loops import compiled

Tokens = NDArray[np.int32]
Ints = NDArray[np.int64]
Keys = NDArray[np.uint64]
Place = int | np.int64  # np.int64 where compiled code needs the type
Track = tuple[Ints, Ints, Tokens]  # a `_Slot`'s state, band, swaps

# Scores of the alignment, tried on renamed files, moved blocks and random edits of 1, 5 and 15 % of the tokens. They
# are not delicate: changing a score by half moved the accepted share of the text by 0.01 at most.
_MATCH, _SUBSTITUTE = 8, -8
_DROP, _DROP_MORE = -8, -2  # first and each predicted token skipped
_INSERT, _INSERT_MORE = -9, -8  # first and each output token that nothing predicted
_JUMP = -48  # to a place found by the index
_NEVER = -(10**6)
_BAND = 64  # places ahead
_RUN = 4  # tokens of an indexed run
_NEAR = 8  # places of a run looked at on each side
_FURTHEST = 32  # tokens a place found by the index is compared backwards
_ANCHORED = 8  # matches in a row after which the prediction is followed again and other places are forgotten
_LOST = -20  # below this score, without two matches in a row, nothing is drafted
_SWAPS, _SWAP = 16, 8  # replacements remembered; most tokens on either side

# Indices into a track's state.
_POINTER, _MATCHES, _SEEN, _DIVERGED, _FROM, _AT, _SWAPPING, _SWAPPED, _SCORE, _N_SWAPS = range(10)
# Columns of a replacement: predicted length, output length, token before, uses less failures, then the tokens.
_OLD, _NEW, _BEFORE, _TRUST, _OLD_TOKENS, _NEW_TOKENS = 0, 1, 2, 3, 4, 4 + _SWAP

# P(accepted) by matches in a row before the token, between what was counted at edits of 1 and of 5 % of the tokens.
_SURVIVAL = np.array([0.4, 0.75, 0.9, 0.94, 0.95, 0.955, 0.96, 0.965, 0.985], np.float64)
_SURE = len(_SURVIVAL) - 1


@dataclass(slots=True)
class _Slot:
    """One slot's prediction, and where its output stands in it."""

    prediction: Tokens  # [n_predicted] int32
    keys: Keys  # [n_runs] uint64, ascending: a run's hash in the upper half, its end in the lower
    state: Ints = field(default_factory=lambda: np.zeros(10, np.int64))  # [10]
    band: Ints = field(default_factory=lambda: np.full((2, _BAND + 1), _NEVER, np.int64))  # [2, _BAND + 1]
    swaps: Tokens = field(default_factory=lambda: np.zeros((_SWAPS, 4 + 2 * _SWAP), np.int32))

    def __post_init__(self) -> None:
        self.state[_MATCHES] = _SURE  # at its start a prediction is trusted
        self.state[_SWAPPING] = -1

    @property
    def track(self) -> Track:
        return self.state, self.band, self.swaps


class Prediction(TextDrafter):
    """Drafts `slot.prediction` from where the output stands in it; drafts nothing for slots without a prediction."""

    name = "prediction"

    def __init__(self, n_slots: int) -> None:
        """Compiles what it uses."""
        self._slots: list[_Slot | None] = [None] * n_slots
        text = np.zeros(8, np.int32)
        one = _Slot(text, _sorted_runs(text))
        _follow(text, one.prediction, one.keys, one.track)
        _continue(one.prediction, one.track, 1)

    def begin(self, slot: Slot) -> None:
        self._slots[slot.id] = None
        if slot.prediction:
            prediction = np.array(slot.prediction, dtype=np.int32)
            self._slots[slot.id] = _Slot(prediction, _sorted_runs(prediction))
            self._catch_up(slot)

    def end(self, slot: Slot) -> None:
        self._slots[slot.id] = None

    def _catch_up(self, slot: Slot) -> _Slot | None:
        one = self._slots[slot.id]
        if one is not None:
            _follow(slot.history[slot.n_prompt :], one.prediction, one.keys, one.track)
        return one

    def guess(self, want: Want) -> Guess:
        one = self._catch_up(want.slot)
        if one is None or want.after:  # another drafter's tokens need not follow the prediction
            return NO_GUESS
        token_ids, survival = _continue(one.prediction, one.track, want.n_max)
        return Guess(token_ids.tolist(), survival.tolist())


@compiled
def _run_key(tokens: Tokens, end: int) -> np.uint64:
    """The hash of the four tokens before `end` in the upper half, zero in the lower."""
    value = np.uint64(0)
    for i in range(end - _RUN, end):
        value = (value + np.uint64(tokens[i]) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        value ^= value >> np.uint64(29)
    return value >> np.uint64(32) << np.uint64(32)


@compiled
def _runs(prediction: Tokens, keys: Keys) -> None:
    """Write the key of every run. keys: [n_runs]."""
    for i in range(len(keys)):
        keys[i] = _run_key(prediction, i + _RUN) | np.uint64(i + _RUN)


def _sorted_runs(prediction: Tokens) -> Keys:
    keys = np.empty(max(0, len(prediction) - _RUN + 1), np.uint64)
    _runs(prediction, keys)
    keys.sort()
    return keys


@compiled
def _matches(output: Tokens, n: int, prediction: Tokens, place: Place, most: Place) -> Place:
    """How many of the output's first `n` tokens, from the last backwards, stand before the place; `most` at most."""
    count: Place = 0
    most = min(most, min(n, place))
    while count < most and output[n - 1 - count] == prediction[place - 1 - count]:
        count += 1
    return count


@compiled
def _look_up(output: Tokens, n: int, prediction: Tokens, keys: Keys, near: Place) -> tuple[Place, Place]:
    """(matches, place) of the longest match of the output's first `n` tokens in the whole prediction.

    Of equal matches the nearest at or after `near`, else the nearest before it. (0, 0): no run of four occurs.
    """
    if n < _RUN:
        return 0, 0
    run = _run_key(output, n)
    middle = np.searchsorted(keys, run | np.uint64(near))
    longest: Place = 0
    best: Place = 0
    for direction in (1, -1):
        i = middle if direction == 1 else middle - 1
        for _ in range(_NEAR):
            if i < 0 or i >= len(keys) or keys[i] >> np.uint64(32) != run >> np.uint64(32):
                break
            place = np.int64(keys[i] & np.uint64(0xFFFFFFFF))
            count = _matches(output, n, prediction, place, _FURTHEST)
            if count > longest and count >= _RUN:
                longest, best = count, place
            i += direction
    return longest, best


@compiled
def _swap_at(prediction: Tokens, place: Place, swaps: Tokens, n_swaps: Place) -> Place:
    """The newest replacement for the predicted tokens at a place, -1 if there is none."""
    for age in range(min(n_swaps, _SWAPS)):
        i = (n_swaps - 1 - age) % _SWAPS
        n_old = swaps[i, _OLD]
        if swaps[i, _TRUST] < 0 or place < 1 or place + n_old > len(prediction):
            continue
        same = prediction[place - 1] == swaps[i, _BEFORE] or swaps[i, _TRUST] > 0
        for j in range(n_old):
            same = same and prediction[place + j] == swaps[i, _OLD_TOKENS + j]
        if same:
            return i
    return -1


@compiled
def _learn_swap(output: Tokens, n: int, prediction: Tokens, track: Track) -> None:
    """The output is in step again after `n` tokens: remember the replacement, if both sides are short."""
    state, _, swaps = track
    place, old, new = state[_POINTER], state[_FROM], state[_AT]
    back = _matches(output, n, prediction, place, min(n - new, place - old))
    n_old, n_new = place - back - old, n - back - new
    if not (0 < n_old <= _SWAP and 0 < n_new <= _SWAP) or old < 1:
        return
    one = swaps[state[_N_SWAPS] % _SWAPS]
    one[:] = 0
    one[_OLD], one[_NEW], one[_BEFORE] = n_old, n_new, prediction[old - 1]
    for j in range(n_old):
        one[_OLD_TOKENS + j] = prediction[old + j]
    for j in range(n_new):
        one[_NEW_TOKENS + j] = output[new + j]
    state[_N_SWAPS] += 1


@compiled
def _extend(token: int, prediction: Tokens, low: Place, band: Ints) -> tuple[Place, Place]:
    """Score the band's places for one more output token: (greatest score, its place)."""
    matched, inserted = band[0], band[1]
    best: Place = _NEVER
    where = low
    dropped = carried = _NEVER  # a place reached by skipping; the new score of the place in hand
    for j in range(_BAND + 1):
        here = max(matched[j], inserted[j])
        inserted[j] = max(inserted[j] + _INSERT_MORE, matched[j] + _INSERT)
        onward = _NEVER
        if j < _BAND and low + j < len(prediction):
            same = prediction[low + j] == token
            onward = max(here, dropped) + _MATCH if same else here + _SUBSTITUTE
        matched[j], carried = carried, onward
        dropped = max(dropped + _DROP_MORE, here + _DROP + _DROP_MORE)
        score = max(matched[j], inserted[j])
        # Of equal scores the further place: a replaced token is likelier than an added token.
        if score >= best:
            best, where = score, low + j
    return best, where


@compiled
def _align(output: Tokens, i: int, prediction: Tokens, keys: Keys, track: Track) -> None:
    """Take in output token `i` while out of step."""
    state, band, _ = track
    best, place = _extend(output[i], prediction, state[_FROM], band)
    count = _matches(output, i + 1, prediction, place, min(_SURE, i + 1 - state[_AT]))
    found, found_place = _look_up(output, i + 1, prediction, keys, state[_FROM])
    if found and _MATCH * found + _JUMP > best:
        best, place, count = _MATCH * found + _JUMP, found_place, found
    state[_POINTER], state[_MATCHES], state[_SCORE] = place, count, best
    if count >= _ANCHORED:
        _learn_swap(output, i + 1, prediction, track)
        state[_DIVERGED] = 0


@compiled
def _diverge(output: Tokens, at: int, n: int, prediction: Tokens, keys: Keys, track: Track) -> None:
    """Output tokens `at` up to `n` do not follow the prediction at the pointer."""
    state, band, _ = track
    state[_DIVERGED], state[_FROM], state[_AT], state[_SWAPPING] = 1, state[_POINTER], at, -1
    band[:] = _NEVER
    band[0, 0] = 0
    for i in range(at, n):
        _align(output, i, prediction, keys, track)


@compiled
def _follow(output: Tokens, prediction: Tokens, keys: Keys, track: Track) -> None:
    """Take in the output tokens that were not seen yet; `output` [n_output] int32 is all of them."""
    state, _, swaps = track
    for i in range(state[_SEEN], len(output)):
        token, place = output[i], state[_POINTER]
        if state[_DIVERGED]:
            _align(output, i, prediction, keys, track)
            continue
        swap, n_swapped = state[_SWAPPING], state[_SWAPPED]
        if swap < 0:
            swap, n_swapped = _swap_at(prediction, place, swaps, state[_N_SWAPS]), 0
            if place < len(prediction) and prediction[place] == token:
                state[_POINTER] += 1
                state[_MATCHES] += 1
                if swap >= 0:
                    swaps[swap, _TRUST] -= 1
                continue
        if swap >= 0 and swaps[swap, _NEW_TOKENS + n_swapped] == token:
            state[_SWAPPING], state[_SWAPPED] = swap, n_swapped + 1
            if n_swapped + 1 == swaps[swap, _NEW]:
                state[_SWAPPING] = -1
                state[_POINTER] += swaps[swap, _OLD]
                swaps[swap, _TRUST] = min(3, swaps[swap, _TRUST] + 1)
            continue
        _diverge(output, i - n_swapped, i + 1, prediction, keys, track)
    state[_SEEN] = max(state[_SEEN], len(output))


@compiled
def _continue(prediction: Tokens, track: Track, n_max: int) -> tuple[Tokens, NDArray[np.float64]]:
    """(token ids, survival), [at most n_max] int32 and float64."""
    state, _, swaps = track
    token_ids, survival = np.empty(n_max, np.int32), np.empty(n_max, np.float64)
    place, matches = state[_POINTER], state[_MATCHES]
    if state[_DIVERGED] and matches < 2 and state[_SCORE] < _LOST:
        return token_ids[:0], survival[:0]
    swap, n_swapped = state[_SWAPPING], state[_SWAPPED]
    n = 0
    while n < n_max:
        if swap < 0:
            swap, n_swapped = _swap_at(prediction, place, swaps, state[_N_SWAPS]), 0
        if swap >= 0:
            token_ids[n] = swaps[swap, _NEW_TOKENS + n_swapped]
            n_swapped += 1
            if n_swapped == swaps[swap, _NEW]:
                place, swap = place + swaps[swap, _OLD], -1
        elif place < len(prediction):
            token_ids[n] = prediction[place]
            place += 1
        else:
            break
        survival[n] = _SURVIVAL[min(matches + n, _SURE)]
        n += 1
    return token_ids[:n], survival[:n]
