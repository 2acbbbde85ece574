"""Linear layers in float32 in Triton's interpreter: against the definition, and at any width."""

from __future__ import annotations

import random as randoms

import pytest
import torch

from slipstream.kernels.matmul import reference as plain
from tests.oracle.interpreted import assert_near

# isort: split
from slipstream.kernels.matmul import triton as matmul

pytestmark = pytest.mark.sampled(keep=3, together=True)
ABOUT = ("kernels/triton_launch.py",)


@pytest.mark.parametrize("seed", range(20))
def test_products(seed: int) -> None:
    random, generator = randoms.Random(seed), torch.Generator().manual_seed(seed)
    n_rows, d_in, d_out = random.randint(1, 40), random.randint(1, 90), random.randint(1, 70)
    x, weight = (torch.randn(n, d_in, generator=generator) for n in (n_rows, d_out))
    bias = torch.randn(d_out, generator=generator) if random.random() < 0.5 else None
    meant = plain.linear(x.double(), plain.pack(weight.double(), None if bias is None else bias.double()))
    packed = matmul.pack(weight, bias)
    assert (packed.in_features, packed.out_features) == (d_in, d_out)
    assert_near(matmul.linear(x, packed), meant.float())
    half = matmul.linear(x, packed, torch.bfloat16)
    assert torch.equal(half, matmul.linear(x, packed).bfloat16())


@pytest.mark.parametrize("width", [1, 2, 3, 5, 8, 16])
def test_a_row_has_the_same_bits_at_any_width(width: int) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(19, 75, generator=generator), torch.randn(37, 75, generator=generator)
    packed = matmul.pack(weight)
    whole = matmul.linear(x, packed)
    for start in range(0, 19, width):
        assert torch.equal(matmul.linear(x[start : start + width], packed), whole[start : start + width])


def test_no_rows_and_foreign_weights() -> None:
    packed = matmul.pack(torch.ones(3, 2))
    assert matmul.linear(torch.ones(0, 2), packed).shape == (0, 3)
    assert matmul.refuses(torch.device("cuda"), torch.bfloat16) == "float32 only"


def test_float32_products_are_rounded_nowhere_on_the_way() -> None:
    """Neither to TF32 nor to bfloat16: 2^12 + 2^-11 needs all of a float32's 24 bits."""
    x = torch.tensor([[2.0**12 + 2.0**-11, 1.0]])
    packed = matmul.pack(torch.tensor([[1.0, -(2.0**12)]]))
    assert matmul.linear(x, packed).item() == 2.0**-11
