"""Proof of the products: plain weights, weights of few bits, and rows of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from slipstream.kernels.matmul.blocks import BlockWeight, block_sizes
from slipstream.kernels.matmul.formats import EXPONENT, FORMATS, HALF, UNSIGNED
from slipstream.kernels.matmul.op import linear, pack, take_rows
from slipstream.kernels.matmul.quantized import ByteWeight, Int4Weight, Quantized, rounds_inputs
from slipstream.kernels.proof.case import N_ROWS, Make, Rows
from slipstream.kernels.proof.inputs import Inputs

NARROW = ("int4", "fp8")


def of_linear(inputs: Inputs, n_out: int = 192, n_in: int = 1000, n_rows: int = N_ROWS) -> Rows:
    """A plain weight with a bias."""
    weight = inputs.put(torch.randn(n_out, n_in, generator=inputs.g) / n_in**0.5)
    packed, x = pack(weight.clone(), inputs.normal(n_out)), inputs.normal(n_rows, n_in)
    ids = torch.arange(n_rows, device=inputs.device) * 37 % n_out

    def compute(first: int, n: int) -> Sequence[Tensor]:
        rows = slice(first, first + n)
        return linear(x[rows], packed), take_rows(weight, ids[rows])

    return Rows(compute, n_rows)


def of_narrow(
    inputs: Inputs, kind: str, shape: tuple[int, int] = (192, 1024), group: int = 128, n_rows: int = N_ROWS
) -> Rows:
    """A weight [n_out, n_in] of few bits. In float64 its values are those of the dtype that is tested."""
    weight = narrow(kind, shape, group, inputs)
    x = _steps(inputs, n_rows, shape[1]) if rounds_inputs() else inputs.normal(n_rows, shape[1])
    packed = pack(weight if x.dtype == inputs.dtype else weight.dense().to(x.dtype))
    return Rows(lambda first, n: (linear(x[first : first + n], packed),), n_rows)


def _steps(inputs: Inputs, n_rows: int, n_in: int) -> Tensor:
    """Inputs that rounding to eight bits leaves as they are: the largest of each 32 is 127 of the others' steps."""
    steps = torch.randint(-127, 128, (n_rows, n_in // 32, 32), generator=inputs.g)
    steps[..., 5] = 127
    return inputs.put(steps.flatten(1) / 64)


def narrow(kind: str, shape: tuple[int, int], group: int, inputs: Inputs) -> Quantized:
    """A weight [n_out, n_in] of few bits; group: inputs that share a scale, for types that do not say so themselves."""
    if kind in FORMATS:
        return blocks(kind, shape, inputs)
    (n_out, n_in), g = shape, inputs.g
    of_scales = (n_out, n_in // group) if kind == "int4" else (-(-n_out // group), -(-n_in // group))
    scales = (0.5 + torch.rand(of_scales, generator=g)) / n_in**0.5
    if kind == "fp8":
        codes = torch.randn(shape, generator=g).to(torch.float8_e4m3fn).to(inputs.device)
        return ByteWeight(codes, scales.to(inputs.device), (group, group), inputs.dtype)
    if kind == "int8":
        codes = torch.randint(-127, 128, shape, generator=g, dtype=torch.int8).to(inputs.device)
        return ByteWeight(codes, (scales / 70).to(inputs.device), (group, group), inputs.dtype)
    packed = torch.randint(256, (n_out, n_in // 2), generator=g, dtype=torch.uint8).to(inputs.device)
    zeros = torch.randint(6, 11, of_scales, generator=g, dtype=torch.uint8).to(inputs.device)
    return Int4Weight(packed, (scales / 5).half().float().to(inputs.device), zeros, None, inputs.dtype)


def blocks(kind: str, shape: tuple[int, int], inputs: Inputs) -> BlockWeight:
    """A weight [n_out, n_in] of random codes and scales."""
    (n_out, n_in), g, form = shape, inputs.g, FORMATS[kind]
    n_values, n_bytes = block_sizes(kind)
    data = torch.randint(256, (n_out, n_in // n_values, n_bytes), generator=g, dtype=torch.uint8)
    if kind == "Q8_0":
        data[data == 128] = 127  # -128 is no code that files have
    halves = [form.half_at, form.second_at if form.minimum in (HALF, UNSIGNED) else None]
    for at in halves:
        if at is None:
            continue
        scales = (0.001 + 0.01 * torch.rand(data.shape[:2], generator=g)).half()[..., None]
        data[..., at : at + 2] = scales.view(torch.uint8)
    if form.factor == EXPONENT:
        data[..., 0] = torch.randint(115, 125, data.shape[:2], generator=g)
    return BlockWeight(data.flatten(1).to(inputs.device), kind, None, inputs.dtype)


# Enough rows and outputs for what an implementation has for prompts alone.
_PROMPT = 144
CASES: Mapping[str, Make] = {
    "wide": of_linear,
    "deep": partial(of_linear, n_out=96, n_in=2560),
    "prompt": partial(of_linear, n_out=8192, n_in=96, n_rows=_PROMPT),
    "deep prompt": partial(of_linear, n_out=4096, n_in=640, n_rows=_PROMPT),
    **{kind: partial(of_narrow, kind=kind) for kind in NARROW},
    **{f"{kind} prompt": partial(of_narrow, kind=kind, shape=(8192, 128), n_rows=_PROMPT) for kind in NARROW},
}


def cases_of(kind: str) -> Mapping[str, Make]:
    """Of weights of a type that few models have, "int8" or one of GGUF's: for servers that have such."""
    make = partial(of_narrow, kind=kind)
    return {kind: make, f"{kind} prompt": partial(make, shape=(8192, 256), n_rows=_PROMPT)}
