"""Products with AWQ's, GPTQ's, fp8's and int8's codes on CPUs: near float64, and in every bit what `op.py` says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.engine.checkpoint.layouts import packed_bytes
from slipstream.kernels.matmul import narrow, panels
from slipstream.kernels.matmul.formats import LAYOUTS, OF_FLOATS, OF_PAIRS, OF_TILES
from slipstream.kernels.matmul.narrow import NarrowWeight
from slipstream.kernels.matmul.panel_stack import PanelStack
from slipstream.kernels.matmul.quantized import ByteWeight, Int4Weight, JoinedWeight, joined, widened
from slipstream.kernels.matmul.scaled import kind_of
from tests.oracle.packed_products import OFF, WAYS, added, inputs, one_group, read, sum_of_inputs, take

pytestmark = pytest.mark.skipif(narrow.refusal() is not None, reason=narrow.refusal() or "")
N_OUT = 100  # a panel and a part of one
WIDTHS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 33, 128)
Scaled = Int4Weight | ByteWeight


def int4(
    n_in: int,
    group: int,
    *,
    n_out: int = N_OUT,
    dtype: torch.dtype = torch.bfloat16,
    order: Tensor | None = None,
) -> Int4Weight:
    """Any codes; scales as AWQ writes them, in half precision; zeros of the whole range."""
    g = torch.Generator().manual_seed(n_in + group)
    codes = torch.randint(256, (n_out, n_in // 2), generator=g, dtype=torch.uint8)
    scales = (0.001 + 0.01 * torch.rand(n_out, n_in // group, generator=g)).half().float()
    zeros = torch.randint(17, scales.shape, generator=g, dtype=torch.uint8)
    return Int4Weight(codes, scales, zeros, order, dtype)


def fp8(
    n_in: int, block: tuple[int, int], *, n_out: int = N_OUT, dtype: torch.dtype = torch.bfloat16
) -> ByteWeight:
    """All codes but NaN, of either sign; scales in float32."""
    g = torch.Generator().manual_seed(n_in + block[1])
    codes = torch.randint(127, (n_out, n_in), generator=g) + 128 * torch.randint(
        2, (n_out, n_in), generator=g
    )
    scales = torch.rand(-(-n_out // block[0]), -(-n_in // block[1]), generator=g) / 100
    return ByteWeight(codes.to(torch.uint8).view(torch.float8_e4m3fn), scales, block, dtype)


def int8(n_in: int, n_scaled: int, *, n_out: int = N_OUT) -> ByteWeight:
    """All codes from -128 on."""
    g = torch.Generator().manual_seed(n_in + n_scaled)
    codes = torch.randint(-128, 128, (n_out, n_in), generator=g).to(torch.int8)
    scales = torch.rand(n_out, n_in // n_scaled, generator=g) / 100
    return ByteWeight(codes, scales, (1, n_scaled), torch.bfloat16)


WEIGHTS: dict[str, Scaled] = {
    "int4 by 128": int4(384, 128),
    "int4 by 64": int4(320, 64),
    "int4 by 32": int4(96, 32),
    "int4 by rows": int4(384, 384),
    "int4 float32": int4(256, 128, dtype=torch.float32),
    "fp8 by blocks": fp8(384, (64, 128)),
    "fp8 by rows": fp8(320, (1, 320)),
    "fp8 by matrix": fp8(96, (N_OUT, 96)),
    "fp8 a part of a block": fp8(320, (128, 256)),
    "int8 by rows": int8(384, 384),
    "int8 by 32": int8(96, 32),
    "fp8 float32": fp8(256, (128, 128), dtype=torch.float32),
}
CASES = [(name, way) for way in WAYS for name in WEIGHTS]
CASES += [(name, way) for way in (OF_TILES, OF_PAIRS) for name in WEIGHTS if name.startswith("fp8")]


def plain_product(x: Tensor, weight: Scaled, first: int, bias: Tensor, way: str) -> Any:
    """One row times 16 outputs, from the description in `op.py`. x: [n_in]; bias: [16] float32."""
    multiplied, steps = read(x, way)
    n_in, outputs, block = len(x), slice(first, first + 16), LAYOUTS[kind_of(weight) or ""].block
    if isinstance(weight, Int4Weight):
        ones = replace(weight, scales=torch.ones_like(weight.scales), zeros=torch.zeros_like(weight.zeros))
        zeros = weight.zeros[outputs].repeat_interleave(n_in // weight.zeros.shape[1], 1)
        scales = weight.scales[outputs].repeat_interleave(n_in // weight.scales.shape[1], 1)
    else:
        ones, zeros = replace(weight, scales=torch.ones_like(weight.scales)), None
        scales = weight.by_output().scales[outputs].repeat_interleave(weight.block[1], 1)
    values, wide = ones.dense()[outputs].float().numpy(), x.float().numpy()  # [16, n_in], [n_in]
    total = bias.numpy()
    for begin in range(0, n_in, block):
        groups = [slice(i, i + 32) for i in range(begin, begin + block, 32)]
        sums = np.zeros(16, np.float32)
        for group in groups:
            sums = sums + one_group(multiplied[group], values[:, group], way) * steps[group.start // 32]
        if zeros is not None:
            of_inputs = sum_of_inputs(wide[groups[0]])
            for group in groups[1:]:
                of_inputs = of_inputs + sum_of_inputs(wide[group])
            sums = added(sums, -zeros[:, begin].float().numpy(), of_inputs)
        total = added(total, scales[:, begin].numpy(), sums)
    return total


@pytest.mark.sampled(keep=6)
@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize(("name", "way"), CASES)
def test_a_product_is_what_its_definition_says(
    name: str, way: str, n_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(narrow, "SERIAL_BELOW", 0)
    take(way, monkeypatch)
    weight = WEIGHTS[name]
    bias = torch.linspace(-1, 1, N_OUT).to(weight.dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    try:
        packed = panels.pack(weight, bias)
        assert isinstance(packed, NarrowWeight)
        x = inputs(max(WIDTHS), weight.shape[1], weight.dtype)
        found = panels.linear(x, packed, torch.float32)  # [n_rows, N_OUT]
        exact = x.double() @ replace(weight, dtype=torch.float64).dense().T + bias.double()
        assert float((found - exact).abs().max()) < OFF.get(way, 2e-6) * float(exact.abs().max())
        for width in WIDTHS:
            assert torch.equal(panels.linear(x[:width], packed, torch.float32), found[:width]), width
            assert torch.equal(panels.linear(x[-width:], packed, torch.float32), found[-width:]), width
        assert torch.equal(panels.linear(x, packed), found.to(weight.dtype))
    finally:
        torch.set_num_threads(before)
    for row, first in ((0, 0), (12, 64), (127, 84)):
        mine = narrow.part_way(packed.way, kind_of(weight) or "")
        expected = plain_product(x[row], weight, first, bias[first : first + 16].float(), mine or "")
        assert found[row, first : first + 16].numpy().tobytes() == expected.tobytes(), (row, first)
    n_bytes = sum(part.nbytes for part in packed.parts)
    assert n_bytes == packed_bytes(weight, torch.device("cpu"))


def test_columns_in_another_order() -> None:
    turned = torch.randperm(256, generator=torch.Generator().manual_seed(2))
    weight, x = int4(256, 64), inputs(3, 256, torch.bfloat16)
    packed = panels.pack(replace(weight, order=turned))
    assert isinstance(packed, NarrowWeight)
    expected = panels.linear(x[:, turned].contiguous(), panels.pack(weight))
    assert torch.equal(panels.linear(x, packed), expected)


def test_parts_of_other_kinds_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [int4(256, 128), fp8(256, (128, 128)), torch.randn(70, 256).to(torch.bfloat16)]
    packed = panels.pack(JoinedWeight(tuple(parts)))
    assert isinstance(packed, NarrowWeight)
    x = inputs(9, 256, torch.bfloat16)
    ways = [packed.way, OF_FLOATS]  # where fp8 has other products than int4, both have those that both have
    monkeypatch.setattr(narrow, "ways", lambda: ways)
    alone = torch.cat([panels.linear(x, panels.pack(part)) for part in parts], 1)
    assert torch.equal(panels.linear(x, packed), alone)
    alike = joined([int4(256, 128), int4(256, 128, n_out=64)])
    assert isinstance(alike, Int4Weight)
    both = torch.cat([panels.linear(x, panels.pack(int4(256, 128, n_out=n))) for n in (N_OUT, 64)], 1)
    assert torch.equal(panels.linear(x, panels.pack(alike)), both)


@pytest.mark.parametrize(
    "weight", [int4(48, 16), int4(80, 80), fp8(100, (128, 128))], ids=["16", "80", "100"]
)
def test_groups_that_no_block_fits_are_widened(weight: Scaled) -> None:
    packed, x = panels.pack(weight), inputs(2, weight.shape[1], torch.bfloat16)
    assert isinstance(packed, PanelStack)
    assert torch.equal(panels.linear(x, packed), panels.linear(x, panels.pack(widened(weight))))
    assert packed_bytes(weight, torch.device("cpu")) == 2 * N_OUT * weight.shape[1]


@pytest.mark.parametrize("way", [OF_PAIRS, OF_FLOATS])
def test_a_nan_stays_one(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take(way, monkeypatch)
    weight = fp8(128, (128, 128))
    weight.codes.view(torch.uint8)[99, 5] = 0xFF
    found = panels.linear(inputs(2, 128, torch.bfloat16), panels.pack(weight))
    assert found.isnan().sum(0).tolist() == [0] * 99 + [2]
