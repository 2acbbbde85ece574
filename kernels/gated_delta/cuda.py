"""The gated delta rule in CUDA C++: updates are prepared all at once, then blocks take a state's columns through them.

No bit of a row or a state depends on what else a pass holds, nor on how a sequence was cut into passes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels.cuda.launcher import compile_for, launch, refusal
from slipstream.kernels.cuda.source import Argument, Source
from slipstream.kernels.gated_delta import reference
from slipstream.kernels.gated_delta.spans import RecurrentRows
from slipstream.kernels.gated_delta.state import DeltaGate, DeltaState

# As in the .cu files: columns of a state that a block has, threads, values beside a row of them in shared memory.
COLUMNS, THREADS, LINE = 16, 128, 20
WARPS = THREADS // 32
AHEAD, STAGES, GATES = 8, 3, 4
KEYS = (128, 256)  # dimensions of keys: narrower ones run in the next wider kernel
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ALIGNMENT = 16  # bytes of a copy
SOURCE = Source(
    __file__,
    "gated_delta.cu",
    ("prepare", *(f"advance<{per_key}, {d}>" for per_key in ("false", "true") for d in KEYS)),
    fuse=False,  # an update is the definition's, whatever applies it: a row, a fold, another implementation
    early=True,
)


def refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    return refusal(device) if dtype in KINDS else "float32, bfloat16 and float16 only"


def prepare(device: torch.device, _dtype: torch.dtype) -> None:
    compile_for(device, SOURCE)


def gated_delta(
    mixed: Tensor,
    raw_decay: Tensor,
    raw_beta: Tensor,
    gate: DeltaGate,
    state: DeltaState,
    spans: RecurrentRows,
) -> Tensor:
    """As `op.gated_delta`. Raises ValueError for keys of more than 256 dimensions."""
    n_value_heads, d_value = state.parked_deltas.shape[1:]
    if not raw_decay.shape[1:] == gate.dt_bias.shape == state.parked_decays.shape[1:]:
        raise ValueError("raw_decay, dt_bias and parked_decays disagree on what decays by itself")
    if not gate.a_log.dtype == gate.dt_bias.dtype == torch.float32:
        raise ValueError("the gate's weights are float32")
    if not {raw_decay.dtype, raw_beta.dtype} <= {mixed.dtype, torch.float32}:
        raise ValueError("raw_decay and raw_beta are float32 or of the rows' dtype")
    if raw_decay.dtype != raw_beta.dtype:
        raw_decay, raw_beta = raw_decay.to(torch.float32), raw_beta.to(torch.float32)  # exact
    out = torch.empty((mixed.shape[0], n_value_heads, d_value), dtype=mixed.dtype, device=mixed.device)
    rows = mixed, raw_decay, raw_beta, gate.a_log, gate.dt_bias
    _run(tuple(one.contiguous() for one in rows), out, state, spans)
    return out


def settle_states(states: Tensor, state: DeltaState, spans: RecurrentRows) -> None:
    if states.dtype == torch.float32:
        none = states.new_empty((0, 0))  # no rows: neither these nor their kin are read
        _run((none,) * 5, none, state, spans)
    else:
        reference.settle_states(states, state, spans)  # float64: the same operations


def workspace_size(state: DeltaState, n_history: int, n_rows: int, n_places: int) -> int:
    """Floats that `prepare` writes: see `Updates` in updates.cuh."""
    n_key_heads, n_value_heads = state.parked_keys.shape[1], state.parked_deltas.shape[1]
    n_columns = -(-state.parked_deltas.shape[2] // COLUMNS) * COLUMNS
    decays = n_places if state.parked_decays.dim() == 3 else 0
    each = n_key_heads * n_places + n_value_heads * (n_columns + GATES + decays)
    return (n_history + n_rows) * each + n_rows * n_key_heads * n_places


def shared_memory(n_places: int, *, per_key: bool) -> int:
    """Bytes of a block of `advance`: the columns, then STAGES of AHEAD `Step`s."""
    step = n_places * 2 + (n_places if per_key else 4) + COLUMNS + GATES
    return 4 * (n_places * LINE + STAGES * AHEAD * step)


def _run(rows: tuple[Tensor, ...], out: Tensor, state: DeltaState, spans: RecurrentRows) -> None:
    """rows: (mixed, raw_decay, raw_beta, a_log, dt_bias), contiguous."""
    pools = state.parked_keys, state.parked_deltas, state.parked_decays
    _check(state, pools)
    starts, slots, history_starts, history, settled, parks = spans.checked()
    n_spans, n_history, n_rows = slots.shape[0], history.shape[0], rows[0].shape[0]
    if n_spans == 0 or n_history + n_rows == 0:
        return
    n_places = next(n for n in KEYS if state.parked_keys.shape[2] <= n)
    (n_key_heads, d_key), (n_value_heads, d_value) = (
        state.parked_keys.shape[1:],
        state.parked_deltas.shape[1:],
    )
    per_key, kind = state.parked_decays.dim() == 3, KINDS[rows[0].dtype]
    sizes: tuple[Argument, ...] = (n_history, n_rows, n_key_heads, n_value_heads, d_key, d_value)
    size = workspace_size(state, n_history, n_rows, n_places)
    if size >= 2**31:  # `advance` counts in 32 bits
        raise ValueError(f"a pass of {n_history + n_rows} updates is too large for cuda gated_delta")
    workspace = state.state.new_empty(size)
    n_warps = (n_history + n_rows) * (n_key_heads + n_value_heads)
    launch(
        SOURCE,
        "prepare",
        (-(-n_warps // WARPS), 1, 1),
        THREADS,
        *(*rows, parks, *pools, history, history_starts, workspace, n_spans),
        *(*sizes, n_places, int(per_key), kind, int(rows[1].dtype == torch.float32), d_key**-0.5),
    )
    in_pieces = state.state.data_ptr() % ALIGNMENT == 0 and d_value % (ALIGNMENT // 4) == 0
    launch(
        SOURCE,
        f"advance<{str(per_key).lower()}, {n_places}>",
        (-(-d_value // COLUMNS), n_value_heads, n_spans),
        THREADS,
        *(workspace, state.state, *pools, out, starts, slots, history_starts, settled),
        *(*sizes, kind, int(in_pieces)),
        shared=shared_memory(n_places, per_key=per_key),
    )


def _check(state: DeltaState, pools: tuple[Tensor, ...]) -> None:
    """Raises ValueError for tensors that the kernels could not read."""
    if not all(x.dtype == torch.float32 and x.is_contiguous() for x in (state.state, *pools)):
        raise ValueError("states and records are contiguous float32")
    if state.parked_keys.shape[2] > KEYS[-1]:
        raise ValueError(f"cuda gated_delta takes keys of up to {KEYS[-1]} dimensions")
