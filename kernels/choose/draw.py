"""Noise and the pick in compiled code: `noise.py` again, bit for bit, but only for tokens that can still win."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from slipstream.kernels.choose import noise
from slipstream.kernels.choose.truncate import SEGMENT, logits, survives, weights
from slipstream.kernels.compiled import inlined, int_pointer, routine
from slipstream.kernels.exponential import exp
from slipstream.kernels.vector import WIDTH, at_least, first_lane, fma, load_inverted, lowest_bit, splat

WORD, SHIFT = np.uint64(noise.WORD), np.uint64(32)
LEFT, RIGHT = np.uint64(noise.MULTIPLIERS[0]), np.uint64(noise.MULTIPLIERS[1])
STEP0, STEP1 = np.uint64(noise.KEY_STEPS[0]), np.uint64(noise.KEY_STEPS[1])
N_ROUNDS, LN2, ROOT_HALF = noise.N_ROUNDS, noise.LN2, noise.ROOT_HALF
MOST_E, MOST_GUMBEL = noise.MOST_E, np.float32(noise.MOST_GUMBEL)

TWO_TO_32 = np.float32(2.0**32)


@inlined
def hash_segment(segment: int, position: Any, key: Any, words: Any) -> None:
    """Words of the tokens of one segment. words: [SEGMENT] uint32."""
    for i in range(SEGMENT // 4):
        a, b = np.uint64(segment * (SEGMENT // 4) + i), position
        c, d = np.uint64(0), np.uint64(0)
        k0, k1 = key
        for _ in range(N_ROUNDS):
            left, right = a * LEFT, c * RIGHT
            a, b = (right >> SHIFT) ^ b ^ k0, right & WORD
            c, d = (left >> SHIFT) ^ d ^ k1, left & WORD
            k0, k1 = (k0 + STEP0) & WORD, (k1 + STEP1) & WORD
        words[4 * i], words[4 * i + 1] = np.uint32(a), np.uint32(b)
        words[4 * i + 2], words[4 * i + 3] = np.uint32(c), np.uint32(d)


@inlined
def _atanh_series(s: float) -> float:
    z = s * s
    total = 1 / 21
    for k in range(19, 0, -2):
        total = total * z + 1 / k
    return s * total


@inlined
def _log(x: float) -> float:
    mantissa, exponent = math.frexp(x)
    if mantissa < ROOT_HALF:
        mantissa, exponent = mantissa * 2, exponent - 1
    return exponent * LN2 + 2 * _atanh_series((mantissa - 1) / (mantissa + 1))


@inlined
def gumbel(word: Any) -> Any:
    """Noise of one word (uint32): float32."""
    t = np.float64((np.float32(np.uint32(noise.WORD) - word) + np.float32(0.5)) * np.float32(2.0**-32))
    if t < 0.25:
        e = 2 * _atanh_series(t / (2 - t))
    elif t < 1:
        e = -_log(1 - t)
    else:
        e = MOST_E
    return np.float32(-_log(np.float64(np.float32(min(e, MOST_E)))))


@inlined
def largest_token(source: Any) -> int:
    """Lowest id of the row's largest logit."""
    row, n, peaks, largest = source
    for segment in range(len(peaks)):
        if peaks[segment] == largest:
            for token in range(segment * SEGMENT, min((segment + 1) * SEGMENT, n)):
                if row[token] == largest:
                    return token
    return -1


@routine
def pick(source: Any, cut: Any, min_p: Any, temperature: Any, stream: Any) -> int:
    """The surviving token with the largest logit / temperature + noise; the lowest id among equals.

    source: (row, n, peaks, largest). cut: see `truncate`. stream: (key low, key high, position), uint64.
    Noise is drawn where it could still lift a token above the best: -log1p(-t) ≥ t, so t must be at most
    exp(logit / temperature - best); `slack` covers the rounding of all that.
    """
    row, n, peaks, largest = source
    key, position = (stream[0], stream[1]), stream[2]
    words = np.empty(SEGMENT, np.uint32)
    inverse, near = np.float32(np.float32(1) / temperature), np.float32(largest - 2 * temperature)
    best_token = largest_token(source)
    hash_segment(best_token // SEGMENT, position, key, words)
    best = np.float32(np.float32(largest / temperature) + gumbel(words[best_token % SEGMENT]))
    for nearest in (True, False):  # the likeliest first: they raise the bar for the rest
        for segment in range(len(peaks)):
            slack = (abs(best) + np.float32(64)) * np.float32(1e-6) + np.float32(1e-4)
            hopeless = peaks[segment] * inverse + MOST_GUMBEL + slack < best
            if (peaks[segment] >= near) != nearest or peaks[segment] < cut[0] or hopeless:
                continue
            hash_segment(segment, position, key, words)
            for i in range(0, SEGMENT, WIDTH):
                part = logits(row, segment * SEGMENT + i, n)
                odds = exp(fma(part, splat(inverse), splat(np.float32(slack - best))))
                limit = fma(odds, splat(TWO_TO_32), splat(np.float32(1)))
                able = at_least(limit, load_inverted(int_pointer(words.ctypes.data), i)) & at_least(
                    part, splat(cut[0])
                )
                while able != 0:
                    lane = lowest_bit(able)
                    able &= able - 1
                    token = segment * SEGMENT + i + lane
                    if token >= n or not survives(row[token], token, cut):
                        continue
                    if min_p > 0 and first_lane(weights(splat(np.float32(row[token] - largest)))) < min_p:
                        continue
                    value = np.float32(np.float32(row[token] / temperature) + gumbel(words[i + lane]))
                    if value > best or (value == best and token < best_token):
                        best, best_token = value, token
    return best_token
