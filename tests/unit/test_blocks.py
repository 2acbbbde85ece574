"""Matrices in GGUF's block types: their values by gguf's own reading, joined without widening, without memory."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.engine.layers.moe import load_stack
from slipstream.kernels.matmul import blocks
from slipstream.kernels.matmul.blocks import BlockWeight, block_sizes
from slipstream.kernels.matmul.quantized import JoinedWeight, Quantized, joined, widened
from tests.block_data import block_bytes

ALL = sorted(kind.name for kind in gguf.quants._type_traits if gguf.GGML_QUANT_SIZES[kind][0] > 1)
N_IN = 512


def blocky(
    kind: str, n_out: int, order: Tensor | None = None, dtype: torch.dtype = torch.bfloat16
) -> BlockWeight:
    return BlockWeight(block_bytes(kind, n_out, N_IN), kind, order, dtype)


def read_by_gguf(weight: BlockWeight) -> Tensor:
    wide = gguf.quants.dequantize(weight.data.numpy(), gguf.GGMLQuantizationType[weight.kind])
    return torch.from_numpy(wide)  # [n_out, N_IN] float32


@pytest.mark.sampled(keep=12)
@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_those_that_gguf_reads(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = blocky(kind, 37, dtype=dtype)
    expected = read_by_gguf(weight).to(dtype)
    assert float(expected.abs().max()) > 0
    assert weight.shape == (37, N_IN)
    monkeypatch.setattr(blocks, "PIECE", 5 * N_IN)  # five outputs at a time
    assert torch.equal(weight.dense(), expected)
    chosen = torch.tensor([36, 0, 5, 5])
    assert torch.equal(weight.rows(chosen), expected[chosen])
    assert torch.equal(weight.rows(chosen.to(torch.int32)), expected[chosen])
    for beyond in (37, -1):
        with pytest.raises(IndexError):
            weight.rows(torch.tensor([3, beyond]))


def test_infinite_scales_stay_infinite() -> None:
    weight = blocky("MXFP4", 3, dtype=torch.float32)
    weight.data[0, 0], weight.data[1, 0], weight.data[2, 0] = 255, 0, 1
    with np.errstate(over="ignore"):
        expected = read_by_gguf(weight)
    assert not bool(expected.isfinite().all())
    assert torch.equal(weight.dense(), expected)


def test_columns_in_another_order() -> None:
    order = torch.randperm(N_IN, generator=torch.Generator().manual_seed(1))
    weight = blocky("Q4_K", 3, order)
    expected = torch.empty(3, N_IN, dtype=torch.bfloat16)
    expected[:, order] = blocky("Q4_K", 3).dense()
    assert torch.equal(weight.dense(), expected)
    assert torch.equal(weight.rows(torch.tensor([2])), expected[2:])
    assert weight.nbytes == 3 * N_IN // 256 * 144 + 8 * N_IN


def test_a_file_may_be_mapped_read_only() -> None:
    stored = block_bytes("Q8_0", 4, N_IN).numpy()
    stored.flags.writeable = False
    with pytest.warns(UserWarning, match="not writable"):
        mapped = torch.from_numpy(stored)
    weight = BlockWeight(mapped, "Q8_0", None, torch.float32)
    assert torch.equal(weight.dense(), read_by_gguf(weight))


TURNED = torch.arange(N_IN).flip(0)
DENSE = torch.ones(2, N_IN, dtype=torch.bfloat16)
JOINED: dict[str, tuple[list[Tensor | Quantized], int]] = {
    "one kind": ([blocky("Q4_K", 3), blocky("Q4_K", 70)], 2),
    "two kinds": ([blocky("Q4_K", 3), blocky("Q4_K", 5), blocky("Q6_K", 5)], 3),
    "dense too": ([DENSE, blocky("Q8_0", 5)], 2),
    "one order": ([blocky("Q4_K", 3, TURNED), blocky("Q4_K", 2, TURNED.clone())], 2),
    "orders differ": ([blocky("Q4_K", 3, TURNED), blocky("Q4_K", 2)], 2),
    "joined before": ([joined([blocky("Q4_K", 3), blocky("Q8_0", 5)]), blocky("Q8_0", 2)], 3),
}


@pytest.mark.parametrize("case", JOINED)
def test_joined_blocks_stay_narrow_and_keep_every_value(case: str) -> None:
    parts, n_parts = JOINED[case]
    matrix = joined(parts)
    assert isinstance(matrix, JoinedWeight)
    assert len(matrix.parts) == n_parts
    expected = torch.cat([widened(part) for part in parts])
    assert torch.equal(widened(matrix), expected)
    assert tuple(matrix.shape) == tuple(expected.shape)
    assert (matrix.dtype, matrix.device) == (expected.dtype, expected.device)
    assert matrix.nbytes == sum(part.nbytes for part in parts)


def test_shapes_without_memory() -> None:
    data = torch.empty(7, block_sizes("Q6_K")[1] * 2, dtype=torch.uint8, device="meta")
    weight = BlockWeight(data, "Q6_K", None, torch.bfloat16)
    matrix = joined([weight, weight])
    assert isinstance(matrix, JoinedWeight)
    assert (matrix.shape, matrix.nbytes, matrix.device.type) == ((14, N_IN), 14 * 2 * 210, "meta")
    for values in (widened(matrix), weight.rows(torch.zeros(3, dtype=torch.int64, device="meta"))):
        assert (values.is_meta, values.dtype, values.shape[1]) == (True, torch.bfloat16, N_IN)


@pytest.mark.parametrize(
    ("kind", "shape", "message"),
    [
        ("Q9_K", (2, 144), "Q9_K is no block type of GGUF; it must be one of"),
        ("F16", (2, 144), "F16 is no block type"),
        ("Q4_K", (2, 143), "blocks of Q4_K have 144 bytes"),
        ("Q4_K", (288,), r"not \[288\] torch.uint8"),
    ],
)
def test_what_is_no_matrix_of_blocks_is_refused(kind: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlockWeight(torch.zeros(shape, dtype=torch.uint8), kind, None, torch.float32)


def test_random_bytes_make_finite_scales() -> None:
    """What the other tests stand on: no infinity, no subnormal half among scales, and codes of every value."""
    for kind in ALL:
        values = read_by_gguf(blocky(kind, 37))
        assert bool(values.isfinite().all()), kind
        assert len(np.unique(values.numpy())) > 50, kind


class Matrices:
    """What `load_stack` takes of a checkpoint: matrices by name."""

    def __init__(self, matrices: dict[str, Tensor | Quantized]) -> None:
        self._matrices = matrices

    def take_expert(self, name: str, shape: tuple[int, int]) -> Tensor | Quantized:
        matrix = self._matrices[name]
        assert tuple(matrix.shape) == shape
        return matrix


@pytest.mark.parametrize("dense", [(), (0,), (2,), (0, 1, 2)])
def test_experts_are_narrow_if_all_are(dense: tuple[int, ...]) -> None:
    weights: dict[str, Tensor | Quantized] = {f"{i}.up.weight": blocky("Q8_0", 5) for i in range(3)}
    for i in dense:
        weights[f"{i}.up.weight"] = widened(blocky("Q8_0", 5))
    stacked = load_stack(Matrices(weights), [[f"{i}.up"] for i in range(3)], (5, N_IN))  # type: ignore[arg-type]
    assert isinstance(stacked, Tensor) == bool(dense)
    if isinstance(stacked, Tensor):
        assert torch.equal(stacked, torch.stack([widened(one) for one in weights.values()]))
