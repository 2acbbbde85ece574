"""A rank other than the first: its part of the network, and the loop in which it does what the first says."""

from __future__ import annotations

from multiprocessing.connection import Connection

import torch

from slipstream.engine.batch import Batch
from slipstream.engine.cache.messages import Message
from slipstream.engine.cache.need import Sizes
from slipstream.engine.cache.spread import Part
from slipstream.engine.cache.store import Store
from slipstream.engine.models.network import Network
from slipstream.engine.ranks import Ranks


class Follower:
    """A part of the target with the memory of its layers. It knows of no sequence."""

    def __init__(self, network: Network, ranks: Ranks, kept_dtype: torch.dtype | None) -> None:
        """kept_dtype: of keys and values; None: the network's."""
        self._network, self._ranks = network, ranks
        self._needs = [need.kept_in(kept_dtype) for need in network.needs]
        self._part: Part | None = None
        self._store: Store | None = None

    @torch.inference_mode()
    def serve(self, connection: Connection) -> None:
        """Follow until the other end is closed. Raises what a pass raises, and `RankLost`."""
        while True:
            try:
                data = connection.recv_bytes()
            except EOFError:
                return
            self._follow(Message.decode(data))

    def _follow(self, message: Message) -> None:
        if message.verb == "allocate":
            self._allocate(Sizes(**message.arguments[0]))
            return
        assert self._part is not None
        assert self._store is not None
        if message.verb == "run":
            names = Batch.part_names(message.arguments)
            parts = dict(zip(names, message.tensors, strict=True))
            batch = Batch.of_parts(parts).to(self._network.device)
            self._network.run(batch, self._store)
        else:
            self._part.follow(message)

    def _allocate(self, sizes: Sizes) -> None:
        network = self._network
        self._part = Part(self._needs, sizes, network.dtype, network.device, self._ranks)
        self._store = Store(self._needs, sizes, network.dtype, network.device, self._part)
