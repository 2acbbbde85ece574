"""Models of the nested objects that clients may send, for the OpenAPI document only.

Requests are not validated by these models but by the functions in `structured.py`, `tools.py` and `readers.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from slipstream.server.describe.shape import optional

FUNCTION_NAME = "[A-Za-z0-9_.-]{1,64}"
Name = Annotated[str, Field(pattern=f"^{FUNCTION_NAME}$")]
Schema = dict[str, Any]


class Sent(BaseModel):
    """An object in a request; what it holds beside these fields is ignored."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class TextPart(BaseModel):
    """A text among the parts of a content list."""

    type: Literal["text"]
    text: str


class ImageUrl(Sent):
    url: str = Field(
        min_length=1,
        description="`data:image/png;base64,…` (or jpeg, webp, gif); an http or https address, with"
        " `--allow-remote-images`; a `file:` address, with `--media-path`",
    )
    detail: Literal["auto", "low", "high", "original"] | None = optional(
        "accepted, without influence: the model's files and `--image-max-tokens` say how an image is scaled"
    )


class ImageUrlPart(BaseModel):
    """An image among the parts of a turn."""

    type: Literal["image_url"]
    image_url: ImageUrl | str


class FunctionDefinition(Sent):
    name: Name
    description: str | None = optional("shown to the model")
    parameters: Schema | None = optional("JSON schema of the arguments")
    strict: bool | None = optional("accepted: arguments always follow the schema where calls are forced")


class ToolDefinition(Sent):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Sent):
    name: Name


class NamedTool(Sent):
    type: Literal["function"]
    function: FunctionName


class AllowedToolList(Sent):
    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, description="functions the model may call")


class AllowedTools(Sent):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolList


class FunctionCall(Sent):
    name: Name
    arguments: str | dict[str, Any] = Field(description="JSON text, or the object")


class CallOfMessage(Sent):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class NamedSchema(Sent):
    name: str | None = None
    schema_: Schema | str | None = optional("the JSON schema; without one: any JSON", alias="schema")
    strict: bool | None = optional("accepted: the reply always follows the schema")


class TextFormat(Sent):
    type: Literal["text"]


class JsonObjectFormat(Sent):
    type: Literal["json_object"]
    schema_: Schema | str | None = optional("llama-server's way to give a schema", alias="schema")


class JsonSchemaFormat(Sent):
    type: Literal["json_schema"]
    json_schema: NamedSchema | None = optional("OpenAI's place for the schema")
    schema_: Schema | str | None = optional("llama-server's place for it", alias="schema")


class OneConstraint(Sent):
    """vLLM's `structured_outputs`: one of these."""

    model_config = ConfigDict(extra="forbid")

    json_: Schema | str | None = optional("a JSON schema, as an object or as text", alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = optional("in GBNF or Lark")
    json_object: bool | None = None


Format = TextFormat | JsonObjectFormat | JsonSchemaFormat
