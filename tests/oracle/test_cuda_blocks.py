"""Products of GGUF's blocks on CUDA, in the emulator: near float64's, and rows bit for bit at every width."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipstream.kernels.matmul import cuda
from slipstream.kernels.matmul.block_numbers import HELD, held_bytes, numbers
from slipstream.kernels.matmul.blocks import BlockWeight
from slipstream.kernels.matmul.columns import SIXTEENS, SUMS, n_columns, spread
from slipstream.kernels.matmul.fragments import BITS, PLAIN, FragmentWeight
from slipstream.kernels.matmul.quantized import Quantized, joined
from tests import block_data
from tests.block_data import block_bytes
from tests.emulator import emulated, needs_compiler, same
from tests.oracle.test_kernels import random

pytestmark = [needs_compiler, pytest.mark.sampled(keep=2, together=True)]
ABOUT = ("kernels/cuda/include/*.cuh",)
DTYPE = torch.bfloat16
WIDTHS = (1, 3, 8, 9, 16, 17, 33, 64)
each_kind = pytest.mark.parametrize("kind", HELD)


def blocky(
    kind: str, n_out: int, n_in: int, dtype: torch.dtype = DTYPE, order: Tensor | None = None, seed: int = 0
) -> BlockWeight:
    return BlockWeight(block_bytes(kind, n_out, n_in, seed), kind, order, dtype)


def exact(weight: BlockWeight) -> Tensor:
    """Its values in float32, as gguf reads them."""
    return BlockWeight(weight.data, weight.kind, weight.order, torch.float32).dense()


def product(
    x: Tensor, weight: BlockWeight, *, bias: Tensor | None = None, order: int = 0
) -> tuple[Tensor, FragmentWeight]:
    """In float32: rounded to 16 bits, other sums would look the same."""
    packed = cuda.pack(weight, bias)
    assert isinstance(packed, FragmentWeight)
    with emulated(order=order):
        return cuda.linear(x, packed, torch.float32), packed


def assert_near(found: Tensor, x: Tensor, weight: BlockWeight, bias: Tensor) -> None:
    """float32 sums, and of minima what a sum of inputs in two parts lacks: at most 2^-17 of it."""
    wide, rows, minima = exact(weight).double(), x.double(), minima_of(weight)
    sums = rows.unflatten(1, (-1, 32)).sum(2)  # [n_rows, n_groups]
    parts = wide.abs() + 2 * minima.repeat_interleave(32, 1)  # that are added for a weight
    allowed = 2.0**-21 * (rows.abs() @ parts.t()) + 2.0**-17 * (sums.abs() @ minima.t())
    meant = rows @ wide.t() + bias.double()
    assert found.shape == meant.shape
    assert ((found.double() - meant).abs() - allowed).max() <= 0


def minima_of(weight: BlockWeight) -> Tensor:
    """Magnitudes of what is subtracted from the values of 32 inputs, [n_out, n_in / 32] float64."""
    found = block_data.numbers(weight.kind, weight.data, 32) if HELD[weight.kind].columns == SUMS else None
    if found is None or found.seconds is None or found.second_factors is None:
        return torch.zeros(weight.shape[0], weight.shape[1] // 32, dtype=torch.float64)
    factors = torch.from_numpy(found.second_factors).double()
    seconds = torch.from_numpy(found.seconds).double()
    return (factors * seconds.repeat_interleave(factors.shape[1] // seconds.shape[1], 1)).abs()


@each_kind
def test_numbers_are_those_that_gguf_reads(kind: str) -> None:
    """Codes, zeros and scales give every value to the bit; of minima, those that sums are multiplied by."""
    weight, held = blocky(kind, 40, 768), HELD[kind]
    codes, scales, zeros = numbers(weight)
    n_wide = 768 if held.columns is None else n_columns(768, held.columns)
    assert codes.shape == (40, n_wide)
    whole = codes.view(torch.int8).double() if held.bits == 8 else codes.double()
    values = (whole.unflatten(1, (-1, 32)) - zeros[:, :, None]) * scales.double()[:, :, None]
    if held.columns == SIXTEENS:
        ones, sixteens = values.unflatten(2, (2, 16)).unbind(2)
        values = ones + 16 * sixteens
    elif held.columns == SUMS:
        by_block = values.flatten(1).unflatten(1, (-1, 288))
        minima = by_block[:, :, 256:].unflatten(2, (8, 4))
        assert torch.equal(minima[..., 0], minima[..., 1])  # of what a sum is, and what it lacks
        assert torch.equal(minima[..., 2], minima[..., 3])
        per_group = minima[..., 0] + 16 * minima[..., 2]
        values = by_block[:, :, :256].unflatten(2, (8, 32)) + per_group[..., None]
    assert torch.equal(values.reshape(40, 768).float(), exact(weight))


@each_kind
@pytest.mark.parametrize("n_rows", [1, 5, 20])
def test_is_near_float64(kind: str, n_rows: int) -> None:
    weight, bias = blocky(kind, 130, 768, seed=n_rows), random(130, dtype=DTYPE, seed=2)
    x = random(n_rows, 768, dtype=DTYPE, seed=1)
    found, packed = product(x, weight, bias=bias, order=n_rows)
    assert BITS[packed.code] == HELD[kind].bits
    assert_near(found, x, weight, bias)
    rounded = x.double() @ weight.dense().double().t() + bias.double()
    meant = x.double() @ exact(weight).double().t() + bias.double()
    assert (found - meant).abs().mean() < (rounded - meant).abs().mean() / 8  # than of values of 16 bits


@each_kind
def test_a_row_has_the_same_bits_at_every_width(kind: str) -> None:
    weight, x = blocky(kind, 70, 768), random(67, 768, dtype=DTYPE, seed=2)
    whole, packed = product(x, weight)
    with emulated():
        for width in WIDTHS:
            for first in {0, len(x) - width}:
                found = cuda.linear(x[first : first + width], packed, torch.float32)
                assert same(found, whole[first : first + width]), (width, first)


@pytest.mark.parametrize("columns", [SUMS, SIXTEENS])
@pytest.mark.parametrize("n_in", [256, 1280])
def test_inputs_are_spread_to_the_bit(columns: str, n_in: int) -> None:
    x = random(3, n_in, dtype=DTYPE)
    with emulated():
        found = spread(x, columns)
    if columns == SIXTEENS:
        sixteens = x.unflatten(1, (-1, 16))
        assert same(found, torch.cat((sixteens, 16 * sixteens), 2).flatten(1))
        return
    blocks = found.unflatten(1, (-1, 288))
    assert same(blocks[:, :, :256].flatten(1), x)
    high, low, more_high, more_low = blocks[:, :, 256:].unflatten(2, (8, 4)).unbind(3)
    sums = x.double().unflatten(1, (-1, 8, 32)).sum(3)
    assert same(high, sums.float().to(DTYPE))
    lacks = (sums - high.double() - low.double()).abs()
    assert (lacks <= 2.0**-16 * sums.abs() + 2.0**-20).all()
    assert same(more_high, 16 * high)
    assert same(more_low, 16 * low)


def test_columns_in_another_order_meet_their_inputs() -> None:
    order = torch.randperm(512, generator=torch.Generator().manual_seed(3))
    for kind in ("Q4_K", "Q6_K", "Q8_0"):
        x = random(5, 512, dtype=DTYPE)
        found, _ = product(x, blocky(kind, 30, 512, order=order))
        assert same(found, product(x[:, order], blocky(kind, 30, 512))[0])


def test_parts_of_several_types_are_each_as_narrow_as_they_are_stored() -> None:
    kinds = ("Q4_K", "Q4_K", "Q6_K", "Q2_K", "Q8_0")
    parts: list[Tensor | Quantized] = [blocky(kind, 20 + i, 512, seed=i) for i, kind in enumerate(kinds)]
    parts += [random(n_out, 512, dtype=DTYPE, seed=n_out) for n_out in (25, 26)]
    bias, x = random(161, dtype=DTYPE, seed=2), random(9, 512, dtype=DTYPE, seed=1)
    packed = cuda.pack(joined(parts), bias)
    assert isinstance(packed, cuda.FragmentParts)
    assert (packed.in_features, packed.out_features) == (512, 161)
    assert [part.out_features for part in packed.parts] == [41, 22, 23, 24, 51]  # neighbours alike as one
    with emulated():
        found = cuda.linear(x, packed, torch.float32)
        narrow = cuda.linear(x, packed)
        each = [cuda.linear(x, cuda.pack(part), torch.float32) for part in parts]
    assert same(found, torch.cat(each, 1) + bias.float())
    assert same(narrow, found.to(DTYPE))


def test_what_has_no_place_is_widened_before() -> None:
    """A type without whole numbers for the kernel, scales that are too small, and sums in float16."""
    tiny = blocky("Q4_K", 20, 256)
    tiny.data[:, 0:2] = (
        torch.tensor([1.5 * 2.0**-24]).half().view(torch.uint8)
    )  # the least halves are no trouble
    for weight, is_plain in (
        (blocky("Q2_K", 20, 256), True),
        (blocky("IQ3_S", 20, 256), True),
        (tiny, False),
        (blocky("Q4_K", 20, 256, torch.float16), True),
        (blocky("Q6_K", 20, 256, torch.float16), True),
        (blocky("Q8_0", 20, 256, torch.float16), False),
    ):
        x = random(3, 256, dtype=weight.dtype)
        found, packed = product(x, weight)
        assert (packed.code == PLAIN) == is_plain
        if is_plain:
            packed = cuda.pack(weight.dense())
            with emulated():
                assert same(found, cuda.linear(x, packed, torch.float32))


@each_kind
def test_bytes_that_are_counted_are_those_that_are_kept(kind: str) -> None:
    weight = blocky(kind, 256, 1024)
    packed = cuda.pack(weight)
    assert isinstance(packed, FragmentWeight)
    assert packed.words is not None
    assert held_bytes(weight) == packed.codes.nbytes + packed.words.nbytes
