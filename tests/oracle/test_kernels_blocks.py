"""Products with GGUF's blocks on CPUs: near float64, and in every bit what `kernels/matmul/op.py` says."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.engine.checkpoint.layouts import packed_bytes
from slipstream.kernels.cpu_features import missing
from slipstream.kernels.matmul import code_floats, narrow, panels
from slipstream.kernels.matmul.block_numbers import HELD, held_bytes
from slipstream.kernels.matmul.blocks import BlockWeight, block_sizes
from slipstream.kernels.matmul.formats import FORMATS, OF_A8, OF_BYTES, OF_FLOATS
from slipstream.kernels.matmul.narrow import NarrowWeight
from slipstream.kernels.matmul.panel_stack import PanelStack
from slipstream.kernels.matmul.quantized import JoinedWeight, Quantized, joined, widened
from tests.block_data import Numbers, block_bytes, numbers
from tests.oracle.packed_products import OFF, WAYS, added, inputs, one_group, read, sum_of_inputs, take
from tests.process import ROOT

ABOUT = ("kernels/compiled.py", "kernels/cpu_features.py")
pytestmark = pytest.mark.skipif(narrow.refusal() is not None, reason=narrow.refusal() or "")
N_OUT = 100  # a panel and a part of one
WIDTHS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 33, 128)
CASES = [(kind, torch.bfloat16, way) for way in WAYS for kind in FORMATS]
CASES += [(kind, torch.float32, OF_FLOATS) for kind in ("Q4_1", "Q8_0", "Q4_K", "Q6_K")]


@pytest.fixture(params=[1, 2], ids=["one-thread", "two-threads"])
def n_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(narrow, "SERIAL_BELOW", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def blocky(
    kind: str, n_out: int, n_in: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> BlockWeight:
    return BlockWeight(block_bytes(kind, n_out, n_in, seed), kind, None, dtype)


def size(kind: str) -> int:
    """Inputs: an odd number of blocks, and of chunks of 32 that are taken at once."""
    return 3 * 256 if block_sizes(kind)[0] == 256 else 19 * 32


def plain_product(x: Tensor, held: Numbers, bias: Tensor, way: str) -> Any:
    """One row times 16 outputs, from the description in `op.py`. x: [n_in]; bias: [16] float32."""
    n_in, n_blocks, n_groups = len(x), held.halves.shape[1], held.factors.shape[1]
    group, per_block = n_in // n_groups, n_groups // n_blocks
    wide, (multiplied, steps) = x.float().numpy(), read(x, way)
    total = bias.numpy()
    for block in range(n_blocks):
        scaled, minima = np.zeros(16, np.float32), np.zeros(16, np.float32)
        for g in range(block * per_block, (block + 1) * per_block):
            span = slice(g * group, (g + 1) * group)
            sums = one_group(multiplied[span], held.values[:, span], way) * steps[span.start // 32]
            scaled = added(scaled, held.factors[:, g], sums)
            if held.second_factors is not None:
                minima = added(minima, held.second_factors[:, g], sum_of_inputs(wide[span]))
        total = added(total, held.halves[:, block], scaled)
        if held.seconds is not None:
            total = added(total, held.seconds[:, block], minima)
    return total


@pytest.mark.sampled(keep=6)
@pytest.mark.parametrize(("kind", "dtype", "way"), CASES, ids=lambda case: str(case).removeprefix("torch."))
def test_a_product_is_what_its_definition_says(
    kind: str, dtype: torch.dtype, way: str, n_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(way, monkeypatch)
    weight = blocky(kind, N_OUT, size(kind), dtype)
    bias = torch.linspace(-1, 1, N_OUT).to(dtype)
    packed = panels.pack(weight, bias)
    assert isinstance(packed, NarrowWeight)
    assert packed.way == way
    x = inputs(max(WIDTHS), size(kind), dtype)
    found = panels.linear(x, packed, torch.float32)  # [n_rows, N_OUT]
    exact = x.double() @ replace(weight, dtype=torch.float64).dense().T + bias.double()
    assert float((found - exact).abs().max()) < OFF.get(way, 2e-6) * float(exact.abs().max())
    for width in WIDTHS:
        assert torch.equal(panels.linear(x[:width], packed, torch.float32), found[:width]), width
        assert torch.equal(panels.linear(x[-width:], packed, torch.float32), found[-width:]), width
    assert torch.equal(panels.linear(x, packed), found.to(dtype))
    held = numbers(kind, weight.data, FORMATS[kind].group)
    for row, first in ((0, 0), (12, 64), (127, 84)):
        some = Numbers(*(None if part is None else part[first : first + 16] for part in held))
        expected = plain_product(x[row], some, bias[first : first + 16].float(), way)
        assert found[row, first : first + 16].numpy().tobytes() == expected.tobytes(), (row, first)


def dense(n_out: int, n_in: int) -> Tensor:
    return torch.randn(n_out, n_in, generator=torch.Generator().manual_seed(n_out)).to(torch.bfloat16)


TURNED = torch.randperm(512, generator=torch.Generator().manual_seed(2))
JOINED: dict[str, list[Tensor | Quantized]] = {
    "kinds differ": [blocky("Q4_K", 70, 512), blocky("Q6_K", 130, 512), blocky("Q8_0", 3, 512)],
    "dense beside": [dense(65, 512), blocky("Q4_0", 64, 512)],
    "no records": [blocky("Q4_K", 64, 512), blocky("IQ2_S", 70, 512)],
    "one order": [replace(blocky(kind, 70, 512), order=TURNED) for kind in ("Q4_K", "Q6_K")],
    "one order, no records": [replace(blocky(kind, 70, 512), order=TURNED) for kind in ("Q4_K", "IQ2_S")],
    "orders differ": [replace(blocky("Q4_K", 70, 512), order=TURNED), blocky("Q6_K", 70, 512)],
}


UNLIKE = {
    ("one order, no records", "IQ2_S"),  # its columns come in another order, and so do its sums
    ("orders differ", "Q4_K"),  # no inputs are gathered for one part, so it is widened
}


@pytest.mark.parametrize("case", JOINED)
@pytest.mark.parametrize("way", WAYS)
def test_joined_parts_have_the_bits_they_have_alone(
    case: str, way: str, n_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(way, monkeypatch)
    parts = JOINED[case]
    n_outs = [part.shape[0] for part in parts]
    bias = torch.linspace(-1, 1, sum(n_outs)).to(torch.bfloat16)
    matrix = joined(parts)
    assert isinstance(matrix, JoinedWeight)
    packed = panels.pack(matrix, bias)
    assert isinstance(packed, NarrowWeight)
    assert (packed.in_features, packed.out_features) == (512, sum(n_outs))
    for width in (1, 3, 9):
        x = inputs(width, 512, torch.bfloat16)
        found = panels.linear(x, packed, torch.float32)
        exact = x.double() @ widened(matrix).double().T + bias.double()
        assert float((found - exact).abs().max()) < 1e-2 * float(exact.abs().max())
        for part, ends, mine in zip(parts, bias.split(n_outs), found.split(n_outs, 1), strict=True):
            alone = panels.linear(x, panels.pack(part, ends), torch.float32)
            assert torch.equal(alone, mine) or (case, getattr(part, "kind", "")) in UNLIKE


def test_columns_in_another_order() -> None:
    weight = blocky("Q4_K", N_OUT, 512)
    turned = panels.pack(replace(weight, order=TURNED))
    x = inputs(3, 512, torch.bfloat16)
    assert isinstance(turned, NarrowWeight)
    expected = panels.linear(x[:, TURNED].contiguous(), panels.pack(weight))
    assert torch.equal(panels.linear(x, turned), expected)


def test_no_rows_and_rows_apart_in_memory() -> None:
    packed = panels.pack(blocky("Q4_0", N_OUT, 64))
    x = inputs(4, 128, torch.bfloat16)[:, ::2]  # [4, 64]
    assert torch.equal(panels.linear(x, packed), panels.linear(x.contiguous(), packed))
    assert panels.linear(x[:0], packed).shape == (0, N_OUT)


@pytest.mark.parametrize("kind", ["Q6_K", "Q8_0"])  # without minima, which would be NaN as well
@pytest.mark.parametrize("way", WAYS)
def test_nan_reaches_its_row_alone(way: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """AMD's CPUs multiply Q6_K in whole units of bfloat16 where others multiply bytes."""
    take(way, monkeypatch)
    packed = panels.pack(blocky(kind, N_OUT, 512))
    x = inputs(9, 512, torch.bfloat16)
    clean = panels.linear(x, packed)
    x[4, 300] = torch.nan
    found = panels.linear(x, packed)
    assert bool(found[4].isnan().all())
    assert bool(panels.linear(x[4:5], packed).isnan().all())
    others = torch.arange(9) != 4
    assert torch.equal(found[others], clean[others])
    assert torch.equal(panels.linear(x[:1], packed), clean[:1])  # nothing is left over from the call before


@pytest.mark.parametrize("way", [OF_BYTES, OF_A8])
def test_of_infinite_inputs_no_number_is_made(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone and beside others, though what multiplies them differs: as bytes they would be anything."""
    take(way, monkeypatch)
    packed, x = panels.pack(blocky("Q4_0", N_OUT, 512)), inputs(9, 512, torch.bfloat16)
    x[4, 300] = torch.inf
    assert bool(panels.linear(x, packed)[4].isnan().all())
    assert bool(panels.linear(x[4:5], packed).isnan().all())


def changed(kind: str, byte: int, value: int) -> BlockWeight:
    weight = blocky(kind, 70, 512)
    weight.data[69, byte] = value
    return weight


@pytest.mark.parametrize(
    "weight",
    [
        changed("MXFP4", 0, 0),
        changed("MXFP4", 17, 255),
        blocky("IQ3_S", 70, 512),
    ],
    ids=["least exponent", "greatest exponent", "no records"],
)
def test_what_no_record_can_hold_is_widened(weight: BlockWeight) -> None:
    packed = panels.pack(weight)
    assert isinstance(packed, PanelStack)
    x = inputs(2, 512, torch.bfloat16)
    expected = panels.linear(x, panels.pack(weight.dense()))
    assert panels.linear(x, packed).isnan().equal(expected.isnan())
    assert torch.equal(panels.linear(x, packed).nan_to_num(), expected.nan_to_num())


def test_a_cpu_without_the_instructions_widens_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert panels.note(cpu, torch.bfloat16) is None
    monkeypatch.setattr(code_floats, "FEATURES", ("avx2", "no-such-feature"))
    assert isinstance(panels.pack(blocky("Q4_K", 70, 512)), PanelStack)
    assert packed_bytes(blocky("Q4_K", 70, 512), cpu) == 2 * 70 * 512
    assert "this CPU has no no-such-feature" in (panels.note(cpu, torch.bfloat16) or "")


AVX2 = "+sse4.2,+ssse3,+popcnt,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+movbe"
AVX512 = "+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512cd"
VNNI = "+avx512vbmi,+avx512vnni"
OTHER_CPU = """
import sys
import torch
from slipstream.kernels.matmul import narrow, panels, unpack
from slipstream.kernels.matmul.quantized import round_inputs
from tests.oracle.test_kernels_blocks import blocky, inputs, size
most_rows, way, *kinds = sys.argv[1:]
round_inputs(way == "a8")
assert (unpack.MOST_ROWS, narrow.ways()[0]) == (int(most_rows), way)
for kind in kinds:
    weight = blocky(kind, 100, size(kind))
    packed = panels.pack(weight)
    assert isinstance(packed, narrow.NarrowWeight)
    x = inputs(9, size(kind), torch.bfloat16)
    found = panels.linear(x, packed, torch.float32)
    assert all(torch.equal(panels.linear(x[i:], packed, torch.float32), found[i:]) for i in range(9)), kind
    sys.stdout.buffer.write(found.numpy().tobytes())
"""


@pytest.mark.sampled(keep=0, together=True)
@pytest.mark.parametrize(
    ("name", "features", "most_rows", "way", "kinds"),
    [
        ("haswell", AVX2, 4, OF_BYTES, ["MXFP4", "Q5_K"]),
        ("haswell", AVX2, 4, OF_A8, ["Q6_K", "IQ4_NL"]),
        ("alderlake", f"{AVX2},+avxvnni", 4, OF_BYTES, ["IQ4_NL", "Q5_K"]),
        ("alderlake", f"{AVX2},+avxvnni", 4, OF_A8, ["Q6_K", "Q8_0"]),
        ("skylake-avx512", f"{AVX2},{AVX512}", 8, OF_BYTES, ["Q3_K", "Q4_1"]),
        ("icelake-server", f"{AVX2},{AVX512},{VNNI}", 8, OF_BYTES, ["Q6_K", "Q8_0"]),
        ("znver4", f"{AVX2},{AVX512},{VNNI},+avx512bf16", 8, OF_BYTES, ["Q6_K", "Q4_0"]),
    ],
)
def test_other_cpus_have_the_bits_of_their_kind_of_products(
    name: str, features: str, most_rows: int, way: str, kinds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled for one in another process: it could not run an instruction that it asks this one for by name."""
    take(way, monkeypatch)
    if missing([one.removeprefix("+") for one in features.split(",")]):
        pytest.skip("this CPU cannot run it")
    environ = {**os.environ, "NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features}
    program = [sys.executable, "-c", OTHER_CPU, str(most_rows), way, *kinds]
    made = subprocess.run(program, cwd=ROOT, env=environ, check=True, stdout=subprocess.PIPE).stdout
    for i, kind in enumerate(kinds):
        packed = panels.pack(blocky(kind, N_OUT, size(kind)))
        expected = panels.linear(inputs(9, size(kind), torch.bfloat16), packed, torch.float32).numpy()
        # All have as many outputs and rows.
        assert made[i * expected.nbytes : (i + 1) * expected.nbytes] == expected.tobytes(), kind
    assert len(made) == len(kinds) * expected.nbytes


@pytest.mark.parametrize("way", [OF_BYTES, OF_A8])
@pytest.mark.parametrize("n_rows", [1, 9])
def test_the_least_code_of_eight_bits_has_a_byte(
    n_rows: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """-128, which no file of llama.cpp's has."""
    take(way, monkeypatch)
    weight, x = changed("Q8_0", 2 + 31, 128), inputs(n_rows, 512, torch.bfloat16)
    packed = panels.pack(weight)
    assert isinstance(packed, NarrowWeight)
    exact = x.double() @ replace(weight, dtype=torch.float64).dense().T
    found = panels.linear(x, packed, torch.float32)
    assert float((found - exact).abs().max()) < OFF[way] * float(exact.abs().max())


@pytest.mark.parametrize(("way", "off"), [(OF_BYTES, 2e-6), (OF_A8, 4e-3)])  # half a step of 127
def test_the_largest_numbers_fit_their_bytes(way: str, off: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ones in the mantissa, largest codes, both signs: what float32 does not hold is rounded, nothing runs over."""
    take(way, monkeypatch)
    weight = blocky("Q8_0", 64, 512)
    weight.data.unflatten(1, (-1, 34))[..., 2:] = torch.tensor([128, 127], dtype=torch.uint8).repeat(16)
    packed = panels.pack(weight)
    assert isinstance(packed, NarrowWeight)
    values = replace(weight, dtype=torch.float64).dense()
    for x in (torch.full((9, 512), 1.9921875), torch.tensor([-1.984375, 1.9921875] * 256).repeat(9, 1)):
        found = panels.linear(x.to(torch.bfloat16), packed, torch.float32)
        exact = x.double() @ values.T
        assert float((found - exact).abs().max()) <= off * float(exact.abs().max())


@pytest.mark.parametrize("way", [OF_BYTES, OF_A8])
def test_tiny_and_huge_inputs_keep_their_size(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take(way, monkeypatch)
    weight = blocky("Q4_0", 64, 64)
    packed, plain = panels.pack(weight), inputs(9, 64, torch.bfloat16)
    ones = panels.linear(plain, packed, torch.float32)
    for power in (2.0**-60, 2.0**60):
        assert torch.equal(panels.linear(plain * power, packed, torch.float32), ones * power)
    assert not panels.linear(plain * 0, packed, torch.float32).any()
    assert not panels.linear(plain * 2.0**-130, packed, torch.float32).any()


@pytest.mark.sampled(keep=3)
@pytest.mark.parametrize("kind", ["IQ3_S", *FORMATS])
def test_a_plan_counts_the_bytes_that_are_kept(kind: str) -> None:
    n_in, n_bytes = 512, block_sizes(kind)[1]
    data = torch.empty(128, n_in // block_sizes(kind)[0] * n_bytes, dtype=torch.uint8, device="meta")
    outline = BlockWeight(data, kind, None, torch.bfloat16)
    packed = panels.pack(joined([blocky(kind, 128, n_in), dense(64, n_in)]))
    kept = packed.panels.nbytes if isinstance(packed, PanelStack) else sum(map(_bytes, _parts(packed)))
    beside = torch.empty(64, n_in, dtype=torch.bfloat16, device="meta")
    assert packed_bytes(joined([outline, beside]), torch.device("cpu")) == kept
    on_cuda = held_bytes(outline) if kind in HELD else 2 * 128 * n_in
    assert packed_bytes(joined([outline, beside]), torch.device("cuda")) == on_cuda + 2 * 64 * n_in


def _parts(packed: object) -> tuple[Tensor, ...]:
    assert isinstance(packed, NarrowWeight)
    return packed.parts


def _bytes(part: Tensor) -> int:
    return part.nbytes


def test_rows_of_another_kind_are_refused() -> None:
    packed = panels.pack(blocky("Q4_0", N_OUT, 64))
    with pytest.raises(ValueError, match=r"the weight torch.bfloat16 \[.., 64\]"):
        panels.linear(torch.zeros(1, 64), packed)
    with pytest.raises(ValueError, match=r"\[n_rows, 96\]"):
        panels.linear(torch.zeros(1, 96, dtype=torch.bfloat16), packed)
