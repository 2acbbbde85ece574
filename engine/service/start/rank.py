"""The process of a rank other than the first.

    python -m slipstream.engine.service.start.rank FD

Reads from the socket FD what it is to load, answers once it has, and follows the first rank until that closes the
socket.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from slipstream.engine.batch import use_device
from slipstream.engine.errors import LoadError, RankLost
from slipstream.engine.models.registry import load_network
from slipstream.engine.ranks import meet
from slipstream.engine.service.run.follower import Follower
from slipstream.engine.service.start.sizes import KV_DTYPES
from slipstream.engine.service.start.sums import Sums
from slipstream.kernels import select
from slipstream.kernels.matmul.quantized import round_inputs, widen

log = logging.getLogger(__name__)


def main(handle: str) -> int:
    """Returns the process' exit status."""
    connection = Connection(int(handle))
    order = json.loads(connection.recv_bytes())
    logging.basicConfig(level=logging.WARNING, format=f"%(levelname)s rank {order['rank']}: %(message)s")
    try:
        device = _select(order)
        connection.send_bytes(b"{}")
        follower = _load(order, device)
    except (LoadError, RankLost, RuntimeError) as error:
        connection.send_bytes(json.dumps({"refused": str(error)}).encode())
        return 1
    connection.send_bytes(b"{}")
    try:
        follower.serve(connection)
    except (RankLost, ConnectionError) as error:
        log.warning("%s", error)  # the first rank has ended, or says which one has
        return 1
    shutil.rmtree(order["folder"], ignore_errors=True)  # a first rank that was killed has left it
    return 0


def _select(order: dict[str, Any]) -> torch.device:
    """What the first rank has chosen to compute with."""
    torch.set_num_threads(order["n_threads"])
    kind = order["device"]
    device = torch.device(kind, order["rank"]) if kind == "cuda" else torch.device(kind)
    use_device(device)
    widen(order["widened"])
    round_inputs(order["round_activations"])
    for dtype, chosen in order["chosen"].items():
        select(device, getattr(torch, dtype), chosen)
    return device


def _load(order: dict[str, Any], device: torch.device) -> Follower:
    ranks = meet(Path(order["folder"]), order["rank"], order["n"], device)
    dtype = getattr(torch, order["dtype"])
    if wrong := Sums(order["n_rows"], order["d_model"], dtype, device).problem(ranks):
        # The first rank, which knows too, says whether that is the end.
        log.error("sums over ranks: %s", wrong)
    network = load_network(order["path"], dtype, device, order["n_ctx"], order["n_vocab"], ranks)
    return Follower(network, ranks, KV_DTYPES[order["kv_cache_dtype"]])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
