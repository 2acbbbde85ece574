"""A rank other than the first: its part of the network, and the loop in which it does what the first says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import torch

from slipstream.engine.batch import Batch
from slipstream.engine.cache.messages import Message
from slipstream.engine.cache.need import Sizes
from slipstream.engine.cache.spread import Part
from slipstream.engine.cache.store import Store
from slipstream.engine.frames import FrameSize
from slipstream.engine.models.captured import Capture, Capturing, Forward, cuda_capture
from slipstream.engine.models.network import Network
from slipstream.engine.ranks import Ranks


class Follower:
    """A part of the target with the memory of its layers. It knows of no sequence."""

    def __init__(
        self,
        network: Network,
        ranks: Ranks,
        kept_dtype: torch.dtype | None,
        capture: Callable[[torch.device], Capture] = cuda_capture,
    ) -> None:
        """kept_dtype: of keys and values; None: the network's. capture: as the first rank captures its passes."""
        self._network, self._ranks, self._capture_on = network, ranks, capture
        self._forward: Forward = network.decoder
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
        if message.verb == "run":
            self._run(message)
        elif message.verb == "capture":
            self._capture(*message.arguments)
        else:
            self._part.follow(message)

    def _run(self, message: Message) -> None:
        """A pass of the batch, in the frame that the first rank runs it in."""
        assert self._store is not None
        frame, names = message.arguments
        batch = Batch.of_parts(dict(zip(names, message.tensors, strict=True)))
        placed = (
            batch.to(self._network.device)
            if frame is None
            else self._store.frames.of_size(FrameSize(*frame)).fill(batch)
        )
        assert placed is not None  # the first rank has found room in it
        self._forward(placed, self._store, None)

    def _capture(self, sizes: Sequence[Sequence[int]], n_pages: int, n_drafts: int) -> None:
        """Capture passes while the first rank captures its own: neither runs, nor is captured, without the other."""
        assert self._store is not None
        network = self._network
        stream = torch.zeros(1, network.config.d_model, dtype=network.dtype, device=network.device)
        frames = [FrameSize(*one) for one in sizes]
        capturing = Capturing(self._capture_on(network.device), frames, n_pages, n_drafts, stream)
        self._forward = capturing.forward(network.decoder, self._store)

    def _allocate(self, sizes: Sizes) -> None:
        network = self._network
        self._forward = network.decoder
        self._part = Part(self._needs, sizes, network.dtype, network.device, self._ranks)
        self._store = Store(self._needs, sizes, network.dtype, network.device, self._part)
