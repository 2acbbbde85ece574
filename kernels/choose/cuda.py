"""`choose` in CUDA C++: several blocks per row, the same tokens and probabilities as the reference, bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels.choose.row_params import (
    Choice,
    Edits,
    Masks,
    RowParams,
    edit_columns,
    mask_columns,
    row_columns,
)
from slipstream.kernels.cuda.launcher import compile_for, launch, refusal
from slipstream.kernels.cuda.source import Argument, Source

ROWS = Source(__file__, "choose.cu", ("scan", "stand", "weigh", "cut", "draw"), fuse=False, early=True)
# As in the .cu files: tokens of a warp's read, of a block that scans or draws, of a block that weighs; their threads.
SEGMENT, CHUNK, PART = 512, 4096, 8192
CHUNK_THREADS, PART_THREADS = 256, 512
N_BUCKETS, STATE = 2048, 7  # of a row; its state in 64-bit words
# Blocks of about 132 multiprocessors that run at a time.
STANDING, WEIGHING = 3 * 132, 4 * 132
CUTTING, DRAWING = 132, 4 * 132


def refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    return refusal(device)


def prepare(device: torch.device, _dtype: torch.dtype) -> None:
    compile_for(device, ROWS)


def choose(
    logits: Tensor,
    params: RowParams,
    edits: Edits | None = None,
    masks: Masks | None = None,
    *,
    want_probability: bool = False,
) -> Choice:
    n_rows, vocab = logits.shape
    columns = row_columns(params, n_rows)
    entries = () if edits is None else edit_columns(edits, n_rows)
    words = () if masks is None else mask_columns(masks, n_rows, vocab)
    for given in (*columns, *entries, *words):
        if given.device != logits.device:
            raise ValueError(f"the logits are on {logits.device}, what is asked of them on {given.device}")
    wide = logits.to(torch.float32).contiguous()  # [n_rows, vocab]
    n_segments, n_chunks, n_parts = (-(-vocab // size) for size in (SEGMENT, CHUNK, PART))
    token_ids = torch.empty(n_rows, dtype=torch.int64, device=logits.device)
    probability = wide.new_empty(n_rows) if want_probability else None
    chosen = Choice(token_ids, probability)
    if n_rows == 0:
        return chosen
    # 64-bit words of every row: see work_of in choose.cu.
    n_words = STATE + n_segments + n_chunks + 2 * N_BUCKETS
    workspace = torch.empty(n_rows // 2 + 1 + n_rows * n_words, dtype=torch.int64, device=logits.device)
    edited: tuple[Argument, ...] = entries or (None,) * 5
    masked: tuple[Argument, ...] = (*words, words[1].shape[1]) if words else (None, None, 0)
    changed = torch.empty_like(wide) if entries or words else None  # [n_rows, vocab]
    common: tuple[Argument, ...] = (n_rows, vocab, *columns, workspace)
    launch(ROWS, "scan", (n_chunks, n_rows, 1), CHUNK_THREADS, wide, *common, *edited, *masked, changed)
    common = (wide if changed is None else changed, *common)
    n_each = max(1, min(n_parts, STANDING // n_rows))
    launch(ROWS, "stand", (n_each, n_rows, 1), PART_THREADS, *common, *chosen)
    launch(ROWS, "weigh", (min(n_rows * n_parts, WEIGHING), 1, 1), PART_THREADS, *common)
    launch(ROWS, "cut", (min(n_rows, CUTTING), 1, 1), PART_THREADS, *common)
    launch(ROWS, "draw", (min(n_rows * n_chunks, DRAWING), 1, 1), CHUNK_THREADS, *common, *chosen)
    return chosen
