"""Base classes of the models in the OpenAPI document: `Shape` for replies, `Error` for error bodies; and `optional`.

The server does not build its replies from these models: they only describe them, and tests check replies against them.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


def optional(meaning: str, **limits: Any) -> Any:
    """A field that may be absent, with its description and further arguments of `Field`."""
    return Field(None, description=meaning, **limits)


class Shape(BaseModel):
    """A reply, or a part of one. A field with a default may be absent; a later version may add fields."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, protected_namespaces=())


class ErrorDetail(Shape):
    message: str = Field(description="names the field, the limit and the setting; never the input")
    type: str
    param: str | None = Field(description="the field it is about, as in `messages[0].content`")
    code: str | None
    n_prompt_tokens: int | None = optional("with `context_length_exceeded`")
    n_ctx: int | None = optional("with `context_length_exceeded`")


class Error(Shape):
    """Every refusal and failure, with any status."""

    error: ErrorDetail
