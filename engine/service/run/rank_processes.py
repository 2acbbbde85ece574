"""The processes of the ranks beside this one: started, watched, ended. This process is the first rank and leads.

They are reached through sockets that were made before them, and meet in a folder that only their user can read; on the
CPU they exchange rows over the loopback device. So nobody else can speak to them, and they end with this process.
"""

from __future__ import annotations

import json
import logging
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from slipstream.engine.cache.spread import Others
from slipstream.engine.errors import LoadError, RankLost
from slipstream.engine.ranks import meet
from slipstream.kernels.child_process import ChildProcess

log = logging.getLogger(__name__)

_CHILD = "slipstream.engine.service.start.rank"
_PATIENCE_S = 3600.0  # for a rank to load its part


class RankProcesses:
    """Ranks 1 … n - 1. `ranks` is this process among them, `others` the way to them."""

    def __init__(self, n: int, device: torch.device, order: Mapping[str, Any]) -> None:
        """order: what the processes need to load their parts, as JSON. Raises `LoadError` if they do not start."""
        try:
            self._folder = tempfile.TemporaryDirectory(prefix="slipstream-ranks-")
        except OSError as error:
            raise LoadError(
                f"no folder for the ranks of --tensor-parallel-size {n} to meet in: {error.strerror};"
                " TMPDIR may name one that can be written to"
            ) from error
        self._closing = False
        self._children = [ChildProcess(_CHILD) for _ in range(1, n)]
        for i, child in enumerate(self._children):
            own = {**order, "rank": i + 1, "n": n, "folder": self._folder.name}
            child.pipe.send_bytes(json.dumps(own).encode())
        self.others = Others([child.pipe for child in self._children])
        self.await_all()  # what they import
        try:
            self.ranks = meet(Path(self._folder.name), 0, n, device)
        except RuntimeError as error:
            self.close()
            raise LoadError(
                f"the ranks of --tensor-parallel-size {n} did not find each other: {error}"
            ) from error

    def await_all(self) -> None:
        """Wait until each has done the next part of its start. Raises `LoadError` with what one of them says."""
        for i, child in enumerate(self._children):
            answer = {"refused": "took too long to start"}
            try:
                if child.pipe.poll(_PATIENCE_S):
                    answer = json.loads(child.pipe.recv_bytes())
            except (OSError, EOFError):
                answer = {"refused": f"ended with status {child.process.wait()}"}
            if refused := answer.get("refused"):
                self.close()
                raise LoadError(f"rank {i + 1} of --tensor-parallel-size: {refused}")

    def watch(self, lost: Callable[[RankLost], None]) -> None:
        """Call `lost`, in some thread, when one of them ends."""
        for i, child in enumerate(self._children):
            threading.Thread(
                target=self._watch, args=(i + 1, child, lost), name=f"rank-{i + 1}", daemon=True
            ).start()

    def _watch(self, rank: int, child: ChildProcess, lost: Callable[[RankLost], None]) -> None:
        status = child.process.wait()
        if not self._closing:
            log.error("rank %d of --tensor-parallel-size has ended with status %d", rank, status)
            lost(RankLost(f"rank {rank} has ended with status {status}"))

    def close(self) -> None:
        """End them."""
        self._closing = True
        for child in self._children:
            child.end()  # they have nothing to lose
        self._folder.cleanup()
