"""Request bodies of llama-server's own endpoints, with its names of fields."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, FailFast, Field, RootModel, model_validator

from slipstream.server.describe.shape import optional
from slipstream.server.openai.wire import ChatRequest

MAX_PIECES = 16384

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]


class Wire(BaseModel):
    """A field that is null is absent."""

    model_config = ConfigDict(strict=True, extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        return (
            {name: one for name, one in given.items() if one is not None}
            if isinstance(given, dict)
            else given
        )


class Tokenize(Wire):
    content: str = Field("", description="the text")
    add_special: bool = Field(default=False, description="add the tokens the model expects at a text's start")
    parse_special: bool = Field(default=True, description="read control tokens in the text as such")
    with_pieces: bool = Field(default=False, description="return the text of each token too")
    prompt: str | None = optional("vLLM's name of `content`; the reply then has vLLM's fields")
    add_special_tokens: bool | None = optional("vLLM's name of `add_special`, on by default beside `prompt`")

    @property
    def text(self) -> str:
        return self.content if self.prompt is None else self.prompt

    @property
    def adds_special(self) -> bool:
        if self.add_special_tokens is None:
            return self.add_special or self.prompt is not None
        return self.add_special_tokens


class TokenizeChat(ChatRequest):
    """vLLM's other form: a conversation, which the template writes with the other fields of a chat."""

    with_pieces: bool | None = optional("return the text of each token too")


class Detokenize(Wire):
    tokens: Annotated[list[TokenId], FailFast()] = Field(default_factory=list, description="the token ids")


class NoAdapters(RootModel[list[Any]]):
    """The LoRA adapters to use: none, as they are not supported."""

    root: list[Any] = Field(max_length=0)


class EraseSlot(Wire):
    cache_salt: str | None = optional(
        "share cached prompts and slot files only with requests of the same salt", max_length=256
    )


class SlotFile(EraseSlot):
    # The engine checks which names are allowed.
    filename: str = Field(max_length=256, description="name of the file, without a folder")
