"""Models of the replies of llama-server's own endpoints, for the OpenAPI document and its tests."""

from __future__ import annotations

from pydantic import Field

from slipstream.server.describe.shape import Shape, optional


class Piece(Shape):
    id: int
    piece: str


class Tokens(Shape):
    tokens: list[int] | list[Piece] = Field(description="token ids; with `with_pieces` objects")
    count: int | None = optional("for a `prompt`: how many")
    max_model_len: int | None = optional("for a `prompt`: most tokens of a sequence")


class Content(Shape):
    content: str
    prompt: str = Field(description="the same under vLLM's name")


class TokenizerInfo(Shape):
    """What evaluation harnesses ask vLLM for, to tokenize through the server."""

    bos_token: str | None
    eos_token: str | None
    chat_template: str | None
    max_model_len: int = Field(description="most tokens of a sequence")


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
