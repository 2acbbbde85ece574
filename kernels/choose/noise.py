"""The random numbers of sampling: Gumbel noise as a pure function of (seed, position, token).

This file is the definition: other implementations agree bit for bit. Never change it; it would change the text
of every seed. Philox4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
N_ROUNDS = 10
LN2 = 0.6931471805599453
ROOT_HALF = 0.7071067811865476
MOST_E = 23.0  # E where t rounds to 1; -log(2**-33) = 22.87 is the largest otherwise
MOST_GUMBEL = 22.9  # no draw exceeds it: -log(2**-33) = 22.87


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four 32-bit words per counter. All tensors int64 holding 32-bit values, broadcast against each other."""
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(N_ROUNDS):
        left, right = a * MULTIPLIERS[0], c * MULTIPLIERS[1]  # they wrap in int64; the masks undo the sign
        a, c = ((right >> 32) & WORD) ^ b ^ k0, ((left >> 32) & WORD) ^ d ^ k1
        b, d = right & WORD, left & WORD
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
    return a, b, c, d


def words(seed: Tensor, position: Tensor, n_tokens: int) -> Tensor:
    """The word of every token: [n_rows, n_tokens] int64, 0 … 2**32 - 1.

    seed, position: [n_rows] int64. Key: the seed, low word first. Counter: (token ÷ 4, position, stream 0, 0).
    """
    quads = torch.arange(-(-n_tokens // 4), device=seed.device)
    zero = torch.zeros_like(quads)
    key = (seed & WORD)[:, None], ((seed >> 32) & WORD)[:, None]
    four = philox((quads, (position & WORD)[:, None], zero, zero), key)
    return torch.stack(four, -1).flatten(1)[:, :n_tokens]


def gumbel(word: Tensor) -> Tensor:
    """Gumbel noise of a word, float32: large words give large noise.

    word: int64, any shape. t = (0xFFFFFFFF - word + ½) · 2⁻³² in float32; E = min(-log1p(-t), 23); G = -log E.
    The logarithms are taken in float64 and rounded to float32.
    """
    t32 = ((WORD - word).to(torch.float32) + 0.5) * 2.0**-32
    t = t32.to(torch.float64)
    small = 2 * atanh_series(t / (2 - t))
    large = -log(torch.where(t < 1, 1 - t, 1))
    e = torch.where(t < 0.25, small, torch.where(t < 1, large, MOST_E)).clamp(max=MOST_E)
    return -log(e.to(torch.float32).to(torch.float64)).to(torch.float32)


def log(x: Tensor) -> Tensor:
    """Natural logarithm of float64 x > 0 by exact operations in a fixed order: the same bits on every machine."""
    mantissa, exponent = torch.frexp(x)
    low = mantissa < ROOT_HALF
    m = torch.where(low, mantissa * 2, mantissa)
    e = (exponent - low.to(exponent.dtype)).to(torch.float64)
    return e * LN2 + 2 * atanh_series((m - 1) / (m + 1))


def atanh_series(s: Tensor) -> Tensor:
    """s + s³/3 + … + s²¹/21, exact to float64 for |s| < 0.18."""
    z = s * s
    total = torch.full_like(s, 1 / 21)
    for k in range(19, 0, -2):
        total = total * z + 1 / k
    return s * total
