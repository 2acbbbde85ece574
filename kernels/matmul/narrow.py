"""Products with matrices of few bits, as narrow as the file has them: one compiled call, the same bits for any rows.

The sum of an output begins with its bias. Block by block, in ascending order, the block's scale times the sum of
value * input is added to it, or, where a block has several groups of inputs with a factor each, the scale times the
sum over groups of factor * sum of value * input; then, alike, the minimum times the sum of the inputs. `op.py` says in
which order and how rounded. Values are numbers that bfloat16 holds, so no weight is ever rounded.

A part that is of no such type is multiplied as `panel_stack.py` does, beside the others, by the same call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels import threads
from slipstream.kernels.amx import HAS_TILES
from slipstream.kernels.cpu_features import missing
from slipstream.kernels.matmul import (
    code_bytes,
    code_floats,
    code_pairs,
    laid_sums,
    narrow_sums,
    narrow_tiles,
)
from slipstream.kernels.matmul.blocks import BlockWeight
from slipstream.kernels.matmul.code_bytes import has_whole_numbers, is_exact_in_units
from slipstream.kernels.matmul.formats import (
    LAYOUTS,
    OF_A8,
    OF_BYTES,
    OF_FLOATS,
    OF_PAIRS,
    OF_TILES,
    OF_UNITS,
    PANEL,
)
from slipstream.kernels.matmul.narrow_sums import dense_task, multiply
from slipstream.kernels.matmul.panel_sums import panels_of
from slipstream.kernels.matmul.quantized import (
    ByteWeight,
    Int4Weight,
    JoinedWeight,
    Quantized,
    rounds_inputs,
    same_order,
    widened,
)
from slipstream.kernels.matmul.records import records
from slipstream.kernels.matmul.scaled import kind_of

SERIAL_BELOW = 500_000  # multiply-adds; less is done before a second thread has begun
# Whether whole units are multiplied as pairs of bfloat16, in tiles or by vectors, with the bits of bytes.
HAS_UNITS = HAS_TILES or code_pairs.IS_QUICK


@dataclass(frozen=True, slots=True)
class NarrowWeight:
    """A matrix, or several that read the same inputs, some of them in records (`formats.py`)."""

    parts: tuple[
        Tensor, ...
    ]  # records [n_panels, n_blocks, record_bytes] uint8, or panels of `panel_sums.py`
    segments: Tensor  # [n_parts + 1, FIELDS] int64: what a product has to know of each part; the last begins no panel
    bias: Tensor  # [n_panels of all * 64] float32, zero without one
    table: Tensor  # [2] int64: addresses of bias and segments
    order: Tensor | None  # [in_features] int64: stored column i belongs to input order[i]; None: to input i
    dtype: torch.dtype
    way: str  # what products are of
    # How parts read inputs that are whole numbers (`code_bytes.py`), if any do so: as units in bfloat16, as bytes.
    in_units: bool
    in_bytes: bool
    in_features: int
    out_features: int


def refusal() -> str | None:
    """Why blocks are widened on this CPU; None if they are not."""
    names = missing(code_floats.FEATURES)
    return f"this CPU has no {', '.join(names)}" if names else None


def ways() -> list[str]:
    """What products of bfloat16 inputs may be of on this CPU; the first that has all types of a weight is taken."""
    has_pairs, has_bytes = not missing(code_pairs.FEATURES), not missing(code_bytes.FEATURES)
    of_bytes = [*[OF_A8] * rounds_inputs(), *[OF_TILES] * HAS_TILES, OF_BYTES] if has_bytes else []
    return [*of_bytes, *[OF_PAIRS] * has_pairs, OF_FLOATS]


def _way_of(dtype: torch.dtype, kinds: Sequence[str]) -> str:
    """What products with parts of these types are of."""
    if dtype is not torch.bfloat16:
        return OF_FLOATS
    return next(way for way in ways() if all(part_way(way, kind) for kind in kinds))


def part_way(way: str, kind: str) -> str | None:
    """What a part's products are of, where those of the whole are of that; None if there are none."""
    form = LAYOUTS[kind]
    if has_whole_numbers(form):
        if way == OF_BYTES:
            return OF_UNITS if HAS_UNITS and is_exact_in_units(form) else OF_BYTES
        return way if way in (OF_A8, OF_FLOATS) else None
    if way in (OF_A8, OF_BYTES):
        return OF_TILES if HAS_TILES else None  # which read inputs where they are
    return way


def pack(weight: Tensor | Quantized, bias: Tensor | None = None) -> NarrowWeight | None:
    """The weight with the parts that have records in these; None if there are none."""
    if not any(_is_narrow(part) for part in _gathered(weight)[0]):
        return None
    packed = pack_parts(weight, bias)
    return packed if any(part.dtype is torch.uint8 for part in packed.parts) else None


def pack_parts(weight: Tensor | Quantized, bias: Tensor | None = None) -> NarrowWeight:
    """The weight with the parts that have records in these, others in panels of the rows' dtype."""
    parts, order = _gathered(weight)
    kinds = [kind_of(part) or "" if _is_narrow(part) else "" for part in parts]
    way = _way_of(weight.dtype, [kind for kind in kinds if kind])
    each = [part_way(way, kind) if kind else None for kind in kinds]
    found = [records(part, one) if one else None for part, one in zip(parts, each, strict=True)]
    laid = [panels_of(widened(part)) if one is None else one for part, one in zip(parts, found, strict=True)]
    tasks = [
        dense_task[weight.dtype] if records is None else _block_task(kind, one or "")
        for records, kind, one in zip(found, kinds, each, strict=True)
    ]
    n_outs = [part.shape[0] for part in parts]
    ends = torch.zeros(sum(n_outs)) if bias is None else bias.to(torch.float32)
    ends = torch.cat([F.pad(one, (0, -len(one) % PANEL)) for one in ends.split(n_outs)])
    segments = _segments(laid, n_outs, tasks)
    return NarrowWeight(
        parts=tuple(laid),
        segments=segments,
        bias=ends,
        table=torch.tensor([ends.data_ptr(), segments.data_ptr()]),
        order=order,
        dtype=weight.dtype,
        way=way,
        in_units=OF_UNITS in each or (HAS_TILES and OF_A8 in each),
        in_bytes=OF_BYTES in each,
        in_features=weight.shape[1],
        out_features=sum(n_outs),
    )


def _block_task(kind: str, way: str) -> int:
    if HAS_TILES and way in narrow_tiles.WAYS:
        return narrow_tiles.block_task(kind, way)
    return (laid_sums if way in laid_sums.LAID else narrow_sums).block_task(kind, way)


def packed_bytes(weight: Quantized) -> int:
    """Bytes of what `panels.pack` makes of a weight with parts in blocks; unlike it, for weights without memory too."""
    n_bytes = 0
    for part in _gathered(weight)[0]:
        if _is_narrow(part):
            form = LAYOUTS[kind_of(part) or ""]
            n_bytes += -(-part.shape[0] // PANEL) * (part.shape[1] // form.block) * form.record_bytes
        else:
            n_bytes += math.prod(part.shape) * part.dtype.itemsize
    return n_bytes


def _gathered(weight: Tensor | Quantized) -> tuple[list[Tensor | Quantized], Tensor | None]:
    """The parts as they are multiplied with inputs in some order, and that order, [in_features]; None: their own.

    If all parts have one order, a product gathers its inputs; else those that have one are widened.
    """
    parts: list[Tensor | Quantized] = list(weight.parts) if isinstance(weight, JoinedWeight) else [weight]
    orders = [getattr(part, "order", None) for part in parts]
    order = orders[0]
    if order is None or not all(same_order(order, one) for one in orders):
        return parts, None
    return [replace(part, order=None) for part in parts if isinstance(part, BlockWeight | Int4Weight)], order


def _is_narrow(part: Tensor | Quantized) -> TypeGuard[BlockWeight | Int4Weight | ByteWeight]:
    """Whether records can be made of it; `records` may still find a code that has no place in them."""
    has_order = getattr(part, "order", None) is not None
    return not has_order and kind_of(part) is not None and refusal() is None


def _segments(laid: Sequence[Tensor], n_outs: Sequence[int], tasks: Sequence[int]) -> Tensor:
    """[n_parts + 1, FIELDS] int64."""
    rows, n_panels, n_done = [], 0, 0
    for part, n_out, task in zip(laid, n_outs, tasks, strict=True):
        rows.append((n_panels, task, part.data_ptr(), part[0].nbytes, n_done, n_out))
        n_panels, n_done = n_panels + len(part), n_done + n_out
    return torch.tensor([*rows, (n_panels, 0, 0, 0, n_done, 0)])


def linear(x: Tensor, packed: NarrowWeight, out_dtype: torch.dtype | None = None) -> Tensor:
    """As `op.linear`. Raises ValueError for rows of another dtype or size than the weight's."""
    n_rows, n_in = x.shape
    if x.dtype is not packed.dtype or n_in != packed.in_features:
        raise ValueError(
            f"x is {x.dtype} [n_rows, {n_in}], the weight {packed.dtype} [.., {packed.in_features}]"
        )
    x = x.contiguous() if packed.order is None else x.index_select(1, packed.order)
    wide = out_dtype is torch.float32 or x.dtype is torch.float32
    out = torch.empty((n_rows, packed.out_features), dtype=torch.float32 if wide else x.dtype)
    multiply(
        (x.data_ptr(), out.data_ptr(), packed.table.data_ptr(), 0, 0),
        (n_rows, n_in, packed.out_features, packed.bias.shape[0] // PANEL, 1),
        (x.dtype, packed.way, out.dtype, (packed.in_units, packed.in_bytes)),
        threads.available() if n_rows * n_in * packed.out_features >= SERIAL_BELOW else 1,
    )
    return out if out_dtype is None else out.to(out_dtype)


@dataclass(frozen=True, slots=True)
class NarrowStack:
    """Matrices of one shape and kind of products, as those of experts."""

    each: tuple[NarrowWeight, ...]
    in_units: bool  # any of them
    in_bytes: bool  # likewise
    table: Tensor  # [n_matrices, 2] int64: addresses of biases and segments

    def __len__(self) -> int:
        return len(self.each)


def stack(weights: Sequence[NarrowWeight]) -> NarrowStack | None:
    """The weights together; None if the inputs of one have to be gathered first, or products are not all alike."""
    if any(one.order is not None for one in weights):
        return None
    if len({one.way for one in weights}) > 1:
        return None
    return NarrowStack(
        each=tuple(weights),
        in_units=any(one.in_units for one in weights),
        in_bytes=any(one.in_bytes for one in weights),
        table=torch.stack([one.table for one in weights]),
    )


def multiply_groups(
    x: Tensor, matrices: NarrowStack, out_dtype: torch.dtype, groups: tuple[Tensor, Tensor]
) -> Tensor:
    """As `panel_stack.multiply_panels`."""
    (n_rows, n_in), first = x.shape, matrices.each[0]
    out = torch.empty((n_rows, first.out_features), dtype=out_dtype)
    multiply(
        tuple(one.data_ptr() for one in (x, out, matrices.table, *groups)),
        (n_rows, n_in, first.out_features, first.bias.shape[0] // PANEL, len(groups[0])),
        # Tiles leave groups of few rows to vectors, which read bytes.
        (x.dtype, first.way, out_dtype, (matrices.in_units, matrices.in_bytes or HAS_TILES)),
        threads.available() if n_rows * n_in * first.out_features >= SERIAL_BELOW else 1,
    )
    return out
