"""What an update needs besides the state: normalised heads, decays, and the activations they come from."""

from __future__ import annotations

from typing import Any

import numpy as np

from slipstream.kernels.compiled import inlined
from slipstream.kernels.exponential import exp
from slipstream.kernels.vector import WIDTH, fma, larger, load, load_part, splat, store, sum_lanes

EPS = np.float32(1e-6)  # added to a sum of squares
# 1 + z²/3 + z⁴/5 + …, highest power first: atanh(z) / z within 2e-9 for |z| <= 1/3
ATANH = tuple(np.float32(1 / n) for n in (15, 13, 11, 9, 7, 5, 3, 1))


@inlined
def normalise(x: Any, d: int, scale: Any, out: Any) -> None:
    """out = x / sqrt(Σ x² + 1e-6) * scale, padded with zeros to whole vectors. out: [d padded] float32."""
    squares = splat(np.float32(0))
    for i in range(0, d, WIDTH):
        part = load_part(x, i, d - i)
        squares = fma(part, part, squares)
    inverse = splat(np.float32(np.float32(1) / np.sqrt(sum_lanes(squares) + EPS)))
    for i in range(0, d, WIDTH):
        store(out, i, load_part(x, i, d - i) * inverse * splat(np.float32(scale)))


@inlined
def copy(x: Any, d: int, out: Any) -> None:
    """out = x, padded with zeros to whole vectors."""
    for i in range(0, d, WIDTH):
        store(out, i, load_part(x, i, d - i))


@inlined
def fill(value: Any, d: int, out: Any) -> None:
    """d elements, and the padding, become the lanes of `value`, which are all equal."""
    for i in range(0, d, WIDTH):
        store(out, i, value)


@inlined
def multiply(x: Any, y: Any, d: int, out: Any) -> None:
    """out = x * y over whole vectors."""
    for i in range(0, d, WIDTH):
        store(out, i, load(x, i) * load(y, i))


@inlined
def softplus(x: Any) -> Any:
    """log(1 + e^x) per lane, as max(x, 0) + log(1 + u) with u = e^-|x|, and log(1 + u) = 2 atanh(u / (2 + u))."""
    zero, two = splat(np.float32(0)), splat(np.float32(2))
    u = exp(zero - larger(x, zero - x))
    z = u / (two + u)
    square, total = z * z, splat(ATANH[0])
    total = fma(total, square, splat(ATANH[1]))
    total = fma(total, square, splat(ATANH[2]))
    total = fma(total, square, splat(ATANH[3]))
    total = fma(total, square, splat(ATANH[4]))
    total = fma(total, square, splat(ATANH[5]))
    total = fma(total, square, splat(ATANH[6]))
    total = fma(total, square, splat(ATANH[7]))
    return fma(two * z, total, larger(zero, x))


@inlined
def decay(raw: Any, a_log: Any, dt_bias: Any) -> Any:
    """e^(-e^a_log * softplus(raw + dt_bias)) per lane; never below e^-87."""
    rate = exp(a_log)
    return exp(splat(np.float32(0)) - rate * softplus(raw + dt_bias))
