"""The process in which implementations prove themselves. It may die of one: its parent notes that and starts another.

    python -m slipstream.kernels.proof.child THREADS FD

Reads `Task`s from the socket FD, one JSON object each, and answers each with a line before and behind every
implementation tried, and an empty one at its end.
"""

from __future__ import annotations

import contextlib
import json
import sys
from multiprocessing.connection import Connection
from typing import Any

import torch

from slipstream.kernels import dispatch
from slipstream.kernels.matmul.quantized import round_inputs
from slipstream.kernels.proof.judge import problem


def main(n_threads: str, handle: str) -> None:
    torch.set_num_threads(int(n_threads))
    pipe = Connection(int(handle))
    pipe.send_bytes(b"{}")  # it has started
    selected: set[tuple[str, str]] = set()
    with contextlib.suppress(EOFError, ConnectionError), torch.inference_mode():
        while True:
            _try(json.loads(pipe.recv_bytes()), pipe, selected)


def _try(task: dict[str, Any], pipe: Connection, selected: set[tuple[str, str]]) -> None:
    """Try a task's implementations in turn up to the first that proves itself."""
    device, dtype, folder = torch.device(task["device"]), getattr(torch, task["dtype"]), task["op"]
    if (task["device"], task["dtype"]) not in selected:
        dispatch.select(device, dtype, prepares=False)  # an implementation may call other ops
        selected.add((task["device"], task["dtype"]))
    round_inputs(task["rounds"])
    cases = {key: task[key] for key in ("leaves_out", "weights")}
    for name in task["implementations"]:
        _answer(pipe, trying=name)
        try:
            reason = problem(folder, name, device, dtype, **cases)
        except Exception as error:  # noqa: BLE001 - the device is lost: nothing else could be tried in this process
            sys.exit(f"the device was lost: {str(error).splitlines()[0]}")
        _answer(pipe, tried=name, reason=reason)
        if reason is None:
            break
    _answer(pipe)


def _answer(pipe: Connection, **told: str | None) -> None:
    pipe.send_bytes(json.dumps(told).encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
