"""Batches of fixed sizes at fixed addresses, so that a pass can be captured once and replayed for other tokens.

A frame has room for some spans, rows and logits. A smaller batch is padded: spans without rows, and rows of no span,
which are computed like any other and write to the spare page behind the last, which is never read. What is in a frame
gets to the device in one copy.

That is for devices which compute a row more at no cost. On a CPU each row costs, so there a frame has exactly the
spans, rows and logits of its batches. It is made for the first batch of a shape that is sure to come again: all its
rows have logits, as when slots decode and verify. Other shapes, with parts of prompts, have theirs at the second batch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.engine.batch import AnyArray, Batch, Layout, upload
from slipstream.kernels.gated_delta.spans import RecurrentRows

# Rows of a frame whose rows all have logits. Between two neighbouring sizes passes cost the same on a device that waits
# for the weights.
ROWS: Sequence[int] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
# Rows of a frame for passes with prompts, where few rows have logits. An H200 computes 1,024 rows of an 8B model in
# 28 ms, and a busy host needs as long to launch a pass's operations one after the other.
PROMPT_ROWS: Sequence[int] = (32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
MOST_LOGITS = 256  # of such a frame
# Of frames that fit exactly: rows, for more of which a pass is so long that what a replay saves no longer shows; and
# how many frames a store has at most: those that were used last.
MOST_EXACT_ROWS, MOST_EXACT = 64, 512


@dataclass(frozen=True, slots=True)
class Room:
    """What the frames of one store have in common."""

    n_pages: int  # of one sequence at full length, drafts included
    spare_page: int  # that belongs to no slot
    spare_window_page: int | None = None  # the same of layers with a window; None: there are none
    n_history: int | None = None  # parked rows that a slot may have; None: no layer is recurrent


class FrameSize(NamedTuple):
    """What a frame has room for."""

    n_spans: int
    n_rows: int
    n_logits: int


def frame_sizes(n_slots: int, n_drafts: int, batch_size: int) -> list[FrameSize]:
    """The frames for passes of up to n_slots spans, each a token and up to n_drafts drafts, or a part of a prompt.

    batch_size: rows of a pass at most. The largest first: the device memory they need serves the smaller frames too.
    """
    spans = [1 << i for i in range((n_slots - 1).bit_length())] + [n_slots]
    found, enough = set(), 0
    for n_spans in spans:
        most = n_spans * (1 + n_drafts)
        enough = next((n for n in ROWS if n >= most), ROWS[-1])
        found |= {FrameSize(n_spans, n, n) for n in ROWS if n_spans <= n <= enough}
    n_logits = max(enough, min(n_slots * (1 + n_drafts), MOST_LOGITS))
    most_rows = next((n for n in (enough, *PROMPT_ROWS) if n >= batch_size), PROMPT_ROWS[-1])
    found |= {FrameSize(n_slots, n, min(n, n_logits)) for n in PROMPT_ROWS if enough < n <= most_rows}
    return sorted(found, key=lambda one: (one.n_rows, one.n_spans), reverse=True)


class Frame:
    """One batch that is filled again and again. `batch` has its tensors; their addresses never change."""

    def __init__(self, size: FrameSize, room: Room, device: torch.device, *, is_exact: bool = False) -> None:
        """is_exact: its batches have that size, no smaller one. With as many logits as rows, all rows have theirs."""
        self.size, self.is_exact = size, is_exact
        empty = _empty(size, room)
        padding = {name: one.numpy() for name, one in empty.parts.items()}
        self._layout = Layout.of(list(padding.values()))
        self._padding = np.zeros(self._layout.n_bytes, np.uint8)
        for one, place in zip(padding.values(), self._layout.arrays(self._padding), strict=True):
            place[...] = one
        self._shapes = {name: one.shape for name, one in padding.items()}
        self._buffer = torch.from_numpy(self._padding).to(device, copy=True)  # [n_bytes] uint8
        # Where batches are written: on the CPU the buffer itself. What is sent to a device is written anew each time.
        self._host = self._buffer.numpy() if device.type == "cpu" else None
        self._places = {} if self._host is None else self._places_in(self._host)
        tensors = self._layout.tensors(self._buffer)
        self.batch = replace(empty.with_parts(dict(zip(padding, tensors, strict=True))), frame=self)
        self.captured: dict[object, Any] = {}  # by captured pass over it: the replay and the results
        self._n_fills = 0

    @property
    def n_spans(self) -> int:
        return self.size.n_spans

    @property
    def n_rows(self) -> int:
        return self.size.n_rows

    @property
    def has_all_logits(self) -> bool:
        """Whether each of its rows has logits, `wanted` or not; else only those that a batch asks for."""
        return self.size.n_logits == self.size.n_rows

    @property
    def is_new(self) -> bool:
        """Whether a pass over it is being recorded, and takes longer than those that follow."""
        return self.is_exact and self._n_fills == 1

    def fill(self, batch: Batch) -> Batch | None:
        """A batch of the host, padded and on the device, which holds until the frame is filled again.

        None: there is no room for it.
        """
        parts = {name: one.numpy() for name, one in batch.parts.items()}
        if any(
            have > room
            for name, values in parts.items()
            for have, room in zip(values.shape, self._shapes[name], strict=True)
        ):
            return None
        if self._host is None:
            host = self._padding.copy()
            self._write(parts, self._places_in(host))
            source = torch.from_numpy(host)
            self._buffer.copy_(source.pin_memory() if self._buffer.is_cuda else source, non_blocking=True)
        else:
            self._host[:] = self._padding
            self._write(parts, self._places)
        self._n_fills += 1
        return replace(self.batch, spans=batch.spans)

    def _places_in(self, host: NDArray[np.uint8]) -> dict[str, AnyArray]:
        """The parts of a batch in a buffer of the host, by name."""
        return dict(zip(self._shapes, self._layout.arrays(host), strict=True))

    def _write(self, parts: Mapping[str, AnyArray], places: Mapping[str, AnyArray]) -> None:
        """Put a batch of the host over the padding."""
        for name, values in parts.items():
            place = places[name]
            if name == "logit_index" and self.has_all_logits:
                continue
            place[tuple(map(slice, values.shape))] = values
            if name.endswith("_starts"):
                place[len(values) :] = values[-1]  # spans without rows


def _empty(size: FrameSize, room: Room) -> Batch:
    """A frame's batch, on the host, before anything is put into it."""
    n_spans, n_rows, n_logits = size

    def filled(shape: tuple[int, ...] | int, value: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.full((shape,) if isinstance(shape, int) else shape, value, dtype=dtype)

    long = torch.int64
    batch = Batch(
        spans=(),
        token_ids=filled(n_rows, 0, long),
        positions=filled(n_rows, 0, long),
        span_starts=filled(n_spans + 1, 0),
        n_past=filled(n_spans, 0),
        page_table=filled((n_spans, room.n_pages), 0),
        row_pages=filled(n_rows, room.spare_page, long),
        row_offsets=filled(n_rows, 0, long),
        logit_index=torch.arange(n_logits),
    )
    if room.spare_window_page is not None:
        batch = replace(batch, window=replace(batch, row_pages=filled(n_rows, room.spare_window_page, long)))
    if room.n_history is None:
        return batch
    recurrent = RecurrentRows(
        span_starts=filled(n_spans + 1, 0),
        slot_ids=filled(n_spans, 0),
        history_starts=filled(n_spans + 1, 0),
        history_rows=filled(n_spans * room.n_history, 0),
        n_settled=filled(n_spans, 0),
        park_rows=filled(n_rows, -1),
    )
    return replace(batch, recurrent=recurrent)


class Frames:
    """The frames of one store, all made before the first pass."""

    def __init__(self, frames: Sequence[Frame]) -> None:
        self.frames = sorted(frames, key=lambda one: (one.n_rows, one.n_spans))
        self.most_rows = max((one.n_rows for one in frames), default=0)
        self._by_size = {one.size: one for one in frames}

    def drop(self, frame: Frame) -> None:
        """No batch goes there any more."""
        self.frames.remove(frame)
        del self._by_size[frame.size]

    def of_size(self, size: FrameSize) -> Frame:
        """The frame of that size. Raises KeyError if there is none."""
        return self._by_size[size]

    def unmade(self, widths: Iterable[int]) -> list[int]:
        """Of these rows of one slot, all with logits, those whose first pass will make their frame."""
        return []

    def place(self, batch: Batch, device: torch.device) -> Batch:
        """A batch of the host on the device: in the smallest frame that takes it, or by itself if none does."""
        n_rows, n_spans = len(batch.token_ids), len(batch.spans)
        for frame in () if batch.has_images else self.frames:
            if frame.n_rows >= n_rows and frame.n_spans >= n_spans and (filled := frame.fill(batch)):
                return filled
        return batch.to(device)


class ExactFrames(Frames):
    """The frames of one store for the shapes of batches that came lately, made as they come."""

    def __init__(self, room: Room, device: torch.device) -> None:
        super().__init__([])
        self.most_rows = MOST_EXACT_ROWS
        self._room, self._device = room, device
        # The shape that was longest ago first: those that have a frame, and those that came once.
        self._by_shape: OrderedDict[FrameSize, Frame] = OrderedDict()
        self._once: OrderedDict[FrameSize, None] = OrderedDict()

    def unmade(self, widths: Iterable[int]) -> list[int]:
        return [n for n in widths if n <= self.most_rows and FrameSize(1, n, n) not in self._by_shape]

    def place(self, batch: Batch, device: torch.device) -> Batch:
        shape = FrameSize(len(batch.spans), batch.token_ids.shape[0], batch.logit_index.shape[0])
        if batch.has_images or shape.n_rows > self.most_rows:
            return batch.to(device)
        frame = self._frame(shape)
        filled = None if frame is None else frame.fill(batch)
        return batch.to(device) if filled is None else filled

    def _frame(self, shape: FrameSize) -> Frame | None:
        """That of a shape which has just come; None: it may not come again."""
        if shape in self._by_shape:
            self._by_shape.move_to_end(shape)
        elif shape.n_logits == shape.n_rows or shape in self._once:
            self._once.pop(shape, None)
            self._by_shape[shape] = Frame(shape, self._room, self._device, is_exact=True)
            if len(self._by_shape) > MOST_EXACT:
                _, unused = self._by_shape.popitem(last=False)
                unused.captured.clear()
        else:
            self._once[shape] = None
            if len(self._once) > MOST_EXACT:
                self._once.popitem(last=False)
        return self._by_shape.get(shape)


def wanted(batch: Batch, rows: Tensor) -> Tensor:
    """What was asked for of a pass in the batch's frame, [n_logits, …]. rows: what it gave, [n, …]."""
    assert isinstance(batch.frame, Frame)
    if batch.frame.is_exact:
        return rows
    if not batch.frame.has_all_logits:
        return rows[: sum(span.n_logits for span in batch.spans)]
    counts = [(len(span.token_ids), span.n_logits) for span in batch.spans]
    n_rows = sum(n for n, _ in counts)
    if all(n == n_logits for n, n_logits in counts):
        return rows[:n_rows]
    ends = accumulate(n for n, _ in counts)
    index = [np.arange(end - n_logits, end) for (_, n_logits), end in zip(counts, ends, strict=True)]
    return rows.index_select(0, *upload((np.concatenate(index),), rows.device))
