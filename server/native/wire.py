"""Bodies of llama-server's own endpoints, under its names."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, FailFast, Field

MAX_PIECES = 16384  # a piece costs a call each

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]


class Wire(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class Tokenize(Wire):
    content: str = ""
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class Detokenize(Wire):
    tokens: Annotated[list[TokenId], FailFast()] = Field(default_factory=list)


class EraseSlot(Wire):
    cache_salt: str | None = Field(None, max_length=256)


class SlotFile(EraseSlot):
    filename: str = Field(max_length=256)  # the engine knows which names can be
