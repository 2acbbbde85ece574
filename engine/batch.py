"""Spans and the ragged batch: one shape for prefill, decoding and verification, with no phase flag.

A *span* is one slot's tokens in one pass; a *row* is one position. Plain decoding is a span of one token,
verification a span of 1 + n_drafts, a prompt chunk a span of many; no code downstream distinguishes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.engine.images import (
    NO_IMAGES,
    ImageRows,
    PlacedImage,
    Stretch,
    image_rows,
    wholes_of,
)
from slipstream.kernels.gated_delta.spans import RecurrentRows
from slipstream.kernels.norm_rope_write.rows import Rope

AnyArray = NDArray[Any]
IntArray = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Span:
    """One slot's tokens in one pass: certain tokens first, drafts last."""

    slot: int
    token_ids: Sequence[int]
    n_past: int  # tokens of the slot whose state is committed in the store this pass writes
    n_drafts: int  # trailing tokens that are provisional
    n_logits: int  # trailing rows whose logits are wanted
    images: Sequence[PlacedImage] = NO_IMAGES  # of the whole sequence, as far as the network sees them

    @property
    def end(self) -> int:
        return self.n_past + len(self.token_ids)


def numbered(device: torch.device) -> torch.device:
    """A GPU by its number, as its tensors name it and devices can be compared: `cuda` alone is the current one."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def use_device(device: torch.device) -> None:
    """Make a GPU the one that this thread launches on: kernels of our own go to the thread's current device."""
    if device.type == "cuda":
        torch.cuda.set_device(numbered(device))


def upload(arrays: Sequence[AnyArray], device: torch.device) -> list[Tensor]:
    """The arrays on the device, which get there in one copy; the host does not wait for it."""
    if device.type == "cpu":
        return [torch.from_numpy(one) for one in arrays]
    layout = Layout.of(arrays)
    host = np.empty(layout.n_bytes, np.uint8)
    for one, place in zip(arrays, layout.arrays(host), strict=True):
        place[...] = one
    return layout.tensors(torch.from_numpy(host).pin_memory().to(device, non_blocking=True))


class Download:
    """Values on their way from a device. Reading them waits for what was launched before, and for nothing later.

    A device that never delivers is noticed by the service, which watches how long a step takes (`--step-timeout`).
    """

    def __init__(self, values: Tensor) -> None:
        self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
        self._host.copy_(values, non_blocking=True)
        self._wait: Callable[[], None] = lambda: None
        if values.is_cuda:
            arrived: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
            self._wait = arrived.synchronize

    def read(self) -> Tensor:
        """The values on the host."""
        self._wait()
        return self._host


@dataclass(frozen=True, slots=True)
class Layout:
    """Where arrays lie in one buffer of bytes."""

    shapes: Sequence[tuple[int, ...]]
    dtypes: Sequence[np.dtype[Any]]
    places: Sequence[slice]  # in bytes, each from a multiple of 16 on
    n_bytes: int

    @classmethod
    def of(cls, arrays: Sequence[AnyArray]) -> Layout:
        places, end = [], 0
        for one in arrays:
            places.append(slice(end, end + one.nbytes))
            end += -(-one.nbytes // 16) * 16
        n_bytes = max(end, 16)  # torch gives a tensor without a byte no stride, and then no other dtype
        return cls([one.shape for one in arrays], [one.dtype for one in arrays], places, n_bytes)

    def arrays(self, buffer: NDArray[np.uint8]) -> list[AnyArray]:
        """The arrays in a buffer of the host, [n_bytes]."""
        kinds = zip(self.shapes, self.dtypes, self.places, strict=True)
        return [buffer[place].view(dtype).reshape(shape) for shape, dtype, place in kinds]

    def tensors(self, buffer: Tensor) -> list[Tensor]:
        """The same in a buffer of a device, [n_bytes] uint8."""
        kinds = zip(self.shapes, self.dtypes, self.places, strict=True)
        return [
            buffer[place].view(torch.from_numpy(np.empty(0, dtype)).dtype).view(shape)
            for shape, dtype, place in kinds
        ]


@dataclass(frozen=True, slots=True)
class Batch:
    """The spans of one pass as device tensors. Span i owns rows span_starts[i] … span_starts[i + 1] - 1."""

    spans: Sequence[Span]
    token_ids: Tensor  # [n_tokens] int64
    positions: Tensor  # [n_tokens] int64: absolute position of each row
    span_starts: Tensor  # [n_spans + 1] int32
    n_past: Tensor  # [n_spans] int32: positions of the page table before the span's first row
    page_table: Tensor  # [n_spans, n_pages_max] int32: page ids from the store's first row on; 0 past the end
    row_pages: Tensor  # [n_tokens] int64: page id that holds each row's position
    row_offsets: Tensor  # [n_tokens] int64: place of the row within its page
    logit_index: Tensor  # [n_logits] int64: rows whose logits are wanted
    recurrent: RecurrentRows | None = None  # for networks with recurrent layers
    window: Batch | None = None  # the same rows in the pages of layers that look back over a window
    images: ImageRows | None = None  # rows that are no tokens
    wholes: Tensor | None = None  # [n_tokens, 2] int32: as `kernels.attention.spans.Spans` has them
    rope: Rope | None = None  # angles of these rows, which `positions` then counts; None: those of the layers
    frame: object = None  # the `engine.frames.Frame` whose tensors these are, padded; None: its own

    @classmethod
    def build(
        cls,
        spans: Sequence[Span],
        tables: Sequence[Sequence[int]],
        page_size: int,
        device: torch.device,
        recurrent: RecurrentRows | None = None,
        begins: Sequence[int] = (),
    ) -> Batch:
        """`tables[i]` is the page table of span i's slot; it covers the span's last position.

        begins[i]: the position at which table i begins, on a page border; all begin at 0 if it is empty. Attention sees
        what the table holds and nothing before; rotations are those of the true positions.
        """
        lengths = np.array([len(span.token_ids) for span in spans], dtype=np.int64)
        past = np.array([span.n_past for span in spans], dtype=np.int64)
        seen = past - np.array(begins, dtype=np.int64) if begins else past
        starts = np.zeros(len(spans) + 1, dtype=np.int64)
        np.cumsum(lengths, out=starts[1:])
        owner = np.repeat(np.arange(len(spans)), lengths)
        within = np.arange(starts[-1]) - starts[:-1][owner]
        indices = past[owner] + within
        stretches = _stretches(spans, begins)
        positions = np.concatenate([one.positions for one in stretches]) if stretches else indices
        table = _joined(tables)
        token_ids = np.concatenate([np.asarray(span.token_ids, dtype=np.int64) for span in spans])
        index = [np.arange(end - span.n_logits, end) for span, end in zip(spans, starts[1:], strict=True)]
        arrays: tuple[AnyArray, ...] = (
            token_ids,
            positions,
            starts.astype(np.int32),
            seen.astype(np.int32),
            table,
            table[owner, (seen[owner] + within) // page_size].astype(np.int64),
            indices % page_size,
            np.concatenate(index).astype(np.int64),
        )
        parts: dict[str, Any] = dict(zip(_OWN, upload(arrays, device), strict=True))
        images = image_rows(stretches)
        return cls(
            spans=spans,
            **parts,
            recurrent=recurrent,
            images=images,
            wholes=wholes_of(stretches, windowed=False),
        )

    def on_pages(self, tables: Sequence[Sequence[int]], page_size: int, begins: Sequence[int] = ()) -> Batch:
        """The same rows, on the host, in the pages of layers with a window. tables, begins: as in `build`, from
        the same begins on.
        """
        spans = zip(self.spans, self.n_past.tolist(), tables, strict=True)
        pages = [
            one[place // page_size]
            for span, n_past, one in spans
            for place in range(n_past, n_past + len(span.token_ids))
        ]
        return replace(
            self,
            page_table=torch.from_numpy(_joined(tables)),
            row_pages=torch.from_numpy(np.array(pages, dtype=np.int64)),
            wholes=wholes_of(_stretches(self.spans, begins), windowed=True),
        )

    def move_back(self, n_lost: Tensor, page_size: int) -> None:
        """Move spans to earlier positions, which the host did not know when it built the batch.

        Only for stores whose state is paged. n_lost: [n_spans] int64, positions by which each span begins earlier. Its
        page table covers both places.
        """
        lengths = np.array([len(span.token_ids) for span in self.spans])
        owners = np.repeat(np.arange(len(lengths)), lengths)
        places = np.arange(len(owners)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        owner, within = upload((owners, places), n_lost.device)  # [n_tokens] int64 each
        n = len(owner)
        self.positions[:n].sub_(n_lost[owner])
        self.n_past[: len(lengths)].sub_(n_lost)
        place = self.n_past[owner] + within
        self.row_pages[:n].copy_(self.page_table[owner, place // page_size])
        self.row_offsets[:n].copy_(place % page_size)

    def to(self, device: torch.device) -> Batch:
        """A batch of the host on the device."""
        if device.type == "cpu":
            return self
        shown, seen = self.parts, self._seen
        plain = {name: one for name, one in shown.items() if name not in seen}
        sent = dict(zip(plain, upload([one.numpy() for one in plain.values()], device), strict=True))
        # Most are there already.
        there = {name: one.to(device, non_blocking=True) for name, one in seen.items()}
        return self.with_parts({**sent, **there})

    @classmethod
    def of_parts(cls, parts: Mapping[str, Tensor]) -> Batch:
        """A batch that is computed as it is, whosever spans it has. parts: as `parts` names them."""
        own: dict[str, Any] = {name: parts[name] for name in _OWN}
        recurrent = window = images = None
        if _OF_RECURRENT[0] in parts:
            recurrent = RecurrentRows(*(parts[name] for name in _OF_RECURRENT))
        if _OF_WINDOW[0] in parts:
            paged = {name: parts[of] for name, of in zip(_WINDOW, _OF_WINDOW, strict=True)}
            window = cls(spans=(), **(own | paged), wholes=parts.get(_WINDOW_WHOLES))
        if _OF_IMAGES[0] in parts:
            found = zip(_IMAGES, _OF_IMAGES, strict=True)
            images = ImageRows(**{name: parts[of] for name, of in found if of in parts})
        wholes = parts.get(_WHOLES)
        return cls(spans=(), **own, recurrent=recurrent, window=window, images=images, wholes=wholes)

    @property
    def parts(self) -> dict[str, Tensor]:
        """All that changes from pass to pass, by name; what recurrent layers and windows have is named after them."""
        parts = {name: getattr(self, name) for name in _OWN}
        if self.recurrent is not None:
            parts |= zip(_OF_RECURRENT, self.recurrent.tensors, strict=True)
        if self.window is not None:
            parts |= {of: getattr(self.window, name) for name, of in zip(_WINDOW, _OF_WINDOW, strict=True)}
        return parts | self._seen

    @property
    def _seen(self) -> dict[str, Tensor]:
        """What only passes with images have, by name."""
        images = {} if self.images is None else self.images.parts
        found = {f"images.{name}": one for name, one in images.items()}
        if self.wholes is not None:
            found[_WHOLES] = self.wholes
        if self.window is not None and self.window.wholes is not None:
            found[_WINDOW_WHOLES] = self.window.wholes
        return found

    @property
    def has_images(self) -> bool:
        """Whether it is of no fixed size, as rows of images or what they see are in it."""
        return bool(self._seen)

    def with_parts(self, parts: Mapping[str, Tensor]) -> Batch:
        """The same spans with other tensors, named as `parts` names them."""
        made = Batch.of_parts(parts)
        return replace(made, spans=self.spans, frame=self.frame)


# What every pass has.
_OWN = (
    *("token_ids", "positions", "span_starts", "n_past"),
    *("page_table", "row_pages", "row_offsets", "logit_index"),
)
_WINDOW = ("page_table", "row_pages")  # where it differs from the batch around it
_IMAGES = tuple(one.name for one in fields(ImageRows))
_OF_RECURRENT = tuple(f"recurrent.{one.name}" for one in fields(RecurrentRows))
_OF_WINDOW = tuple(f"window.{name}" for name in _WINDOW)
_OF_IMAGES = tuple(f"images.{name}" for name in _IMAGES)
_WHOLES, _WINDOW_WHOLES = "wholes", "window.wholes"


def _stretches(spans: Sequence[Span], begins: Sequence[int]) -> Sequence[Stretch]:
    """The spans within their sequences; none if none of these has images."""
    if not any(span.images for span in spans):
        return ()
    places = zip(spans, begins or [0] * len(spans), strict=True)
    return [Stretch(span.images, span.n_past, span.end, begin) for span, begin in places]


def _joined(tables: Sequence[Sequence[int]]) -> IntArray:
    """[n_spans, n_pages_max] int32."""
    table = np.zeros((len(tables), max(len(one) for one in tables)), dtype=np.int32)
    for i, one in enumerate(tables):
        table[i, : len(one)] = one
    return table
