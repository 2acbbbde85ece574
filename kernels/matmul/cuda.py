"""Linear layers on CUDA: up to 64 rows the weights go through the tensor cores once, whatever the number of rows.

The weight's shape and kind alone say how the inner dimension is cut into splits and in which order they are added, so
a row has the same bits alone, beside others, and in a prompt of any length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.kernels.cuda.launcher import compile_for, has_warpgroups, launch, refusal
from slipstream.kernels.cuda.source import Source
from slipstream.kernels.matmul import columns, prompt
from slipstream.kernels.matmul.blocks import BlockWeight
from slipstream.kernels.matmul.columns import spread
from slipstream.kernels.matmul.fragments import (
    BITS,
    BLOCK,
    INT8,
    NAMES,
    STEP,
    TILE,
    Coded,
    FragmentWeight,
    coded,
    with_zeros,
)
from slipstream.kernels.matmul.packed import Packed
from slipstream.kernels.matmul.quantized import JoinedWeight, Quantized, same_order
from slipstream.kernels.matmul.reference import take_rows as take_rows

TEAM, TEAM_ROWS = 128, 64  # as in matmul.cu: threads of a team, and its rows at most
WIDTHS = (8, 16, 32, 64, 128)  # rows of a block: eight times N_TILES


def _sources(codes: Sequence[str]) -> dict[torch.dtype, Source]:
    return {
        dtype: Source(
            __file__,
            "matmul.cu",
            tuple(f"linear<{name}, {code}, {n // 8}>" for code in codes for n in WIDTHS),
            early=True,
        )
        for dtype, name in NAMES.items()
    }


# By dtype: a model has one, and compiling takes seconds; what few models need is compiled with their first such weight.
SOURCES = _sources([code for code in BITS if code != INT8])
OF_INT8 = _sources([INT8])
PROMPTS, PROMPTS_OF_INT8 = prompt.SOURCES, prompt.OF_INT8  # on Hopper in place of blocks of 128 rows
COLUMNS = columns.SOURCES
# Blocks of a weight that is split, by its bits: as many as about 132 multiprocessors run at once, of codes more.
MOST_SPREAD = {16: 256, 8: 512, 4: 512}
# Tiles: launches with fewer give every split a block of its own. Plain weights are bound by memory alone, while a block
# takes longer to widen codes than to read them.
SPREAD_BELOW, SPREAD_CODES_BELOW = 129, 256
WIDEST_FROM = 128  # blocks of the widest kind, which keep about 132 multiprocessors busy one at a time
LEAST_STEPS = {16: 4, 8: 5, 4: 5}  # of a split: with fewer the pipeline hardly starts
MOST_SPLITS = 16


def refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    return refusal(device) if dtype in NAMES else "bfloat16 and float16 only"


def prepare(device: torch.device, dtype: torch.dtype) -> None:
    compile_for(device, SOURCES[dtype], *([PROMPTS[dtype]] if has_warpgroups(device) else []))


@dataclass(frozen=True, slots=True)
class FragmentParts:
    """Matrices that read the same inputs, their outputs one after another, each with codes of its own."""

    parts: tuple[FragmentWeight, ...]

    @property
    def in_features(self) -> int:
        return self.parts[0].in_features

    @property
    def out_features(self) -> int:
        return sum(part.out_features for part in self.parts)


def pack(weight: Tensor | Quantized, bias: Tensor | None = None) -> Packed:
    """As `op.pack`. Raises TypeError for other dtypes than bfloat16 and float16.

    Codes are kept, multiplied with, and their sums scaled: no value is rounded to the dtype. Widened here, and kept in
    16 bits, are weights with groups or blocks of inputs that are no multiples of 32 (but one for all inputs may have
    any size); with scales below 2^-60 or above 2^60 (zeros are no trouble); int4 with scales of more than 19 bits,
    which those of 16 bits in checkpoints never are; fp8 with NaN; and GGUF's types that `block_numbers.py` has not.
    """
    if weight.dtype not in NAMES:
        raise TypeError(f"cuda pack takes bfloat16 and float16, not {weight.dtype}")
    if not isinstance(weight, JoinedWeight):
        return _pack(weight, bias)
    parts = _merged(weight.parts)
    biases = [None] * len(parts) if bias is None else bias.split([part.shape[0] for part in parts])
    packed = tuple(_pack(part, one) for part, one in zip(parts, biases, strict=True))
    return packed[0] if len(packed) == 1 else FragmentParts(packed)


def _pack(weight: Tensor | Quantized, bias: Tensor | None) -> FragmentWeight:
    n_out, n_in = weight.shape
    found = coded(weight)
    order = None if found.words is None else getattr(weight, "order", None)
    device = found.codes.device
    more = _more_sources(found, device, weight.dtype)
    if more and device.type == "cuda":
        compile_for(device, *more)
    n_done = torch.zeros(SPREAD_CODES_BELOW, dtype=torch.int32, device=device)
    bias = None if bias is None else bias.contiguous()
    return FragmentWeight(*found, order, bias, n_done, weight.dtype, n_in, n_out)


def _more_sources(weight: Coded, device: torch.device, dtype: torch.dtype) -> list[Source]:
    """What a weight needs beside what `prepare` has compiled."""
    more = [] if weight.columns is None else [COLUMNS[dtype]]
    if weight.code == INT8:
        more += [OF_INT8[dtype], *([PROMPTS_OF_INT8[dtype]] if has_warpgroups(device) else [])]
    return more


def _merged(parts: Sequence[Tensor | Quantized]) -> list[Tensor | Quantized]:
    """The parts, neighbours in blocks of one type as one, and neighbours that are widened."""
    merged: list[Tensor | Quantized] = []
    for part in parts:
        last = merged[-1] if merged else None
        if isinstance(part, BlockWeight) and isinstance(last, BlockWeight) and _are_alike(last, part):
            merged[-1] = replace(last, data=torch.cat((last.data, part.data)))
        elif isinstance(part, Tensor) and isinstance(last, Tensor):
            merged[-1] = torch.cat((last, part))
        else:
            merged.append(part)
    return merged


def _are_alike(one: BlockWeight, other: BlockWeight) -> bool:
    return one.kind == other.kind and same_order(one.order, other.order)


def linear(x: Tensor, packed: Packed, out_dtype: torch.dtype | None = None) -> Tensor:
    """As `op.linear`. One launch at a time may use a weight: those of one stream do."""
    if isinstance(packed, FragmentParts):
        return torch.cat([linear(x, part, out_dtype) for part in packed.parts], 1)
    if not isinstance(packed, FragmentWeight):
        raise TypeError(f"cuda linear got a {type(packed).__name__}; pack the weight with cuda too")
    if x.dtype != packed.dtype or x.shape[1] != packed.in_features:
        raise ValueError(
            f"x is {x.dtype} [n_rows, {x.shape[1]}], the weight {packed.dtype} [.., {packed.in_features}]"
        )
    wanted = out_dtype or x.dtype
    kept = x.dtype if wanted == x.dtype else torch.float32
    if packed.order is not None:
        x = x.index_select(1, packed.order)
    if packed.columns is not None:
        x = spread(x, packed.columns)
    x = with_zeros(x, -x.shape[1] % 8).contiguous()
    return _product(x, packed, kept).to(wanted)


def n_splits(n_out: int, n_in: int, bits: int) -> int:
    """Into how many parts the inner dimension of a weight of so many bits is cut. Part of every result's bits."""
    n_tiles, n_steps = -(-n_out // TILE), -(-n_in // STEP)
    wanted = max(MOST_SPREAD[bits] // n_tiles, 2 if n_tiles < MOST_SPREAD[bits] else 1)
    return max(1, min(wanted, n_steps // LEAST_STEPS[bits], MOST_SPLITS))


def _product(x: Tensor, weight: FragmentWeight, out_dtype: torch.dtype) -> Tensor:
    """x [n_rows, n_in] times a weight, in its dtype or float32: [n_rows, n_out].

    n_in: the weight's columns, a multiple of 8. Its `n_done` is zeros again when this has run.
    """
    (n_rows, n_in), (n_tiles, n_steps, n_bytes) = x.shape, weight.codes.shape
    code, words, n_out = weight.code, weight.words, weight.out_features
    out = x.new_empty(n_rows, n_out, dtype=out_dtype)
    wide = out_dtype == torch.float32
    splits = n_splits(n_out, n_in, BITS[code])
    if prompt.runs(x, n_tiles):
        prompt.product(x, weight, out, splits)
        return out
    width = _width(n_rows, n_tiles)
    row_tiles = -(-n_rows // width)
    # With many rows there are blocks enough: each runs all splits of its tile, in the same order.
    below = SPREAD_BELOW if words is None else SPREAD_CODES_BELOW
    spread = splits > 1 and width <= TEAM_ROWS and row_tiles * n_tiles < below
    partials = (
        x.new_empty(row_tiles * n_tiles * splits * width * TILE, dtype=torch.float32) if spread else None
    )
    launch(
        (OF_INT8 if code == INT8 else SOURCES)[x.dtype],
        f"linear<{NAMES[x.dtype]}, {code}, {width // 8}>",
        (row_tiles, n_tiles, splits if spread else 1),
        TEAM * -(-width // TEAM_ROWS),
        *(x, weight.codes, words, weight.bias),
        *(None if wide else out, out if wide else None, partials, weight.n_done),
        *(n_rows, n_in, n_out, n_steps, splits, 0 if words is None else words.shape[1], weight.group),
        shared=_shared(n_bytes, width),
    )
    return out


def _width(n_rows: int, n_tiles: int) -> int:
    """Rows of a block. No part of a result's bits: a row's sums are the same in each."""
    *of_one_team, widest = WIDTHS
    if n_rows > TEAM_ROWS and -(-n_rows // widest) * n_tiles >= WIDEST_FROM:
        return widest
    return next((n for n in of_one_team if n_rows <= n), TEAM_ROWS)


def _shared(n_code_bytes: int, width: int) -> int:
    """Bytes of all stages, as `Stage` in matmul.cu counts them. n_code_bytes: of a step."""
    full, rows = 2 * TILE * STEP, 2 * STEP * width
    is_plain = n_code_bytes == full
    stage = n_code_bytes + (0 if is_plain else STEP // BLOCK * TILE * 4) + rows
    n_stages = {8: 5, 16: 5, 32: 4}.get(width, 3) if is_plain else 3
    return n_stages * (full + rows) // stage * stage
