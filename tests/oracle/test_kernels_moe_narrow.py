"""Experts of few bits on CPUs: one call for all of them has the bits of a product for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from slipstream import kernels
from slipstream.kernels.gated.activation import SILU, Activation
from slipstream.kernels.matmul import narrow
from slipstream.kernels.matmul.blocks import BlockWeight
from slipstream.kernels.matmul.formats import OF_PAIRS
from slipstream.kernels.matmul.narrow import NarrowStack
from slipstream.kernels.matmul.quantized import Quantized, joined
from slipstream.kernels.moe import cpu, panels
from slipstream.kernels.moe.op import ExpertBiases, NarrowMatrices, Routed
from slipstream.kernels.moe.panels import GatheringExperts, PanelExperts
from tests.block_data import block_bytes
from tests.oracle.packed_products import WAYS, take
from tests.oracle.test_kernels_scaled import fp8, int4, int8

pytestmark = pytest.mark.skipif(narrow.refusal() is not None, reason=narrow.refusal() or "")
N_EXPERTS, TOP_K, D_MODEL, D_INNER = 5, 2, 256, 512
WIDTHS = (1, 2, 3, 8, 9, 40)


def blocky(kind: str, n_out: int, n_in: int, seed: int) -> BlockWeight:
    return BlockWeight(block_bytes(kind, n_out, n_in, seed), kind, None, torch.bfloat16)


def of_blocks(kind: str, down: str) -> tuple[list[Quantized], list[Quantized]]:
    """As GGUF files have them: gates and ups apart."""
    both = [joined([blocky(kind, D_INNER, D_MODEL, 2 * i + j) for j in range(2)]) for i in range(N_EXPERTS)]
    downs: list[Quantized] = [blocky(down, D_MODEL, D_INNER, 9 + i) for i in range(N_EXPERTS)]
    return [one for one in both if not isinstance(one, Tensor)], downs


def with_one_that_has_no_record() -> tuple[list[Quantized], list[Quantized]]:
    """One expert's blocks are of a type that is widened, another has a code that no record holds."""
    gate_ups, downs = of_blocks("Q8_0", "Q8_0")
    downs[1] = blocky("IQ3_S", D_MODEL, D_INNER, 1)
    for i in (2, 3):
        part = blocky("Q8_0", D_MODEL, D_INNER, i)
        part.data[0, 2] = 128
        downs[i] = part
    return gate_ups, downs


def of_codes() -> tuple[list[Quantized], list[Quantized]]:
    gate_ups: list[Quantized] = [int4(D_MODEL, 128, n_out=2 * D_INNER) for _ in range(N_EXPERTS)]
    return gate_ups, [fp8(D_INNER, (128, 128), n_out=D_MODEL) for _ in range(N_EXPERTS)]


CASES = {
    "Q4_K and Q6_K": (of_blocks("Q4_K", "Q6_K"), SILU),
    "MXFP4, clamped": (of_blocks("MXFP4", "MXFP4"), Activation("clamped", 7.0, 1.702)),
    "int4 and fp8": (of_codes(), SILU),
    "some widened": (with_one_that_has_no_record(), SILU),
}


@pytest.fixture(params=[1, 2], ids=["one-thread", "two-threads"])
def _n_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(narrow, "SERIAL_BELOW", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def biases() -> ExpertBiases:
    g = torch.Generator().manual_seed(3)
    sizes = 2 * D_INNER, D_MODEL
    return ExpertBiases(*(torch.randn(N_EXPERTS, n, generator=g).to(torch.bfloat16) for n in sizes))


def routed(n_rows: int) -> Routed:
    """No row asks for expert 4."""
    g = torch.Generator().manual_seed(n_rows)
    ids = torch.rand(n_rows, N_EXPERTS - 1, generator=g).argsort(1)[:, :TOP_K].sort(1).values
    return Routed(ids.to(torch.int32).contiguous(), torch.rand(n_rows, TOP_K, generator=g))


@pytest.mark.sampled(keep=8)
@pytest.mark.usefixtures("_n_threads")
@pytest.mark.parametrize(
    ("name", "way"), [*((name, way) for way in WAYS for name in CASES), ("int4 and fp8", OF_PAIRS)]
)
def test_one_call_has_the_bits_of_a_product_each(
    name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(way, monkeypatch)
    kernels.select("cpu", torch.bfloat16)
    (gate_ups, downs), activation = CASES[name]
    packed, alone = packed_both(gate_ups, downs, activation)
    assert isinstance(packed, PanelExperts)
    assert isinstance(packed.gate_up, NarrowStack)
    assert packed.n_experts == N_EXPERTS
    x = torch.randn(max(WIDTHS), D_MODEL, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    whole = routed(max(WIDTHS))
    found = panels.experts(x, whole, packed)
    assert torch.equal(found, cpu.experts(x, whole, alone))
    for n in WIDTHS:
        some = Routed(whole.expert_ids[-n:].contiguous(), whole.weights[-n:].contiguous())
        assert torch.equal(panels.experts(x[-n:].contiguous(), some, packed), found[-n:]), n


def packed_both(
    gate_ups: list[Quantized], downs: list[Quantized], activation: Activation
) -> tuple[panels.PackedExperts, panels.PackedExperts]:
    matrices = NarrowMatrices(gate_ups), NarrowMatrices(downs)
    return tuple(one.pack_experts(*matrices, biases(), activation) for one in (panels, cpu))  # type: ignore[return-value]


def test_experts_with_orders_of_their_own_are_multiplied_one_by_one() -> None:
    kernels.select("cpu", torch.bfloat16)
    (gate_ups, downs), _ = CASES["int4 and fp8"]
    orders = [torch.randperm(D_MODEL, generator=torch.Generator().manual_seed(i)) for i in range(N_EXPERTS)]
    turned = [int4(D_MODEL, 128, n_out=2 * D_INNER, order=order) for order in orders]
    packed, alone = packed_both(list(turned), downs, SILU)
    assert isinstance(packed, GatheringExperts)
    x, rows = torch.randn(3, D_MODEL).to(torch.bfloat16), routed(3)
    assert torch.equal(panels.experts(x, rows, packed), cpu.experts(x, rows, alone))
    assert not torch.equal(
        panels.experts(x, rows, packed), panels.experts(x, rows, packed_both(gate_ups, downs, SILU)[0])
    )


def test_experts_that_are_not_multiplied_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """int8 is never multiplied by pairs."""
    take(OF_PAIRS, monkeypatch)
    kernels.select("cpu", torch.bfloat16)
    (gate_ups, downs), _ = CASES["int4 and fp8"]
    mixed: list[Quantized] = [*downs[:3], *(int8(D_INNER, 128, n_out=D_MODEL) for _ in downs[3:])]
    packed, alone = packed_both(gate_ups, mixed, SILU)
    assert isinstance(packed, GatheringExperts)
    x, rows = torch.randn(9, D_MODEL).to(torch.bfloat16), routed(9)
    assert torch.equal(panels.experts(x, rows, packed), cpu.experts(x, rows, alone))
