"""What a pass costs beyond its computation where a target is divided over two processes on this machine's CPU.

    python -m tests.bench.rank_messages

A message with a batch, there and back, halved; and gathering the rows of one layer's output through gloo. Medians; run
nothing beside it.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import torch

from slipstream.engine.batch import Batch, Span
from slipstream.engine.cache.messages import Message
from slipstream.engine.ranks import meet

CPU = torch.device("cpu")
WIDTHS = (1, 17, 128)  # rows of a pass
D_MODEL, N_ROUNDS, PAGE = 4096, 400, 64


def batch_of(n_rows: int) -> Batch:
    """A pass of one slot behind 4,000 tokens."""
    return Batch.build([Span(0, [1] * n_rows, 4000, n_rows - 1, n_rows)], [list(range(70))], PAGE, CPU)


def microseconds(work: Callable[[], object]) -> float:
    took = []
    for _ in range(N_ROUNDS):
        started = time.perf_counter()
        work()
        took.append(time.perf_counter() - started)
    return round(median(took) * 1e6, 1)


def other(handle: str, folder: str) -> None:
    """The second process: sends every message back as it would be read, then gathers."""
    torch.set_num_threads(1)
    connection = Connection(int(handle))
    for _ in WIDTHS:
        for _ in range(N_ROUNDS):
            connection.send_bytes(Message.decode(connection.recv_bytes()).encode())
    ranks = meet(Path(folder), 1, 2, CPU)
    for n_rows in WIDTHS:
        for _ in range(N_ROUNDS):
            ranks.add(torch.ones(n_rows, D_MODEL, dtype=torch.bfloat16))


def main() -> int:
    torch.set_num_threads(1)
    ours, its = socket.socketpair()
    found: dict[str, dict[str, float]] = {"message_us": {}, "gathering_us": {}}
    with tempfile.TemporaryDirectory() as folder, its:
        command = [sys.executable, "-m", "tests.bench.rank_messages", str(its.fileno()), folder]
        process = subprocess.Popen(command, pass_fds=[its.fileno()])
        connection = Connection(ours.detach())
        for n_rows in WIDTHS:
            batch = batch_of(n_rows)
            said = Message("run", list(batch.parts), list(batch.parts.values()))

            def there_and_back(said: Message = said) -> None:
                connection.send_bytes(said.encode())
                Message.decode(connection.recv_bytes())

            found["message_us"][str(n_rows)] = microseconds(there_and_back) / 2
        ranks = meet(Path(folder), 0, 2, CPU)
        for n_rows in WIDTHS:
            rows = torch.ones(n_rows, D_MODEL, dtype=torch.bfloat16)
            found["gathering_us"][str(n_rows)] = microseconds(lambda rows=rows: ranks.add(rows))
        process.wait()
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main() if len(sys.argv) == 1 else other(*sys.argv[1:]))
