"""Random weights of few bits for what is drawn, compared and measured."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor

from slipstream.kernels.matmul.blocks import BlockWeight
from slipstream.kernels.matmul.quantized import ByteWeight, Int4Weight, Quantized
from tests.gpu.dice import Dice, Tensors

KINDS = ("int4", "fp8", "int8")
BYTES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
# GGUF's types, of each way in which they are held; where what reads their values is installed.
BLOCKS = ("Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0") if find_spec("gguf") and find_spec("numba") else ()
if BLOCKS:
    from tests.block_data import block_bytes


def fields(kind: str, shape: tuple[int, int], group: int, g: torch.Generator) -> dict[str, Tensor]:
    """The tensors of a weight on the generator's device, values of about n_in^-0.5.

    group: inputs that share a scale, a divisor of n_in for int4; for others blocks have as many outputs, too.
    """
    n_out, n_in = shape
    of_scales = (n_out, n_in // group) if kind == "int4" else (-(-n_out // group), -(-n_in // group))
    scales = (0.5 + torch.rand(of_scales, generator=g, device=g.device)) / n_in**0.5
    if kind == "fp8":
        codes = torch.randn(shape, generator=g, device=g.device).to(torch.float8_e4m3fn)
        return {"codes": codes.view(torch.uint8), "scales": scales}
    if kind == "int8":
        codes = torch.randint(-128, 128, shape, generator=g, device=g.device, dtype=torch.int8)
        return {"codes": codes.view(torch.uint8), "scales": scales / 70}
    codes = torch.randint(256, (n_out, n_in // 2), generator=g, device=g.device, dtype=torch.uint8)
    zeros = torch.randint(6, 11, of_scales, generator=g, device=g.device, dtype=torch.uint8)
    return {"codes": codes, "scales": (scales / 5).half().float(), "zeros": zeros}


def weight(kind: str, t: Tensors, group: int, dtype: torch.dtype) -> Quantized:
    """Of those tensors, whatever their floats have been cast to."""
    if kind in BYTES:
        return ByteWeight(t["codes"].view(BYTES[kind]), t["scales"].float(), (group, group), dtype)
    return Int4Weight(t["codes"], t["scales"].float(), t["zeros"], t.get("order"), dtype)


def drawn(
    dice: Dice, n_out: int, n_in: int
) -> tuple[dict[str, Tensor], Callable[[Tensors], Tensor | Quantized], str]:
    """Some weight, quantised or not: its tensors, what `pack` takes when they have been moved and cast, its kind."""
    of_blocks = BLOCKS if n_in % 256 == 0 else ()
    kind = dice.random.choice(["plain", *KINDS, *of_blocks])
    if kind == "plain":
        return {"weight": dice.normal(n_out, n_in) / n_in**0.5}, lambda t: t["weight"].clone(), kind
    if kind in BLOCKS:
        seed = dice.random.randrange(2**32)
        return {"blocks": block_bytes(kind, n_out, n_in, seed)}, partial(_of_blocks, kind, dice.dtype), kind
    group = dice.random.choice([g for g in (32, 64, 128, n_in) if kind != "int4" or n_in % g == 0])
    tensors = fields(kind, (n_out, n_in), group, dice.g)
    if kind == "int4" and dice.random.random() < 0.3:
        tensors["order"] = torch.randperm(n_in, generator=dice.g)

    def made(t: Tensors) -> Tensor | Quantized:
        """In the definition's float64 its values are those of the dtype that is tested."""
        packed = weight(kind, t, group, dice.dtype)
        return packed if t["x"].dtype == dice.dtype else packed.dense().to(t["x"].dtype)

    return tensors, made, f"{kind} in groups of {group}"


def _of_blocks(kind: str, dtype: torch.dtype, t: Tensors) -> Tensor | Quantized:
    weight = BlockWeight(t["blocks"], kind, None, dtype)
    return weight if t["x"].dtype == dtype else weight.dense().to(t["x"].dtype)
