"""The models that every reply is described with: its own root class, and the body of every error.

Replies themselves are made without these: they are for the OpenAPI document, and tests hold replies against it.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Shape(BaseModel):
    """A reply, or a part of one. A field with a default may be absent; a later version may add fields."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, protected_namespaces=())


class ErrorDetail(Shape):
    message: str = Field(description="names the field, the limit and the setting; never the input")
    type: str
    param: str | None = Field(description="the field it is about, as in `messages[0].content`")
    code: str | None
    n_prompt_tokens: int | None = Field(None, description="with `context_length_exceeded`")
    n_ctx: int | None = Field(None, description="with `context_length_exceeded`")


class Error(Shape):
    """Every refusal and failure, with any status."""

    error: ErrorDetail
