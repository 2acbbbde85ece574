"""The items of a request's `input`: models of those that are read, and the messages of a chat that they make."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, ValidationInfo

from slipstream.server.describe.shape import optional
from slipstream.server.http.body import type_of, wrong
from slipstream.server.images.image_part import Content, ImagePart, Placed, images_in
from slipstream.server.openai import sent
from slipstream.server.openai.readers import DETAILS, check_shows
from slipstream.server.openai.wire import MAX_MESSAGES, Message
from slipstream.server.responses.offered import as_arguments, flat_name
from slipstream.server.responses.output import unsealed

# An item may have each of these where a text is expected: what users, tools and earlier replies have written.
TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")


class Item(BaseModel):
    """An item; what it holds beside its fields is ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")

    id: str | None = optional("its id, if an earlier response had it", max_length=128)
    status: str | None = optional("accepted, without influence", max_length=32)


class ItemImage(BaseModel):
    """An image among the parts of a user's message, or of what a call came to."""

    type: Literal["input_image"]
    image_url: str = Field(
        description="`data:image/png;base64,…` (or jpeg, webp, gif); an http or https address, with"
        " `--allow-remote-images`; a `file:` address, with `--media-path`"
    )
    detail: Literal["auto", "low", "high", "original"] | None = optional("accepted, without influence")


class ItemText(BaseModel):
    """A text among the parts of an item's content."""

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal"]
    text: str | None = optional("the text")
    refusal: str | None = optional("the text of a refusal")


def read_texts(value: Any) -> Any:
    """A string, or a list of text parts, which are joined by line breaks."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong("Input should be a string or a list of text parts")
    texts = []
    for part in value:
        if not isinstance(type_of(part), str):
            raise wrong("Each part should be an object with a type")
        if part["type"] not in TEXTS:
            raise wrong(
                f"only parts of the types {', '.join(TEXTS)} are supported, and input_image from users and tools",
                code="unsupported_value",
            )
        text = part.get("refusal" if part["type"] == "refusal" else "text")
        if not isinstance(text, str):
            raise wrong("Each part should have its text as a string")
        texts.append(text)
    return "\n".join(texts)


def read_content(value: Any, info: ValidationInfo) -> Any:
    """A text, or texts and images; texts without images are joined by line breaks."""
    if not isinstance(value, list) or not any(type_of(one) == "input_image" for one in value):
        return read_texts(value)
    check_shows(info.data.get("role"))
    return [_image(one) if type_of(one) == "input_image" else read_texts([one]) for one in value]


def _image(part: dict[str, Any]) -> ImagePart:
    url, detail = part.get("image_url"), part.get("detail")
    if url is None and part.get("file_id") is not None:
        raise wrong("file_id: no files are kept here; give the image as image_url", code="unsupported_value")
    if not isinstance(url, str) or not url:
        raise wrong("Each input_image part should have an address in 'image_url'")
    if detail is not None and detail not in DETAILS:
        raise wrong(f"'detail' should be one of {', '.join(DETAILS)}")
    return ImagePart(url)


Contents = Annotated[
    str | list[str | ImagePart], BeforeValidator(read_content, str | list[ItemText | ItemImage])
]
SomeTexts = Annotated[str | None, BeforeValidator(read_texts, str | list[ItemText] | None)]


class MessageItem(Item):
    type: Literal["message"] = Field("message", description="may be left out")
    role: Literal["user", "assistant", "system", "developer"] = Field(description="who speaks")
    content: Contents = Field(description="a text, or a list of parts, texts and in a user's message images")


class FunctionCallItem(Item):
    type: Literal["function_call"] = Field(description="a call an earlier turn of the assistant made")
    call_id: str = Field(max_length=256, description="what the call's output refers to")
    name: sent.Name = Field(description="the function")
    namespace: sent.Name | None = optional("the namespace of the function, if it has one")
    arguments: str = Field(description="JSON text")


class CustomCallItem(Item):
    type: Literal["custom_tool_call"] = Field(description="a call of a tool that takes a text")
    call_id: str = Field(max_length=256, description="what the call's output refers to")
    name: sent.Name = Field(description="the tool")
    namespace: sent.Name | None = optional("the namespace of the tool, if it has one")
    input: str = Field(description="the text")


class FunctionOutputItem(Item):
    type: Literal["function_call_output"] = Field(description="what a call came to")
    call_id: str = Field(max_length=256, description="the call that it answers")
    output: Contents = Field(description="what the function returned, a text or texts and images")


class CustomOutputItem(FunctionOutputItem):
    type: Literal["custom_tool_call_output"] = Field(description="what a call of a custom tool came to")  # type: ignore[assignment]


class ReasoningItem(Item):
    """An earlier response's thinking, for templates that show it."""

    type: Literal["reasoning"] = Field(description="thinking")
    content: SomeTexts = optional("the thinking")
    summary: SomeTexts = optional(
        "read where there is neither content nor `encrypted_content` of this server"
    )
    encrypted_content: str | None = optional("read where there is no content, if this server made it")

    @property
    def text(self) -> str:
        return self.content or unsealed(self.encrypted_content or "") or self.summary or ""


class ItemReference(Item):
    """Stands for an item of a kept response."""

    type: Literal["item_reference"] = Field("item_reference", description="may be left out")
    id: str = Field(max_length=128, description="the item's id")


Call = FunctionCallItem | CustomCallItem
AnyItem = MessageItem | Call | FunctionOutputItem | CustomOutputItem | ReasoningItem | ItemReference
KINDS = (
    *("message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"),
    *("reasoning", "item_reference"),
)


def _kind(value: dict[str, Any]) -> str:
    """The type of an item: one without is a message or, if it has nothing but an id, a reference."""
    kind = value.get("type")
    if kind is None:
        return "message" if "role" in value or "content" in value else "item_reference"
    return kind if isinstance(kind, str) else ""


def read_item(value: Any) -> Any:
    if not isinstance(value, dict):
        raise wrong("Input should be an object with a type")
    if _kind(value) not in KINDS:
        raise wrong(f"only items of the types {', '.join(KINDS)} are supported", code="unsupported_value")
    return value


def read_input(value: Any) -> Any:
    """A text, or a list of items."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise wrong("Input should be a string or a list of items")
    if len(value) > MAX_MESSAGES:
        raise wrong(f"Input should have at most {MAX_MESSAGES} items")
    return value


Items = Annotated[
    list[
        Annotated[
            Annotated[MessageItem, Tag(":message")]
            | Annotated[FunctionCallItem, Tag(":function_call")]
            | Annotated[FunctionOutputItem, Tag(":function_call_output")]
            | Annotated[CustomCallItem, Tag(":custom_tool_call")]
            | Annotated[CustomOutputItem, Tag(":custom_tool_call_output")]
            | Annotated[ReasoningItem, Tag(":reasoning")]
            | Annotated[ItemReference, Tag(":item_reference")],
            # The colon marks a name in an error's location that is no field (`http/body.py`).
            Discriminator(lambda value: f":{_kind(value)}"),
            BeforeValidator(read_item, AnyItem),
        ]
    ],
    BeforeValidator(read_input, str | list[AnyItem]),
]


# What a message of the assistant may hold, in the order in which it is written.
PARTS = ("reasoning_content", "content", "tool_calls")
SYSTEM = ("system", "developer")


def messages_of(items: Iterable[AnyItem], instructions: str | None) -> list[Message]:
    """The conversation that items make: what the assistant thinks, says and calls in a row is one message.

    Instructions and system messages at the beginning are one message, as many templates allow only one.
    """
    messages: list[dict[str, Any]] = []
    for item in items:
        part = _message(item)
        if messages and _goes_on(messages[-1], part):
            calls = [*messages[-1].get("tool_calls", ()), *part.get("tool_calls", ())]
            messages[-1] |= part | ({"tool_calls": calls} if calls else {})
        else:
            messages.append(part)
    n_head = next((i for i, one in enumerate(messages) if one["role"] not in SYSTEM), len(messages))
    head = [text for text in (instructions, *(one["content"] for one in messages[:n_head])) if text]
    if head:
        messages[:n_head] = [
            {"role": messages[0]["role"] if n_head else "system", "content": "\n\n".join(head)}
        ]
    for one in messages:
        one.setdefault("content", None if "tool_calls" in one else "")
    return [Message.model_construct(**one) for one in messages]


def _message(item: AnyItem) -> dict[str, Any]:
    """An item as a message, or as a part of the assistant's. Raises TypeError for a reference."""
    if isinstance(item, MessageItem):
        return {"role": item.role, "content": item.content}
    if isinstance(item, Call):
        arguments = as_arguments(item.input) if isinstance(item, CustomCallItem) else item.arguments
        function = {"name": flat_name(item.namespace, item.name), "arguments": arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        return {"role": "assistant", "tool_calls": [call]}
    if isinstance(item, FunctionOutputItem):
        return {"role": "tool", "tool_call_id": item.call_id, "content": item.output}
    if isinstance(item, ReasoningItem):
        return {"role": "assistant", "reasoning_content": item.text}
    raise TypeError("a reference is no message")


def images_of(items: Iterable[AnyItem], name: str = "") -> Iterator[Placed]:
    """The images of items, in the order of their messages. name: the field that they came from, if not `input`."""
    for index, item in enumerate(items):
        for field in ("content", "output"):
            content = getattr(item, field, None)
            if isinstance(content, list):
                placed = images_in(content, f"input[{index}].{field}", ".image_url")
                yield from ((name or place, part) for place, part in placed)


def _goes_on(last: Mapping[str, Any], part: Mapping[str, Any]) -> bool:
    """Whether a part belongs to the last message: both are the assistant's, and in their order."""
    if last["role"] != "assistant" or part["role"] != "assistant":
        return False
    first = next(i for i, name in enumerate(PARTS) if name in part)
    return not any(name in last for name in PARTS[first:]) or PARTS[first] == "tool_calls"


def shown(item: AnyItem, item_id: str) -> dict[str, Any]:
    """An item as it is listed and kept."""
    head = {"id": item.id or item_id, "type": item.type}
    if isinstance(item, MessageItem):
        content = _parts(item.content, "output_text" if item.role == "assistant" else "input_text")
        return {**head, "role": item.role, "content": content, "status": "completed"}
    if isinstance(item, ReasoningItem):
        content = [{"type": "reasoning_text", "text": item.text}]
        return {**head, "summary": [], "content": content}
    fields = item.model_dump(exclude={"id", "type", "status"}, exclude_none=True)
    if isinstance(item, FunctionOutputItem) and not isinstance(item.output, str):
        fields["output"] = _parts(item.output, "input_text")
    return {**head, **fields, "status": "completed"}


def _parts(content: Content, kind: str) -> list[dict[str, Any]]:
    """A content as parts, the texts of this kind. Images keep their addresses: a later request can show them."""
    more: dict[str, Any] = {"annotations": []} if kind == "output_text" else {}
    return [
        {"type": "input_image", "image_url": one.url, "detail": "auto"}
        if isinstance(one, ImagePart)
        else {"type": kind, "text": one, **more}
        for one in ([content] if isinstance(content, str) else content)
    ]
