"""CUDA's `matmul` in the emulator: against float64, and rows bit for bit at every width."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor

from slipstream.kernels.matmul import cuda, op, reference
from slipstream.kernels.matmul.fragments import BITS, STEP, TILE
from tests.emulator import emulated, needs_compiler, same
from tests.oracle.test_kernels import random

pytestmark = [needs_compiler, pytest.mark.sampled(keep=4, together=True)]
ABOUT = ("kernels/cuda/include/*.cuh",)
WIDTHS = (1, 2, 3, 5, 8, 9, 16, 17, 32, 33, 64)
HALF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # largest relative error of one rounding
each_dtype = pytest.mark.parametrize("dtype", HALF, ids=lambda dtype: str(dtype)[6:])


def assert_near(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """float32 sums of n / 16 roundings, each below 2^-24 of the sum of magnitudes, then one to the result's dtype."""
    meant = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    magnitude = x.double().abs() @ weight.double().abs().t() + (0 if bias is None else bias.double().abs())
    allowed = magnitude * (x.shape[1] / 16 + 18) * 2.0**-24 + meant.abs() * HALF.get(found.dtype, 0.0)
    assert found.shape == meant.shape
    assert not found.isnan().any()
    excess = (found.double() - meant).abs() - allowed
    assert found.numel() == 0 or excess.max() <= 2.0**-24  # float16 has no exponent for less


@each_dtype
@pytest.mark.parametrize("seed", range(20))
def test_is_near_float64(dtype: torch.dtype, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    n_rows, n_out, n_in = (int(torch.randint(1, most, (), generator=draw)) for most in (24, 300, 900))
    if seed % 3 == 0:  # exact tiles
        n_out, n_in = -(-n_out // TILE) * TILE, -(-n_in // STEP) * STEP
    weight = random(n_out, n_in, dtype=dtype, seed=seed) / n_in**0.5
    bias = random(n_out, dtype=dtype, seed=seed + 1) if seed % 2 else None
    x = random(n_rows, n_in, dtype=dtype, seed=seed + 2)
    packed = cuda.pack(weight, bias)
    assert (packed.in_features, packed.out_features) == (n_in, n_out)
    with emulated(order=seed):
        narrow, wide = cuda.linear(x, packed), cuda.linear(x, packed, torch.float32)
    assert (narrow.dtype, wide.dtype) == (dtype, torch.float32)
    assert_near(narrow, x, weight, bias)
    assert_near(wide, x, weight, bias)
    assert same(wide.to(dtype), narrow)


def bits_at_all_widths(weight: Tensor, x: Tensor, widths: tuple[int, ...]) -> Tensor:
    """Rows of x alone and beside others, from the first on and up to the last; returns all of them.

    In float32: rounded to 16 bits, most sums of another order would look the same.
    """
    packed = cuda.pack(weight, random(weight.shape[0], dtype=weight.dtype, seed=9))
    with emulated():
        whole = cuda.linear(x, packed, torch.float32)
        for width in widths:
            for first in {0, x.shape[0] - width}:
                found = cuda.linear(x[first : first + width], packed, torch.float32)
                assert same(found, whole[first : first + width]), (width, first)
    return whole


@each_dtype
@pytest.mark.parametrize("shape", [(70, 41), (140, 520)], ids=str)
def test_a_row_has_the_same_bits_at_every_width(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight = random(*shape, dtype=dtype, seed=1)
    bits_at_all_widths(weight, random(67, shape[1], dtype=dtype, seed=2), WIDTHS)


def test_rows_above_64_and_many_splits() -> None:
    assert cuda.n_splits(20, 1100, 16) == 4
    weight, x = random(20, 1100, dtype=torch.bfloat16), random(131, 1100, dtype=torch.bfloat16, seed=1)
    bits_at_all_widths(weight, x, (1, 17, 33, 64, 65, 128))


@each_dtype
def test_blocks_that_run_all_splits_add_them_in_the_same_order(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x = random(150, 900, dtype=dtype), random(21, 900, dtype=dtype, seed=1)
    packed = cuda.pack(weight)
    assert cuda.n_splits(150, 900, 16) > 2
    with emulated():
        spread = cuda.linear(x, packed, torch.float32)
        monkeypatch.setattr(cuda, "SPREAD_BELOW", 0)
        assert same(cuda.linear(x, packed, torch.float32), spread)


@each_dtype
def test_blocks_of_more_rows_add_them_in_the_same_order(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two teams of a block share its weights; the second of the last block has few rows, or none."""
    weight, x = random(150, 900, dtype=dtype), random(200, 900, dtype=dtype, seed=1)
    packed = cuda.pack(weight, random(150, dtype=dtype, seed=2))
    with emulated():
        meant = cuda.linear(x, packed, torch.float32)
        monkeypatch.setattr(cuda, "WIDEST_FROM", 1)
        for n in (200, 130, 66):
            assert same(cuda.linear(x[:n], packed, torch.float32), meant[:n])
    assert_near(meant, x, weight, random(150, dtype=dtype, seed=2))


@pytest.mark.parametrize(
    ("n_rows", "n_tiles", "width"),
    [
        *((1, 224, 8), (8, 32, 8), (9, 32, 16), (17, 224, 32), (32, 32, 32), (33, 32, 64), (64, 224, 64)),
        *((65, 224, 128), (65, 32, 64), (512, 32, 128), (2048, 32, 128)),
    ],
)
def test_only_prompts_have_blocks_of_more_rows_where_there_are_enough(
    n_rows: int, n_tiles: int, width: int
) -> None:
    assert cuda._width(n_rows, n_tiles) == width


def test_a_block_fits_every_multiprocessor() -> None:
    """Those of sm_86, sm_89 and sm_120 give a block 99 KiB, some bytes of which are static."""
    sizes = {
        (bits, n): cuda._shared(TILE * STEP * bits // 8, n) for bits in BITS.values() for n in cuda.WIDTHS
    }
    assert max(sizes.values()) + 256 <= 99 << 10, sizes


@pytest.mark.parametrize("order", [0, 1, 7, 8])
def test_no_order_of_threads_and_blocks_changes_a_bit(order: int) -> None:
    weight, x = random(150, 900, dtype=torch.bfloat16), random(21, 900, dtype=torch.bfloat16, seed=1)
    packed = cuda.pack(weight)
    with emulated():
        meant = cuda.linear(x, packed)
    with emulated(order=order):
        for _ in range(2):  # the counters of splits are zero again
            assert same(cuda.linear(x, packed), meant)
            assert not packed.n_done.any()


def test_a_row_that_is_not_finite_stays_alone() -> None:
    weight, x = random(130, 600, dtype=torch.bfloat16), random(9, 600, dtype=torch.bfloat16, seed=1)
    packed = cuda.pack(weight)
    with emulated():
        meant = cuda.linear(x, packed)
        x[3, 100], x[5, 200] = float("nan"), float("inf")
        found = cuda.linear(x, packed)
    assert found[3].isnan().all()
    assert not found[5].isfinite().any()
    others = [0, 1, 2, 4, 6, 7, 8]
    assert same(found[others], meant[others])


def test_rows_may_be_none_or_strided() -> None:
    weight, x = random(30, 24, dtype=torch.bfloat16), random(5, 40, dtype=torch.bfloat16, seed=1)
    packed = cuda.pack(weight)
    with emulated():
        assert cuda.linear(x[:0, :24], packed).shape == (0, 30)
        assert same(cuda.linear(x[:, :24], packed), cuda.linear(x[:, :24].contiguous(), packed))
        assert cuda.linear(x[:, :24], packed, torch.float64).dtype == torch.float64


@pytest.mark.parametrize(
    ("shape", "splits"),
    [
        ((6144, 4096), (5, 10, 10)),
        ((4096, 4096), (8, 12, 12)),
        ((28672, 4096), (2, 2, 2)),
        ((4096, 14336), (8, 16, 16)),
        ((151936, 4096), (1, 1, 1)),
        ((8, 64), (1, 1, 1)),
    ],
)
def test_splits_follow_from_the_weight(shape: tuple[int, int], splits: tuple[int, ...]) -> None:
    """They are part of every result's bits: a change is a change of all texts."""
    assert tuple(cuda.n_splits(*shape, bits) for bits in (16, 8, 4)) == splits


def test_what_does_not_fit_is_refused() -> None:
    x, weight = random(2, 16, dtype=torch.bfloat16), random(8, 16, dtype=torch.bfloat16)
    packed = cuda.pack(weight)
    with pytest.raises(TypeError, match="pack the weight with cuda"):
        cuda.linear(x, reference.pack(weight))
    with pytest.raises(TypeError, match="float32"):
        cuda.pack(weight.float())
    with pytest.raises(ValueError, match="float16"):
        cuda.linear(x.half(), packed)
    with pytest.raises(ValueError, match="n_rows, 8"):
        cuda.linear(x[:, :8], packed)
    assert cuda.refuses(torch.device("cuda"), torch.float32) == "bfloat16 and float16 only"
    assert cuda.refuses(torch.device("cpu"), torch.bfloat16) == "the device is cpu"


def test_signatures_are_those_of_the_op() -> None:
    for name in ("pack", "linear"):
        assert inspect.signature(getattr(cuda, name)) == inspect.signature(getattr(op, name))
