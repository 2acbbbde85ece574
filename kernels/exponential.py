"""exp of sixteen float32, and what is made of it; unlike torch's it does not depend on where vectors end."""

from __future__ import annotations

from typing import Any

import numpy as np

from slipstream.kernels.compiled import inlined
from slipstream.kernels.vector import fma, larger, power_of_two, smaller, splat

LOG2E = np.float32(1.4426950408889634)
MAGIC = np.float32(1.5 * 2**23)  # adding it rounds to an integer, kept in the low bits
EXP_LEAST, EXP_MOST = np.float32(-87.0), np.float32(88.0)
# 2**f for f in [-½, ½], within 1e-7; highest power first
EXP2 = tuple(
    np.float32(c)
    for c in (
        0.00015353361959569156,
        0.0013398875016719103,
        0.00961843691766262,
        0.055503323674201965,
        0.24022647738456726,
        0.6931471824645996,
        1.0,
    )
)


@inlined
def exp(x: Any) -> Any:
    """exp per lane within 2e-7 of its size; x outside [-87, 88] counts as the border; exp(0) is exactly 1."""
    x = smaller(splat(EXP_MOST), larger(splat(EXP_LEAST), x))
    magic = fma(x, splat(LOG2E), splat(MAGIC))
    f = fma(x, splat(LOG2E), splat(MAGIC) - magic)
    p = fma(splat(EXP2[0]), f, splat(EXP2[1]))
    p = fma(p, f, splat(EXP2[2]))
    p = fma(p, f, splat(EXP2[3]))
    p = fma(p, f, splat(EXP2[4]))
    p = fma(p, f, splat(EXP2[5]))
    p = fma(p, f, splat(EXP2[6]))
    return p * power_of_two(magic)


# The same within a part in 9,000 of it
COARSE_EXP2 = np.float32(0.05500893), np.float32(0.24221097), np.float32(0.69328293), np.float32(1)


@inlined
def coarse_exp2(x: Any) -> Any:
    """2**x per lane for x below 127, to a twentieth of what bfloat16 rounds by; 0 from -127 down, NaN of NaN."""
    x = larger(splat(np.float32(-127)), x)
    magic = x + splat(MAGIC)
    f = x - (magic - splat(MAGIC))
    p = fma(splat(COARSE_EXP2[0]), f, splat(COARSE_EXP2[1]))
    p = fma(fma(p, f, splat(COARSE_EXP2[2])), f, splat(COARSE_EXP2[3]))
    return p * power_of_two(magic)


@inlined
def over_one_plus_exp(x: Any, power: Any) -> Any:
    """x / (1 + exp(-power)), x times a sigmoid. Below -88, where `exp` stops growing, less than 1e-36 of x is left."""
    return x / (splat(np.float32(1)) + exp(splat(np.float32(0)) - power))
