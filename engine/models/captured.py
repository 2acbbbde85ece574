"""Passes that are captured once per frame and then replayed: one launch instead of hundreds.

A pass reads its batch from a frame and its other inputs from memory of its own, and leaves its results in memory that
all its captures share. A replay does the captured work again for whatever these hold by then: sizes and addresses are
fixed, values are not. Batches that no frame takes run without a capture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slipstream.engine.batch import Batch
from slipstream.engine.cache.store import Store
from slipstream.engine.frames import Frame, Frames, wanted
from slipstream.engine.layers.decoder import Taps

Replay = Callable[[], None]
# Runs the work once, captures it, and returns its replay.
Capture = Callable[[Callable[[], None]], Replay]
# (batch, other inputs, [n_rows, …] each) -> results of all rows, [n_rows, …] each
Pass = Callable[[Batch, Sequence[Tensor]], Sequence[Tensor]]
Forward = Callable[[Batch, Store, Taps | None], Tensor]  # as `Network.forward`


class CapturedPass:
    """A pass over the frames of a store."""

    def __init__(
        self, run: Pass, frames: Sequence[Frame], capture: Capture, inputs: Sequence[Tensor] = ()
    ) -> None:
        """frames: those with most rows first. inputs: one row of each, [1, …], as an example."""
        most = frames[0].n_rows
        self._run = run
        self._inputs = [one.new_zeros((most, *one.shape[1:])) for one in inputs]
        self._results: list[Tensor] = []
        self._replays: dict[object, Replay] = {frame: capture(partial(self._work, frame)) for frame in frames}

    def _work(self, frame: Frame) -> None:
        """What is captured."""
        results = self._run(frame.batch, [one[: frame.n_rows] for one in self._inputs])
        if not self._results:  # the first run of the largest frame, before it is captured
            self._results = [torch.zeros_like(one) for one in results]
        for kept, one in zip(self._results, results, strict=True):
            kept[: frame.n_rows].copy_(one)

    def __call__(self, batch: Batch, inputs: Sequence[Tensor] = ()) -> list[Tensor]:
        """Results of all rows of the batch's frame; they hold until the next call. inputs: of the batch's rows."""
        for kept, one in zip(self._inputs, inputs, strict=True):
            kept[: len(one)].copy_(one)
        self._replays[batch.frame]()
        return [one[: len(batch.token_ids)] for one in self._results]


@dataclass(frozen=True, slots=True)
class Capturing:
    """How passes are captured, and of which sizes."""

    capture: Capture
    sizes: Sequence[tuple[int, int]]  # spans and rows, most rows first (`engine.frames.frame_sizes`)
    n_pages: int  # of a sequence at full length, drafts included
    n_drafts: int  # of a slot at most
    stream: Tensor  # [1, d_target]: what a row of the target's streams is like

    def passes(self, store: Store, *runs: tuple[Pass, Sequence[Tensor]]) -> list[CapturedPass]:
        """All passes over a store, each with examples of its inputs. Its batches go into frames from now on."""
        frames = store.make_frames(self.sizes, self.n_pages, self.n_drafts)
        captured = [CapturedPass(run, frames, self.capture, inputs) for run, inputs in runs]
        store.frames = Frames(frames)
        return captured

    def forward(self, forward: Forward, store: Store, taps: Sequence[int] = ()) -> Forward:
        """`Network.forward` of a store's only network. Logits, and the streams `taps`, hold until the next call."""

        def run(batch: Batch, _: Sequence[Tensor]) -> Sequence[Tensor]:
            kept = Taps(taps)
            logits = forward(batch, store, kept if taps else None)  # [n_rows, vocab] float32
            return [logits, *kept.of(taps)]

        (captured,) = self.passes(store, (run, ()))

        def replayed(batch: Batch, store: Store, kept: Taps | None = None) -> Tensor:
            if batch.frame is None:
                return forward(batch, store, kept)
            logits, *streams = captured(batch)
            if kept is not None:
                for tap, stream in zip(taps, streams, strict=True):
                    kept.put(tap, stream)
            return wanted(batch, logits)

        return replayed


def cuda_capture(device: torch.device) -> Capture:
    """Captures of CUDA graphs that share their memory: only one of them runs at a time."""
    pool = torch.cuda.graph_pool_handle()
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(work: Callable[[], None]) -> Replay:
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            work()  # compiles, and sets up what cannot be set up in a capture
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            work()
        replay: Replay = graph.replay
        return replay

    return capture
