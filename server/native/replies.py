"""Models of the replies of llama-server's own endpoints, for the OpenAPI document and its tests."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slipstream.server.describe.shape import Shape


class Piece(Shape):
    id: int
    piece: str


class Tokens(Shape):
    tokens: list[int] | list[Piece] = Field(description="token ids; with `with_pieces` objects")


class Content(Shape):
    content: str


class Adapter(Shape):
    """A LoRA adapter; there are none, so lists of them are empty."""

    id: int
    scale: float


class Success(Shape):
    success: Literal[True]


class SaveTimings(Shape):
    save_ms: float


class RestoreTimings(Shape):
    restore_ms: float


class SlotSaved(Shape):
    id_slot: int
    filename: str
    n_saved: int = Field(description="tokens written")
    n_written: int = Field(description="bytes of the file")
    timings: SaveTimings


class SlotRestored(Shape):
    id_slot: int
    filename: str
    n_restored: int = Field(description="tokens the next request that begins with them is spared")
    n_read: int = Field(description="bytes of the file")
    timings: RestoreTimings


class SlotErased(Shape):
    id_slot: int
    n_erased: int = Field(description="tokens forgotten")
