"""Passes that are captured once per frame and then replayed: one launch instead of hundreds.

A pass reads its batch from a frame and its other inputs from memory of its own, and leaves its results in memory that
all its captures share. A replay does the captured work again for whatever these hold by then: sizes and addresses are
fixed, values are not. Batches that no frame takes run without a capture.

On CUDA captures are graphs, made before the first request. On a CPU a frame's first pass is recorded while it runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slipstream.engine.batch import Batch
from slipstream.engine.cache.store import Store
from slipstream.engine.frames import Frame, Frames, FrameSize, wanted
from slipstream.engine.layers.decoder import Taps

log = logging.getLogger(__name__)

# Of free memory that a captured pass may take: other networks' passes need some, and those that no frame takes.
SHARE = 0.25

Replay = Callable[[], None]
# Captures the work and returns its replay; by then the work has run once.
Capture = Callable[[Callable[[], None]], Replay]
# Whether there is the memory to capture the work.
Affords = Callable[[Callable[[], None]], bool]
# (batch, other inputs, [n_rows, …] each) -> results of all rows, [n_rows, …] each
Pass = Callable[[Batch, Sequence[Tensor]], Sequence[Tensor]]
Forward = Callable[[Batch, Store, Taps | None], Tensor]  # as `Network.forward`


def always(_work: Callable[[], None]) -> bool:
    """Where memory is no question."""
    return True


class CapturedPass:
    """A pass over the frames of a store."""

    def __init__(
        self, run: Pass, frames: Frames, capture: Capture, inputs: Sequence[Tensor], affords: Affords
    ) -> None:
        """inputs: one row of each, [1, …], as an example. Frames of prompts whose passes are too dear are dropped."""
        self._run, self._capture, self._most_rows = run, capture, frames.most_rows
        self._inputs = [one.new_zeros((self._most_rows, *one.shape[1:])) for one in inputs]
        self._memory: list[Tensor] = []  # of the results of all frames
        dropped = []
        for frame in frames.frames[::-1]:  # the memory that the largest needs serves the smaller ones too
            if frame.has_all_logits or affords(partial(self._work, frame, [])):
                self._record(frame)
            else:
                frames.drop(frame)
                dropped.append(frame.n_rows)
        if dropped:
            log.warning(
                "passes of %s rows take too much memory to be captured, and such prompts run slower; a smaller"
                " --cache-size or --ctx-size leaves more",
                ", ".join(map(str, sorted(dropped))),
            )

    def _record(self, frame: Frame) -> None:
        """Capture the pass over a frame, which keeps the replay and where that leaves its results."""
        own: list[Tensor] = []
        frame.captured[self] = self._capture(partial(self._work, frame, own)), own

    def _work(self, frame: Frame, own: list[Tensor]) -> None:
        """What is captured. own: is filled with the frame's part of the memory for results."""
        results = self._run(frame.batch, [one[: frame.n_rows] for one in self._inputs])
        before = self._memory or [one[:0] for one in results]
        self._memory = [_with_room(kept, len(one)) for one, kept in zip(results, before, strict=True)]
        own[:] = [kept[: len(one)] for one, kept in zip(results, self._memory, strict=True)]
        for kept, one in zip(own, results, strict=True):
            kept.copy_(one)

    def __call__(self, batch: Batch, inputs: Sequence[Tensor] = ()) -> list[Tensor]:
        """Results of all rows of the batch's frame; they hold until the next call. inputs: of the batch's rows."""
        frame = batch.frame
        assert isinstance(frame, Frame)
        for kept, one in zip(self._inputs, inputs, strict=True):
            kept[: len(one)].copy_(one)
        if self in frame.captured:
            frame.captured[self][0]()
        else:
            self._record(frame)
        return list(frame.captured[self][1])


def _with_room(memory: Tensor, n_rows: int) -> Tensor:
    """The memory, [n, …], or other that has so many rows; at least twice as many, so that it is seldom replaced."""
    if n_rows <= len(memory):
        return memory
    return memory.new_empty((max(n_rows, 2 * len(memory)), *memory.shape[1:]))


@dataclass(frozen=True, slots=True)
class Capturing:
    """How passes are captured, and of which sizes."""

    capture: Capture
    sizes: Sequence[FrameSize] | None  # None: whatever comes, exactly
    n_pages: int  # of a sequence at full length, drafts included
    n_drafts: int  # of a slot at most
    stream: Tensor  # [1, d_target]: what a row of the target's streams is like
    affords: Affords = always

    def passes(self, store: Store, *runs: tuple[Pass, Sequence[Tensor]]) -> list[CapturedPass]:
        """All passes over a store, each with examples of its inputs. Its batches go into frames from now on."""
        frames = store.make_frames(self.sizes, self.n_pages, self.n_drafts)
        captured = [CapturedPass(run, frames, self.capture, inputs, self.affords) for run, inputs in runs]
        store.frames = frames
        return captured

    @property
    def captures_loops(self) -> bool:
        """Whether a network's guesses are captured too, as one loop for all slots (`Lanes`).

        Not in exact frames: there a slot that has made its last guess costs nothing more.
        """
        return self.sizes is not None

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


def cuda_affords(device: torch.device, work: Callable[[], None]) -> bool:
    """Whether the work takes at most `SHARE` of what memory is free; it runs."""
    torch.cuda.reset_peak_memory_stats(device)
    before, (free, _) = torch.cuda.memory_allocated(device), torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - before  # what torch has taken and does not use
    try:
        work()
    except torch.OutOfMemoryError:
        return False
    return bool(torch.cuda.max_memory_allocated(device) - before <= SHARE * free)


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


def cpu_capture() -> Capture:
    """Records work while it runs, in memory that all its recordings share: only one of them runs at a time."""
    # numba, which it loads, is not there in every process that imports this module.
    from slipstream.kernels.lent_memory import LentMemory
    from slipstream.kernels.tape import recorder_of

    return recorder_of(LentMemory())
