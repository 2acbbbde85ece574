"""Head norms, rotary embedding and page write in Triton: a program has a few heads of one row.

Stores are of the rows' dtype, or of float8_e4m3fn: `x.clamp(-448, 448).to(torch.float8_e4m3fn)` of what the rows'
dtype would have kept.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.norm.triton import inverse_rms
from slipstream.kernels.norm_rope_write.rows import HeadNorms, Rope, Rows, count_query_heads, places_of
from slipstream.kernels.triton_launch import FUSED, aligned, begin, early, power_of_two, tiles
from slipstream.kernels.triton_launch import refuses as refuses

HEADS, VALUES = 4, 1024  # of a program, at most
# float8_e4m3fn: the bits of 448 as float32; a code
LARGEST, NAN = tl.constexpr(0x43E00000), tl.constexpr(0x7F)


def norm_rope_write(
    qkv: Tensor, norms: HeadNorms | None, rope: Rope, rows: Rows, keys: Tensor, values: Tensor
) -> Tensor:
    n_rows, n_kv_heads, page_size, d_head = qkv.shape[0], *keys.shape[1:]
    if not (keys.is_contiguous() and values.is_contiguous()):
        raise ValueError("norm_rope_write takes contiguous stores")
    if keys.dtype not in (qkv.dtype, torch.float8_e4m3fn) or values.dtype != keys.dtype:
        raise ValueError(f"stores are of {qkv.dtype} or float8_e4m3fn, not {keys.dtype} and {values.dtype}")
    if keys.dtype == torch.float8_e4m3fn:  # Triton has no such type on compute capability 8.0
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    places = places_of(rows)
    n_heads = count_query_heads(qkv, keys, values)
    size = power_of_two(d_head)
    n_of_program = max(1, min(HEADS, VALUES // size))
    qkv = aligned(qkv)
    q = torch.empty((n_rows, n_heads, d_head), dtype=qkv.dtype, device=qkv.device)
    if n_rows > 0:
        scales = (qkv, qkv, 0.0) if norms is None else (aligned(norms.q), aligned(norms.k), norms.eps)
        _heads[n_rows, tiles(n_heads + 2 * n_kv_heads, n_of_program)](
            *(qkv, q, keys, values, *scales),
            *(rope.cos.contiguous(), rope.sin.contiguous()),
            *places,
            *(
                n_heads,
                n_kv_heads,
                page_size,
                d_head,
                values.shape[3],
                size,
                rope.cos.shape[1],
            ),
            n_of_program,
            norms is not None,
            norms is not None and norms.values,
            num_warps=4,
            **early(qkv.device),
            **FUSED,
        )
    return q


def norm_rope(q: Tensor, d_head: int, norms: HeadNorms | None, rope: Rope, rows: Rows) -> Tensor:
    none = q.new_empty((0, 0, 1, d_head))  # a store without heads: nothing is written
    return norm_rope_write(q, norms, rope, rows, none, none)


@triton.jit
def _normed(x, inverse, weight_at, i, inside, NORMED: tl.constexpr):
    """x as `rms_norm` would leave it, in float32. inverse: [HEADS], 1 for heads that are not normed."""
    wide = x.to(tl.float32)
    if NORMED:
        weight = tl.load(weight_at + i, mask=inside, other=0.0)  # [HEADS, SIZE]
        scaled = (wide * inverse[:, None]).to(weight.dtype).to(tl.float32) * weight.to(tl.float32)
        wide = scaled.to(x.dtype).to(tl.float32)
    return wide


@triton.jit
def stored(x, target_at):
    """x in the store's dtype. uint8 stands for float8_e4m3fn: to nearest even, beyond 448 to 448, NaN to NaN."""
    if target_at.dtype.element_ty == tl.uint8:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        rounding = 0x7FFFF + ((size >> 20) & 1)
        # float32's exponent is 120 larger.
        normal = ((tl.minimum(size, LARGEST) + rounding) >> 20) - (120 << 3)
        # Below 2^-6 a code counts units of 2^-9: those that 2^14 has as float32, so the sum rounds to one.
        small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) & 0xF
        code = tl.where(size < 0x3C800000, small, normal)
        code = tl.where(size > 0x7F800000, NAN, code)
        kept = (code | ((bits >> 24) & 0x80)).to(tl.uint8)
    else:
        kept = x
    return kept


@triton.jit
def _heads(
    qkv_at,
    q_at,
    keys_at,
    values_at,
    q_norm_at,
    k_norm_at,
    eps,
    cos_at,
    sin_at,
    positions_at,
    pages_at,
    offsets_at,
    N_HEADS: tl.constexpr,
    N_KV: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    D: tl.constexpr,
    D_VALUE: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    NORMED: tl.constexpr,
    NORMS_VALUES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Dimension i turns with its partner HALF places on or back; both are read, the partner from the cache."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    i = tl.arange(0, SIZE)
    partner = tl.where(i < HALF, i + HALF, tl.where(i < 2 * HALF, i - HALF, i))
    is_q = (head < N_HEADS)[:, None]
    is_v = (head >= N_HEADS + N_KV)[:, None]
    width = tl.where(is_v, D_VALUE, D)  # [HEADS, 1]
    exists = (head[:, None] < N_HEADS + 2 * N_KV) & (i[None, :] < width)  # [HEADS, SIZE]
    first = head * D - tl.maximum(head - (N_HEADS + N_KV), 0) * (D - D_VALUE)  # of the head in its row
    turn = tl.load(positions_at + row) * HALF
    cell = tl.load(pages_at + row) * (N_KV * PAGE_SIZE) + tl.load(offsets_at + row)
    begin(EARLY)  # what describes the pass is read before
    source_at = qkv_at + row * ((N_HEADS + N_KV) * D + N_KV * D_VALUE) + first[:, None]
    own = tl.load(source_at + i[None, :], mask=exists, other=0.0)
    turning = exists & (i[None, :] < 2 * HALF) & (partner[None, :] < width)  # values may end before
    other = tl.load(source_at + partner[None, :], mask=turning, other=0.0)
    wide = own.to(tl.float32)
    inverse = inverse_rms(wide * wide, D, eps, 1)  # [HEADS]
    weight_at = tl.where(is_q, q_norm_at, k_norm_at)  # [HEADS, 1]
    x = _normed(own, inverse, weight_at, i[None, :], exists & ~is_v, NORMED)
    y = _normed(other, inverse, weight_at, partner[None, :], exists & ~is_v, NORMED)

    angle = tl.where(i < HALF, i, i - HALF)
    turns = i < 2 * HALF
    cos = tl.load(cos_at + turn + angle, mask=turns, other=1.0)[None, :]  # [1, SIZE]
    sin = tl.load(sin_at + turn + angle, mask=turns, other=0.0)[None, :]
    turned = tl.where(turns[None, :], x * cos + tl.where(i[None, :] < HALF, -y, y) * sin, x).to(own.dtype)
    tl.store(q_at + row * (N_HEADS * D) + head[:, None] * D + i[None, :], turned, mask=exists & is_q)
    kv_head = tl.where(is_v, head[:, None] - N_KV, head[:, None]) - N_HEADS
    target = (cell + kv_head * PAGE_SIZE) * width + i[None, :]  # [HEADS, SIZE]
    tl.store(keys_at + target, stored(turned, keys_at), mask=exists & ~is_q & ~is_v)
    if NORMS_VALUES:
        own = (wide * inverse_rms(wide * wide, D_VALUE, eps, 1)[:, None]).to(own.dtype)
    tl.store(values_at + target, stored(own, values_at), mask=exists & is_v)
