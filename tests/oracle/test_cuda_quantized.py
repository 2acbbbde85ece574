"""Products of packed weights on CUDA, in the emulator: near float64's, and rows bit for bit at every width."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from slipstream.kernels.matmul import cuda
from slipstream.kernels.matmul.fragments import BITS, FragmentWeight
from slipstream.kernels.matmul.quantized import ByteWeight, Int4Weight, Quantized
from tests.emulator import emulated, needs_compiler, same
from tests.oracle.test_cuda_matmul import assert_near, each_dtype
from tests.oracle.test_kernels import random

pytestmark = [needs_compiler, pytest.mark.sampled(keep=4, together=True)]
ABOUT = ("kernels/cuda/include/*.cuh",)
WIDTHS = (1, 3, 8, 9, 16, 17, 33, 64)


def an_int4(
    shape: tuple[int, int], group: int, dtype: torch.dtype, *, seed: int = 0, **more: Tensor
) -> Int4Weight:
    """Random codes and zeros, scales of float16 as in most checkpoints."""
    (n_out, n_in), draw = shape, torch.Generator().manual_seed(seed)
    codes = torch.randint(256, (n_out, n_in // 2), generator=draw, dtype=torch.uint8)
    scales = 0.001 + 0.02 * torch.rand(n_out, n_in // group, generator=draw)
    zeros = torch.randint(17, scales.shape, generator=draw, dtype=torch.uint8)
    fields = {"codes": codes, "scales": scales.half().float(), "zeros": zeros, "order": None} | more
    return Int4Weight(**fields, dtype=dtype)


def an_fp8(
    shape: tuple[int, int], block: tuple[int, int], dtype: torch.dtype, *, seed: int = 0
) -> ByteWeight:
    """Random codes but NaN, scales of all of float32's bits."""
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(256, shape, generator=draw, dtype=torch.uint8)
    codes[codes & 127 == 127] = 0x7E
    n_blocks = [-(-n // of) for n, of in zip(shape, block, strict=True)]
    scales = 0.01 * torch.randn(n_blocks, generator=draw)
    return ByteWeight(codes.view(torch.float8_e4m3fn), scales, block, dtype)


def an_int8(
    shape: tuple[int, int], block: tuple[int, int], dtype: torch.dtype, *, seed: int = 0
) -> ByteWeight:
    """Codes of all sizes, -128 too, scales of all of float32's bits."""
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, shape, generator=draw, dtype=torch.int8)
    n_blocks = [-(-n // of) for n, of in zip(shape, block, strict=True)]
    return ByteWeight(codes, 0.001 * torch.randn(n_blocks, generator=draw), block, dtype)


def exact(weight: Int4Weight | ByteWeight) -> Tensor:
    """The values before they are rounded to the dtype."""
    return dataclasses.replace(weight, dtype=torch.float32).dense()


def product(
    x: Tensor, weight: Tensor | Quantized, *, bits: int = 16, order: int = 0, bias: Tensor | None = None
) -> Tensor:
    """x times a weight that is kept in so many bits, in float32: rounded to 16, other sums would look the same."""
    packed = cuda.pack(weight, bias)
    assert isinstance(packed, FragmentWeight)
    assert BITS[packed.code] == bits
    with emulated(order=order):
        return cuda.linear(x, packed, torch.float32)


@each_dtype
@pytest.mark.parametrize("group", [32, 64, 96, 128, 160, 0])
def test_int4_is_near_float64(dtype: torch.dtype, group: int) -> None:
    n_out, n_in = 130, 4 * group or 100  # 0: one group, of whatever size
    weight = an_int4((n_out, n_in), group or n_in, dtype, seed=group)
    x, bias = random(group % 50 + 3, n_in, dtype=dtype, seed=1), random(n_out, dtype=dtype, seed=2)
    assert_near(product(x, weight, bits=4, order=group, bias=bias), x, exact(weight), bias)


EIGHT = {"fp8": an_fp8, "int8": an_int8}


@each_dtype
@pytest.mark.parametrize("kind", EIGHT)
@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((140, 300), (128, 128)),
        ((200, 200), (64, 32)),
        ((30, 320), (7, 160)),
        ((129, 101), (1, 101)),
        ((40, 96), (40, 96)),
        ((20, 60), (512, 512)),
    ],
    ids=str,
)
def test_eight_bits_are_near_float64(
    dtype: torch.dtype, kind: str, shape: tuple[int, int], block: tuple[int, int]
) -> None:
    weight = EIGHT[kind](shape, block, dtype, seed=shape[0])
    x = random(shape[1] % 60 + 1, shape[1], dtype=dtype, seed=1)
    assert_near(product(x, weight, bits=8, order=shape[0] % 3), x, exact(weight), None)


@each_dtype
@pytest.mark.parametrize("bits", [4, 8])
def test_scales_of_all_sizes_and_of_zero(dtype: torch.dtype, bits: int) -> None:
    """Sums are brought from each scale to the next, up and down by powers; what has a scale of zero is nothing."""
    sizes = torch.tensor(
        [1.0, 0.0, 2.0**-40, 2.0**20, -(2.0**-3), 0.0, 0.0, -(2.0**15), 2.0**-60, 0.0, 2.0**-7, 3.0]
    )
    n_in = 32 * len(sizes)
    weight = an_int4((12, n_in), 32, dtype) if bits == 4 else an_fp8((12, n_in), (1, 32), dtype)
    scales = torch.stack([sizes.roll(i) for i in range(12)])  # any of them first, and last
    weight = dataclasses.replace(weight, scales=scales)
    x = random(5, n_in, dtype=dtype)
    assert_near(product(x, weight, bits=bits), x, exact(weight), None)


@each_dtype
def test_every_int4_value_comes_out_to_the_bit(dtype: torch.dtype) -> None:
    """All codes, zeros and kinds of scales: rows of one 1 make a product the weight's value."""
    both = torch.arange(16, dtype=torch.uint8)
    scales = torch.cat(
        (
            torch.tensor([1.0, 0.1, 2.0**-14, 2.0**-17, -0.3, 700.0]).half().float(),
            torch.tensor([1 + 2.0**-16]),
            torch.tensor([0.1, 0.0123]).bfloat16().float(),
            (0.02 * torch.rand(8, generator=torch.Generator().manual_seed(1))).half().float(),
        )
    )
    zeros = torch.arange(17, dtype=torch.uint8).repeat_interleave(len(scales))[:, None]
    codes = torch.cat((both, both.flip(0)))[None].expand(
        len(zeros), -1
    )  # [17 * n_scales, 32]: pairs of all kinds
    weight = Int4Weight(codes, scales.repeat(17)[:, None].clone(), zeros, None, dtype)
    found = product(torch.eye(64, dtype=dtype), weight, bits=4)
    assert torch.equal(found, exact(weight).t())


@each_dtype
def test_every_fp8_value_comes_out_to_the_bit(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes[codes & 127 == 127] = 0
    scales = torch.tensor([1.0, 0.0037281, 1e-7, -3.3, 255.9, 1e9])
    weight = ByteWeight(
        codes.view(4, 64).repeat(len(scales), 1).view(torch.float8_e4m3fn), scales[:, None], (4, 64), dtype
    )
    found = product(torch.eye(64, dtype=dtype), weight, bits=8)
    assert torch.equal(found, exact(weight).t())


@each_dtype
def test_every_int8_value_comes_out_to_the_bit(dtype: torch.dtype) -> None:
    codes = torch.arange(-128, 128).to(torch.int8)
    scales = torch.tensor([1.0, 0.0037281, 1e-7, -3.3, 255.9, 1e9])
    weight = ByteWeight(codes.view(4, 64).repeat(len(scales), 1), scales[:, None], (4, 64), dtype)
    found = product(torch.eye(64, dtype=dtype), weight, bits=8)
    assert torch.equal(found, exact(weight).t())


@each_dtype
@pytest.mark.parametrize("kind", ["int4", *EIGHT])
def test_a_row_has_the_same_bits_at_every_width(dtype: torch.dtype, kind: str) -> None:
    shape = (70, 704)
    bits = 4 if kind == "int4" else 8
    weight = an_int4(shape, 352, dtype) if bits == 4 else EIGHT[kind](shape, (32, 64), dtype)
    assert cuda.n_splits(*shape, bits) == 2
    x = random(67, shape[1], dtype=dtype, seed=2)
    whole = product(x, weight, bits=bits)
    for width in WIDTHS:
        for first in {0, len(x) - width}:
            found = product(x[first : first + width], weight, bits=bits)
            assert same(found, whole[first : first + width]), (width, first)


@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_that_run_all_splits_add_them_in_the_same_order(
    bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Splits begin within groups."""
    shape, dtype = (20, 960), torch.bfloat16
    weight = an_int4(shape, 192, dtype) if bits == 4 else an_fp8(shape, (20, 192), dtype)
    assert cuda.n_splits(*shape, bits) == 3
    x = random(5, shape[1], dtype=dtype)
    spread = product(x, weight, bits=bits)
    monkeypatch.setattr(cuda, "SPREAD_CODES_BELOW", 0)
    assert same(product(x, weight, bits=bits), spread)


@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_of_more_rows_add_them_in_the_same_order(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, dtype = (150, 640), torch.bfloat16
    weight = an_int4(shape, 32, dtype) if bits == 4 else an_fp8(shape, (75, 32), dtype)
    x = random(200, shape[1], dtype=dtype)
    meant = product(x, weight, bits=bits)
    monkeypatch.setattr(cuda, "WIDEST_FROM", 1)
    for n in (200, 130, 66):
        assert same(product(x[:n], weight, bits=bits), meant[:n])


@each_dtype
def test_columns_in_another_order_meet_their_inputs(dtype: torch.dtype) -> None:
    order = torch.randperm(128, generator=torch.Generator().manual_seed(3))
    weight, x = an_int4((30, 128), 32, dtype, order=order), random(5, 128, dtype=dtype)
    found = product(x, weight, bits=4)
    in_columns = dataclasses.replace(weight, order=None)
    assert same(found, product(x[:, order], in_columns, bits=4))
    assert_near(found, x, exact(weight), None)


def test_what_the_kernel_cannot_scale_is_widened_before() -> None:
    dtype, shape = torch.bfloat16, (20, 96)
    int4, fp8 = an_int4(shape, 32, dtype), an_fp8(shape, (20, 32), dtype)
    fine = torch.full_like(int4.scales, 0.1)  # a float32 of 24 bits: there is no room for a zero
    nan = fp8.codes.view(torch.uint8).clone()
    nan[3, 5] = 0xFF
    no_scale = fp8.scales.clone()
    no_scale[0, 1] = float("nan")
    many: list[Quantized] = [
        an_int4(shape, 48, dtype),
        dataclasses.replace(int4, scales=fine),
        dataclasses.replace(int4, scales=torch.full_like(fine, 1 + 2.0**-19)),
        dataclasses.replace(int4, scales=int4.scales * float("inf")),
        dataclasses.replace(int4, scales=torch.full_like(fine, 2.0**-61)),
        an_fp8(shape, (20, 48), dtype),
        dataclasses.replace(fp8, codes=nan.view(torch.float8_e4m3fn)),
        dataclasses.replace(fp8, scales=fp8.scales * 2.0**70),
        dataclasses.replace(fp8, scales=no_scale),
    ]
    for weight in many:
        x = random(3, shape[1], dtype=weight.dtype)
        assert same(product(x, weight), product(x, weight.dense()))
    permuted = dataclasses.replace(an_int4(shape, 48, dtype), order=torch.arange(96).flip(0))
    x = random(3, shape[1], dtype=dtype)
    assert same(product(x, permuted), product(x, permuted.dense()))


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(TypeError, match="float32"):
        cuda.pack(an_int4((20, 64), 32, torch.float32))
