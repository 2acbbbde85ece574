"""What attention in tiles does with words and weights, one instruction or a few at a time."""

from __future__ import annotations

import numba
import numpy as np

from slipstream.kernels.attention.words import all_finite, alone_low, largest_halves, round_half_up, turn
from slipstream.kernels.compiled import float_pointer
from slipstream.kernels.exponential import coarse_exp2
from slipstream.kernels.vector import load, store


def test_columns_become_rows() -> None:
    @numba.njit
    def run(words: int) -> None:
        turn(float_pointer(words))

    words = np.arange(17 * 16, dtype=np.float32).reshape(17, 16)
    given = words.copy()
    run(words.ctypes.data)
    assert np.array_equal(words[:16], given[:16].T)
    assert np.array_equal(words[16], given[16])


def test_weights_are_powers_of_two_rounded_to_bfloat16() -> None:
    @numba.njit
    def run(x: int, powers: int, weights: int, low: int) -> None:
        power = coarse_exp2(load(float_pointer(x), 0))
        store(float_pointer(powers), 0, power)
        store(float_pointer(weights), 0, round_half_up(power))
        store(float_pointer(low), 0, alone_low(round_half_up(power)))

    for x in np.linspace(-126, 12, 16 * 400, dtype=np.float32).reshape(-1, 16):
        power, weight, low = (np.zeros(16, np.float32) for _ in range(3))
        run(*(row.ctypes.data for row in (x, power, weight, low)))
        assert np.allclose(power, np.exp2(x.astype(np.float64)), rtol=1.1e-4, atol=0)
        assert np.allclose(weight, power, rtol=2**-8, atol=0)
        bits = weight.view(np.uint32)
        assert not (bits & 0xFFFF).any()
        assert np.array_equal(low.view(np.uint32), bits >> 16)
    x = np.array([0, -127, -1000, -np.inf, np.nan] + [1] * 11, np.float32)
    run(*(row.ctypes.data for row in (x, power, weight, low)))
    assert weight[:4].tolist() == [1, 0, 0, 0]
    assert np.isnan(weight[4])


def test_values_that_are_not_finite_are_found_in_either_half() -> None:
    @numba.njit
    def run(first: int, second: int) -> bool:
        sizes = largest_halves(load(float_pointer(first), 0), load(float_pointer(second), 0))
        return bool(all_finite(largest_halves(sizes, load(float_pointer(first), 0))))

    zeros, finite = np.zeros(16, np.uint32), np.full(16, 0xFF7F7F7F, np.uint32)  # the largest, of both signs
    assert run(zeros.ctypes.data, finite.ctypes.data)
    for lane in range(16):
        for odd in (0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F80_0000, 0xFF81_0000):
            words = finite.copy()
            words[lane] = odd
            assert not run(zeros.ctypes.data, words.ctypes.data)
