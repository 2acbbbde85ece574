"""The random numbers of sampling, against published vectors and against ones fixed for ever."""

from __future__ import annotations

import math

import pytest
import torch

from slipstream.kernels.choose import noise
from slipstream.kernels.choose.mass import MASS_ONE, masses, weights

# Random123's known answers for philox4x32-10: counter, key, result.
PHILOX = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
# word -> Gumbel noise. These are the promise that a seed's text never changes; never edit them.
GUMBEL = {
    0x00000000: "-0x1.9157e00000000p+1",
    0x00000001: "-0x1.9157e00000000p+1",
    0x0000007F: "-0x1.9157e00000000p+1",
    0x00000080: "-0x1.67e0920000000p+1",
    0x3FFFFFFF: "-0x1.4e79360000000p-2",
    0x40000000: "-0x1.4e79360000000p-2",
    0x7FFFFFFF: "0x1.774f2a0000000p-2",
    0x80000000: "0x1.774f2a0000000p-2",
    0x80000001: "0x1.774f2a0000000p-2",
    0x9E3779B9: "0x1.7680500000000p-1",
    0xBFFFFFFF: "0x1.3ef3420000000p+0",
    0xC0000000: "0x1.3ef3420000000p+0",
    0xC0000001: "0x1.3ef3420000000p+0",
    0xDEADBEEF: "0x1.f8564c0000000p+0",
    0xFFFF0000: "0x1.62e4300000000p+3",
    0xFFFFFF00: "0x1.0a33260000000p+4",
    0xFFFFFFFE: "0x1.5c67660000000p+4",
    0xFFFFFFFF: "0x1.6dfb520000000p+4",
}
# (seed, position) -> (words, noise) of tokens 0 … 4.
DRAWS = {
    (0, 0): (
        [1713891541, 3781805453, 3159862348, 2600524760, 4175744164],
        [
            "0x1.5b6c7e0000000p-4",
            "0x1.07e4840000000p+1",
            "0x1.2e62020000000p+0",
            "0x1.611f480000000p-1",
            "0x1.c8fb000000000p+1",
        ],
    ),
    (1, 0): (
        [3823634032, 3842641596, 2515673792, 3054873127, 2886210587],
        [
            "0x1.1377360000000p+1",
            "0x1.190bbe0000000p+1",
            "0x1.4057be0000000p-1",
            "0x1.13a4f20000000p+0",
            "0x1.d859fc0000000p-1",
        ],
    ),
    (1, 1): (
        [2202007772, 576493116, 590055603, 187910919, 4164296561],
        [
            "0x1.9d094c0000000p-2",
            "-0x1.64fed40000000p-1",
            "-0x1.5f08480000000p-1",
            "-0x1.240aa40000000p+0",
            "0x1.bd11f00000000p+1",
        ],
    ),
    (-1, 7): (
        [2561012937, 3571609276, 2938335248, 57238792, 359587809],
        [
            "0x1.51bb680000000p-1",
            "0x1.b0c47a0000000p+0",
            "0x1.eff0f40000000p-1",
            "-0x1.7679100000000p+0",
            "-0x1.d113fe0000000p-1",
        ],
    ),
    (1311768467463790320, 151): (
        [2146510988, 503647070, 1625055741, 877449554, 1116838170],
        [
            "0x1.76a3e60000000p-2",
            "-0x1.8653c00000000p-1",
            "0x1.d2f3a60000000p-6",
            "-0x1.d9b0d40000000p-2",
            "-0x1.30fc340000000p-2",
        ],
    ),
    (-9223372036854775808, 4294967295): (
        [2422138192, 3344043674, 2600063149, 1773764248, 3446048418],
        [
            "0x1.1d4d500000000p-1",
            "0x1.629f3c0000000p+0",
            "0x1.60f0e80000000p-1",
            "0x1.f7746a0000000p-4",
            "0x1.835da40000000p+0",
        ],
    ),
}


@pytest.mark.parametrize(("counter", "key", "result"), PHILOX)
def test_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, ...], result: tuple[int, ...]
) -> None:
    a, b, c, d = (torch.tensor([x]) for x in counter)
    k0, k1 = (torch.tensor([x]) for x in key)
    assert tuple(int(x) for x in noise.philox((a, b, c, d), (k0, k1))) == result


def test_gumbel_never_changes() -> None:
    got = noise.gumbel(torch.tensor(list(GUMBEL)))
    assert [float(x).hex() for x in got] == list(GUMBEL.values())


@pytest.mark.parametrize(("seed", "position"), list(DRAWS))
def test_draws_never_change(seed: int, position: int) -> None:
    words = noise.words(torch.tensor([seed]), torch.tensor([position]), 5)[0]
    meant_words, meant_noise = DRAWS[seed, position]
    assert words.tolist() == meant_words
    assert [float(x).hex() for x in noise.gumbel(words)] == meant_noise


def test_a_draw_does_not_depend_on_the_vocabulary_or_on_other_rows() -> None:
    seeds, positions = torch.tensor([3, -3, 2**62]), torch.tensor([1, 2**31, 0])
    together = noise.words(seeds, positions, 1001)
    for i in range(3):
        assert torch.equal(noise.words(seeds[i : i + 1], positions[i : i + 1], 50)[0], together[i, :50])
    assert len(set(together.flatten().tolist())) > 3 * 1001 - 5


def test_gumbel_grows_with_the_word_and_is_bounded() -> None:
    words = torch.cat([torch.arange(0, 2**32, 2**16), torch.arange(2**32 - 5000, 2**32)])
    values = noise.gumbel(words)
    assert bool((values.diff() >= 0).all())
    assert -3.2 < float(values.min()) < float(values.max()) < noise.MOST_GUMBEL


def test_gumbel_is_near_the_formula_and_has_its_moments() -> None:
    words = torch.randint(0, 2**32, (200_000,), generator=torch.Generator().manual_seed(0))
    t = (noise.WORD - words.double() + 0.5) * 2.0**-32
    values = noise.gumbel(words).double()
    assert float((values + torch.log(-torch.log1p(-t))).abs().max()) < 1e-3  # t is rounded to float32 near 1
    assert abs(float(values.mean()) - 0.577216) < 0.01
    assert abs(float(values.var()) - math.pi**2 / 6) < 0.03


def test_log_is_exact_to_float64() -> None:
    x = torch.logspace(-12, 3, 10_000, dtype=torch.float64)
    assert float((noise.log(x) - x.log()).abs().max()) < 1e-14


def test_weights_are_exp_and_masses_sum_in_any_order() -> None:
    distance = -torch.rand(50_000, generator=torch.Generator().manual_seed(1)) * 30
    distance[0] = 0
    meant = distance.double().exp()
    assert float(((weights(distance).double() - meant) / meant).abs().max()) < 4e-6
    assert int(masses(distance)[0]) == MASS_ONE
    assert int(masses(torch.tensor(float("-inf")))) == 0
    exact = masses(distance)
    assert int(exact.sum()) == int(exact.double().flip(0).sum()) == sum(exact.tolist())
