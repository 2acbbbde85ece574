"""`choose` in CUDA C++: several blocks per row, the same tokens and probabilities as the reference, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

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
from slipstream.kernels.torch_op import torch_op

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
    columns = row_columns(params, logits.shape[0])
    entries = () if edits is None else edit_columns(edits, logits.shape[0])
    words = () if masks is None else mask_columns(masks, *logits.shape)
    token_ids, probability = rows(logits, columns, entries, words, want_probability=want_probability)
    return Choice(token_ids, probability if want_probability else None)


def shapes(logits: Tensor, *_: object, want_probability: bool) -> tuple[Tensor, Tensor]:
    """What `rows` returns, unfilled: token ids [n_rows] int64, probabilities [n_rows] float32 ([0] if unwanted)."""
    n_rows = logits.shape[0]
    return (
        torch.empty(n_rows, dtype=torch.int64, device=logits.device),
        torch.empty(n_rows if want_probability else 0, dtype=torch.float32, device=logits.device),
    )


@torch_op(shapes)
def rows(
    logits: Tensor,
    columns: Sequence[Tensor],
    entries: Sequence[Tensor],
    words: Sequence[Tensor],
    *,
    want_probability: bool,
) -> tuple[Tensor, Tensor]:
    """`choose` with the fields of RowParams, Edits and Masks as lists, empty where there are none."""
    for given in (*columns, *entries, *words):
        if given.device != logits.device:
            raise ValueError(f"the logits are on {logits.device}, what is asked of them on {given.device}")
    n_rows, vocab = logits.shape
    wide = logits.to(torch.float32).contiguous()  # [n_rows, vocab]
    n_segments, n_chunks, n_parts = (-(-vocab // size) for size in (SEGMENT, CHUNK, PART))
    token_ids, probability = shapes(logits, want_probability=want_probability)
    if n_rows == 0:
        return token_ids, probability
    # 64-bit words of every row: see work_of in choose.cu.
    n_words = STATE + n_segments + n_chunks + 2 * N_BUCKETS
    workspace = torch.empty(n_rows // 2 + 1 + n_rows * n_words, dtype=torch.int64, device=logits.device)
    edits: tuple[Argument, ...] = tuple(entries) or (None,) * 5
    masks: tuple[Argument, ...] = (*words, words[1].shape[1]) if words else (None, None, 0)
    changed = torch.empty_like(wide) if entries or words else None  # [n_rows, vocab]
    common: tuple[Argument, ...] = (n_rows, vocab, *columns, workspace)
    launch(ROWS, "scan", (n_chunks, n_rows, 1), CHUNK_THREADS, wide, *common, *edits, *masks, changed)
    common = (wide if changed is None else changed, *common)
    answers = token_ids, probability if want_probability else None
    n_each = max(1, min(n_parts, STANDING // n_rows))
    launch(ROWS, "stand", (n_each, n_rows, 1), PART_THREADS, *common, *answers)
    launch(ROWS, "weigh", (min(n_rows * n_parts, WEIGHING), 1, 1), PART_THREADS, *common)
    launch(ROWS, "cut", (min(n_rows, CUTTING), 1, 1), PART_THREADS, *common)
    launch(ROWS, "draw", (min(n_rows * n_chunks, DRAWING), 1, 1), CHUNK_THREADS, *common, *answers)
    return token_ids, probability
