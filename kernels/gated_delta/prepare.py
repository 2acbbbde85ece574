"""What an update needs besides the state: normalised heads, decays, and the activations they come from."""

from __future__ import annotations

from typing import Any

import numpy as np

from slipstream.kernels.compiled import inlined
from slipstream.kernels.vector import (
    WIDTH,
    add,
    div,
    exp,
    fma,
    larger,
    load,
    load_part,
    mul,
    splat,
    store,
    sub,
    sum_lanes,
)

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
        store(out, i, mul(mul(load_part(x, i, d - i), inverse), splat(np.float32(scale))))


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
        store(out, i, mul(load(x, i), load(y, i)))


@inlined
def sigmoid(x: Any) -> Any:
    """1 / (1 + e^-x) per lane."""
    one = splat(np.float32(1))
    return div(one, add(one, exp(sub(splat(np.float32(0)), x))))


@inlined
def softplus(x: Any) -> Any:
    """log(1 + e^x) per lane, as max(x, 0) + log(1 + u) with u = e^-|x|, and log(1 + u) = 2 atanh(u / (2 + u))."""
    zero, two = splat(np.float32(0)), splat(np.float32(2))
    u = exp(sub(zero, larger(x, sub(zero, x))))
    z = div(u, add(two, u))
    square, total = mul(z, z), splat(ATANH[0])
    total = fma(total, square, splat(ATANH[1]))
    total = fma(total, square, splat(ATANH[2]))
    total = fma(total, square, splat(ATANH[3]))
    total = fma(total, square, splat(ATANH[4]))
    total = fma(total, square, splat(ATANH[5]))
    total = fma(total, square, splat(ATANH[6]))
    total = fma(total, square, splat(ATANH[7]))
    return fma(mul(two, z), total, larger(zero, x))


@inlined
def decay(raw: Any, a_log: Any, dt_bias: Any) -> Any:
    """e^(-e^a_log * softplus(raw + dt_bias)) per lane; never below e^-87."""
    rate = exp(a_log)
    return exp(sub(splat(np.float32(0)), mul(rate, softplus(add(raw, dt_bias)))))
