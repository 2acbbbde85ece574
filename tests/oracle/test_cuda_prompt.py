"""The products of warpgroups for many rows, in the emulator: every result has the bits that its row has alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipstream.kernels.matmul import cuda, prompt
from slipstream.kernels.matmul.block_numbers import HELD
from slipstream.kernels.matmul.blocks import BlockWeight
from slipstream.kernels.matmul.op import Packed
from slipstream.kernels.matmul.proof import narrow
from slipstream.kernels.proof.inputs import Inputs
from tests.block_data import block_bytes
from tests.emulator import emulated, needs_compiler, same
from tests.oracle.test_cuda_quantized import an_int8
from tests.oracle.test_kernels import random

pytestmark = needs_compiler
ABOUT = ("kernels/cuda/include/*.cuh",)
each_dtype = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:]
)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of the launches that went to the kernel of this file, in a process whose device has it."""
    rows: list[int] = []
    product = prompt.product

    def counted(x: Tensor, *arguments: object) -> None:
        rows.append(x.shape[0])
        product(x, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(prompt, "has_warpgroups", lambda device: True)
    monkeypatch.setattr(prompt, "product", counted)
    return rows


def assert_bits_of_few_rows(x: Tensor, packed: Packed, out_dtype: torch.dtype, order: int = 0) -> None:
    """Against kernels of up to 64 rows."""
    with emulated(order=order):
        whole = cuda.linear(x, packed, out_dtype)
        for first in range(0, x.shape[0], 64):
            alone = cuda.linear(x[first : first + 64], packed, out_dtype)
            assert same(whole[first : first + 64], alone), first


@pytest.mark.sampled(keep=2, together=True)
@pytest.mark.parametrize(
    ("dtype", "order", "n_rows", "n_out", "n_in"),
    [
        (torch.float16, 0, 131, 257, 104),
        (torch.bfloat16, 1, 200, 129, 1100),  # four splits, and more steps than stages
        (torch.bfloat16, 2, 1700, 257, 64),  # more than eight blocks across
        (torch.bfloat16, 3, 257, 384, 520),
        (torch.float16, 1, 70, 512, 64),
    ],
)
def test_plain_weights(
    dtype: torch.dtype, order: int, n_rows: int, n_out: int, n_in: int, hopper: list[int]
) -> None:
    """Odd numbers of outputs, rows that fill no block, more places than blocks."""
    packed = cuda.pack(random(n_out, n_in, dtype=dtype) / n_in**0.5, random(n_out, dtype=dtype, seed=1))
    x = random(n_rows, n_in, dtype=dtype, seed=2)
    assert_bits_of_few_rows(x, packed, torch.float32, order)
    with emulated(order=order):
        assert same(cuda.linear(x, packed, dtype), cuda.linear(x, packed, torch.float32).to(dtype))
    assert hopper == [n_rows] * 3


@pytest.mark.sampled(keep=2, together=True)
@each_dtype
@pytest.mark.parametrize("kind", ["int4", "fp8"])
@pytest.mark.parametrize("group", [32, 64, 96, 128])
@pytest.mark.parametrize("order", [1, 2])
def test_codes(dtype: torch.dtype, kind: str, group: int, order: int, hopper: list[int]) -> None:
    weight = narrow(kind, (260, 6 * group), group, Inputs(torch.device("cpu"), dtype, seed=3))
    packed = cuda.pack(weight)
    assert packed.words is not None
    x = random(300, 6 * group, dtype=dtype, seed=2)
    assert_bits_of_few_rows(x, packed, torch.float32, order)
    assert hopper == [300]


@pytest.mark.sampled(keep=2, together=True)
@each_dtype
@pytest.mark.parametrize("group", [32, 128])
def test_int8(dtype: torch.dtype, group: int, hopper: list[int]) -> None:
    weight = an_int8((260, 6 * group), (1, group), dtype, seed=3)
    x = random(300, 6 * group, dtype=dtype, seed=2)
    assert_bits_of_few_rows(x, cuda.pack(weight), torch.float32, order=group % 5)
    assert hopper == [300]


@pytest.mark.sampled(keep=2, together=True)
@pytest.mark.parametrize("kind", HELD)
def test_blocks(kind: str, hopper: list[int]) -> None:
    weight = BlockWeight(block_bytes(kind, 260, 512), kind, None, torch.bfloat16)
    assert_bits_of_few_rows(random(300, 512, dtype=torch.bfloat16, seed=2), cuda.pack(weight), torch.float32)
    assert hopper == [300]


def test_a_row_with_a_nan_leaves_the_others_alone(hopper: list[int]) -> None:
    packed = cuda.pack(random(384, 128, dtype=torch.bfloat16))
    x = random(130, 128, dtype=torch.bfloat16, seed=2)
    with emulated():
        clean = cuda.linear(x, packed)
        x[5, 7], x[129, 0] = float("nan"), float("inf")
        spoilt = cuda.linear(x, packed)
    others = torch.ones(130, dtype=torch.bool)
    others[[5, 129]] = False
    assert same(spoilt[others], clean[others])
    assert spoilt[5].isnan().all()
    assert not spoilt[129].isfinite().any()
    assert hopper == [130, 130]


def test_few_rows_and_few_outputs_stay_where_they_are(hopper: list[int]) -> None:
    """Emulated launches have three multiprocessors."""
    x, narrow_weight = random(300, 128, dtype=torch.bfloat16), random(128, 128, dtype=torch.bfloat16)
    with emulated():
        cuda.linear(x[:64], cuda.pack(random(640, 128, dtype=torch.bfloat16)))
        cuda.linear(x[:128], cuda.pack(narrow_weight))
        assert hopper == []
        cuda.linear(x, cuda.pack(narrow_weight))
    assert hopper == [300]


@pytest.mark.parametrize(
    ("n_rows", "n_tiles", "width"),
    [
        (2048, 224, 192),  # gate_up: 2,464 places in 19 turns
        (2048, 32, 192),  # o: 352 in 3, or 512 in 4, of two thirds of the rows
        (512, 32, 128),  # 128 in one turn; 96 would leave more blocks idle
        (1024, 48, 128),
    ],
)
def test_rows_of_a_block(n_rows: int, n_tiles: int, width: int) -> None:
    assert prompt._width(n_rows, n_tiles, 132) == width
