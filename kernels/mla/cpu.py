"""Multi-head latent attention on CPU, in compiled code: a row's bits are its own, whatever is computed beside it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels import threads
from slipstream.kernels.attention.spans import Spans, check_batch
from slipstream.kernels.compiled import (
    KINDS,
    fetch_add,
    inlined,
    int_pointer,
    long_kernel,
    long_pointer,
    per_dtype,
    pointer,
    shifted,
)
from slipstream.kernels.compiled import refuses as refuses
from slipstream.kernels.matmul.panel_stack import PanelStack, multiply_panels, stack_panels
from slipstream.kernels.mla import latent_blocks
from slipstream.kernels.mla.latent_rows import write_latents as write_latents
from slipstream.kernels.mla.latent_types import PackedHeads, check_latents

RECORDABLE = True  # all it does is calls of kernels and operations of torch (`tape.py`)
SERIAL_BELOW = 200_000  # multiply-adds, as in `attention`


def pack_heads(weight: Tensor) -> PackedHeads:
    return stack_panels(weight)


def head_linear(x: Tensor, packed: PackedHeads) -> Tensor:
    if not isinstance(packed, PanelStack):
        raise TypeError(f"cpu head_linear got a {type(packed).__name__}; pack the heads with cpu too")
    n_rows, n_heads, d_in = x.shape
    by_head = x.transpose(0, 1).reshape(n_heads * n_rows, d_in).contiguous()
    heads = torch.arange(n_heads + 1, dtype=torch.int32)  # [n_heads + 1]
    said = multiply_panels(by_head, packed, x.dtype, (heads[:-1], heads * n_rows))
    return said.view(n_heads, n_rows, packed.out_features).transpose(0, 1).contiguous()


def latent_attention(q: Tensor, q_rope: Tensor, latents: Tensor, spans: Spans, scale: float) -> Tensor:
    check_latents(q, q_rope, latents)
    check_batch(spans, q, q_rope, latents)
    if q_rope.dtype != q.dtype or latents.dtype not in (q.dtype, torch.float8_e4m3fn):
        raise ValueError(
            f"latent_attention of {q.dtype} and {q_rope.dtype} over {latents.dtype} is not there"
        )
    out = torch.empty_like(q)
    tensors = q, q_rope, latents, out, spans.span_starts, spans.n_past, spans.page_table
    _run(
        tuple(one.data_ptr() for one in tensors),
        (*spans.page_table.shape, q.shape[1], latents.shape[1], q.shape[2], q_rope.shape[2]),
        scale,
        _task[q.dtype, latents.dtype],
        threads.available(),
    )
    return out


@long_kernel
def _run(tensors: Any, shape: Any, scale: float, task: int, n_threads: int) -> None:
    """Count the work and start the threads. tensors, shape: the arguments of `latent_blocks` in their order."""
    memory = np.empty(latent_blocks.SCALE + 1, np.int64)
    memory[: latent_blocks.N_SPANS], memory[latent_blocks.N_SPANS : latent_blocks.LANES] = tensors, shape
    memory[latent_blocks.SCALE :].view(np.float64)[0] = scale
    a = long_pointer(memory.ctypes.data)
    starts, past = int_pointer(a[latent_blocks.STARTS]), int_pointer(a[latent_blocks.PAST])
    n_heads, work, n_lanes = a[latent_blocks.N_HEADS], 0, 0
    for i in range(shape[0]):
        n_rows = np.int64(starts[i + 1] - starts[i])
        work += n_rows * (past[i] + n_rows)
        n_lanes += n_rows * n_heads
    if work * n_heads * (2 * a[latent_blocks.D_LATENT] + a[latent_blocks.D_ROPE]) < SERIAL_BELOW:
        n_threads = 1
    # As many lanes as an item may have, but no fewer items than threads; whole fours.
    share = (n_lanes + n_threads - 1) // n_threads
    a[latent_blocks.LANES] = min(latent_blocks.MOST_LANES, (share + 3) // 4 * 4)
    n_items = 0
    for i in range(shape[0]):
        n_items += latent_blocks.items_of(a, np.int64(starts[i + 1] - starts[i]))
    a[latent_blocks.N_ITEMS], a[latent_blocks.NEXT] = n_items, 0
    threads.run(task, memory.ctypes.data, min(n_threads, n_items))
    memory[0] = 0  # keeps the memory alive until here


@inlined
def _take_items(a: Any, stores: Any, out: Any, multiply: Any) -> None:
    """Do items until none is left. stores: (q, q_rope, latents), typed pointers, as is out."""
    starts = int_pointer(a[latent_blocks.STARTS])
    floats, longs, memory = latent_blocks.scratch(a)
    item = fetch_add(shifted(a, latent_blocks.NEXT), 1)
    before = span = 0  # items of the spans before `span`
    while item < a[latent_blocks.N_ITEMS]:
        n_rows = np.int64(starts[span + 1] - starts[span])
        n_here = latent_blocks.items_of(a, n_rows)
        if item - before >= n_here:
            before += n_here
            span += 1
            continue
        first = (item - before) * a[latent_blocks.LANES]
        lanes = first, min(first + a[latent_blocks.LANES], n_rows * a[latent_blocks.N_HEADS])
        latent_blocks.attend_lanes(a, (span, lanes), stores, out, (memory, multiply))
        item = fetch_add(shifted(a, latent_blocks.NEXT), 1)
    floats[0], longs[0] = 0, 0  # keeps the memory alive until here


@per_dtype
def _task(kind: Any, stored_kind: Any) -> int:
    """Address of the compiled task for queries and stores of these kinds."""
    by_pairs = kind is KINDS[torch.bfloat16]

    def items(address: int) -> None:
        a = long_pointer(address)
        stores = pointer(a[latent_blocks.Q], kind), pointer(a[latent_blocks.LATENTS], stored_kind)
        if by_pairs:
            _take_items(a, stores, pointer(a[latent_blocks.OUT], kind), latent_blocks.BY_PAIRS)
        else:
            _take_items(a, stores, pointer(a[latent_blocks.OUT], kind), latent_blocks.BY_FLOATS)

    return threads.compile_task(items)
