"""The turns of a request's `messages`: models of their blocks, and the messages of a chat that they make."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    Tag,
    ValidationInfo,
)

from slipstream.server.describe.shape import optional
from slipstream.server.http.body import type_of, wrong
from slipstream.server.http.error_table import bad_field
from slipstream.server.images.image_part import ImagePart, Placed, images_in, joined
from slipstream.server.openai import sent
from slipstream.server.openai.readers import read_content
from slipstream.server.openai.tools import MAX_CALLS
from slipstream.server.openai.wire import MAX_MESSAGES, Message

KIND = "which block it is"
MEDIA = ("image/png", "image/jpeg", "image/webp", "image/gif")
CALL_PREFIX = "toolu_"  # of the ids of calls; templates get the rest, as some have rules for it


def read_texts(value: Any) -> Any:
    """A string, or a list of text blocks; null is no text."""
    return "" if value is None else read_content(value)


def read_result(value: Any) -> Any:
    """What a tool returned: a text, or texts and images."""
    if not isinstance(value, list) or not any(type_of(one) == "image" for one in value):
        return read_texts(value)
    return [
        ImagePart(read_source(one.get("source"))) if type_of(one) == "image" else read_content([one])
        for one in value
    ]


def read_source(value: Any) -> Any:
    """Where an image is to be had, as an address."""
    if type_of(value) == "url" and isinstance(value.get("url"), str):
        return value["url"]
    if type_of(value) == "base64":
        kind, data = value.get("media_type"), value.get("data")
        if kind in MEDIA and isinstance(data, str):
            return f"data:{kind};base64,{data}"
        raise wrong(f"a base64 source should have data, and as its media_type one of {', '.join(MEDIA)}")
    raise wrong("an image's source should be of the type base64 or url", code="unsupported_value")


def read_arguments(value: Any) -> Any:
    """A call's arguments as JSON text."""
    if not isinstance(value, dict):
        raise wrong("Input should be an object")
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError:
        raise wrong("Input is nested too deeply") from None


class Base64Source(sent.Sent):
    type: Literal["base64"]
    media_type: Literal[MEDIA]  # type: ignore[valid-type]
    data: str


class UrlSource(sent.Sent):
    type: Literal["url"]
    url: str = Field(description="read where the server is allowed to (`--allow-remote-images`)")


class SentImage(sent.Sent):
    type: Literal["image"]
    source: Base64Source | UrlSource


Result = Annotated[
    str | list[str | ImagePart],
    BeforeValidator(read_result, str | list[sent.TextPart | SentImage] | None),
]


class Block(BaseModel):
    """A block of content; what it holds beside its fields is ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")


class TextBlock(Block):
    type: Literal["text"] = Field(description=KIND)
    text: str = Field(description="the text")


class ImageBlock(Block):
    type: Literal["image"] = Field(description=KIND)
    source: Annotated[str, BeforeValidator(read_source, Base64Source | UrlSource)] = Field(
        description="the image, or where it is"
    )


class ThinkingBlock(Block):
    """An earlier turn's thinking, for templates that show it."""

    type: Literal["thinking"] = Field(description=KIND)
    thinking: str = Field(description="the text of it")
    signature: str | None = optional("accepted, without influence")


class RedactedThinkingBlock(Block):
    """Accepted and left out: there is nothing to read in it."""

    type: Literal["redacted_thinking"] = Field(description=KIND)


class ToolUseBlock(Block):
    type: Literal["tool_use"] = Field(description=KIND)
    id: str = Field(max_length=256, description="what the call's result refers to")
    name: sent.Name = Field(description="the tool")
    input: Annotated[str, BeforeValidator(read_arguments, dict[str, Any])] = Field(
        description="the call's arguments"
    )


class ToolResultBlock(Block):
    type: Literal["tool_result"] = Field(description=KIND)
    tool_use_id: str = Field(max_length=256, description="the call that it answers")
    content: Result = Field("", description="a text, or a list of text and image blocks")
    is_error: bool | None = optional("accepted: the model is shown the content alone")


AnyBlock = TextBlock | ImageBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock
# The types of blocks that each role may have.
KINDS = {
    "system": ("text",),
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}
ALL_KINDS = ("text", "image", "thinking", "redacted_thinking", "tool_use", "tool_result")


def read_block(value: Any) -> Any:
    if not isinstance(type_of(value), str):
        raise wrong("Input should be an object with a type")
    if value["type"] not in ALL_KINDS:
        raise wrong(
            f"only blocks of the types {', '.join(ALL_KINDS)} are supported", code="unsupported_value"
        )
    return value


def read_blocks(value: Any) -> Any:
    """A text, or a list of blocks."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise wrong("Input should be a string or a list of blocks")
    return value


def check_kinds(blocks: list[AnyBlock], info: ValidationInfo) -> list[AnyBlock]:
    """Raises an error for a block that the turn's role cannot have."""
    role = info.data.get("role")
    allowed = KINDS.get(role or "", ALL_KINDS)
    found = next((one.type for one in blocks if one.type not in allowed), None)
    if found is not None:
        raise wrong(f"a turn of the {role} has no blocks of the type {found}")
    return blocks


OneBlock = Annotated[
    Annotated[TextBlock, Tag(":text")]
    | Annotated[ImageBlock, Tag(":image")]
    | Annotated[ThinkingBlock, Tag(":thinking")]
    | Annotated[RedactedThinkingBlock, Tag(":redacted_thinking")]
    | Annotated[ToolUseBlock, Tag(":tool_use")]
    | Annotated[ToolResultBlock, Tag(":tool_result")],
    # The colon marks a name in an error's location that is no field (`http/body.py`).
    Discriminator(lambda value: f":{value['type']}"),
    BeforeValidator(read_block, AnyBlock),
]
Blocks = Annotated[
    list[OneBlock],
    FailFast(),
    BeforeValidator(read_blocks, str | list[AnyBlock]),
    AfterValidator(check_kinds),
]


class Turn(BaseModel):
    """A turn of the conversation. Turns of one role that follow each other are one."""

    model_config = ConfigDict(strict=True, extra="ignore")

    role: Literal["user", "assistant", "system"] = Field(description="who speaks")
    content: Blocks = Field(description="a text, or a list of blocks")


Turns = Annotated[list[Turn], FailFast(), Field(min_length=1, max_length=MAX_MESSAGES)]


def images_of(turns: Iterable[Turn]) -> Iterator[Placed]:
    """The images of a conversation, in the order in which its messages have them."""
    for index, turn in enumerate(turns):
        for number, block in enumerate(turn.content):
            place = f"messages[{index}].content[{number}]"
            if isinstance(block, ImageBlock):
                yield f"{place}.source", ImagePart(block.source)
            elif isinstance(block, ToolResultBlock):
                yield from images_in(block.content, f"{place}.content", ".source")


def chat_messages(system: str | None, turns: Iterable[Turn]) -> list[Message]:
    """The messages of a chat that a system prompt and turns make: what one role says in a row is one message.

    Raises `Refused` if they are too many.
    """
    runs: list[list[dict[str, Any]]] = [[{"role": "system", "content": system}]] if system else []
    for turn in turns:
        for part in _parts(turn):
            if runs and _goes_on(runs[-1][-1], part):
                runs[-1].append(part)
            else:
                runs.append([part])
    if len(runs) > MAX_MESSAGES:
        reason = f"its blocks make {len(runs)} turns of a chat; at most {MAX_MESSAGES} are allowed"
        raise bad_field("messages", reason)
    return [_joined(run) for run in runs]


def _parts(turn: Turn) -> Iterable[dict[str, Any]]:
    """A message for each block of a turn; an empty one for a turn without blocks that can be shown."""
    made = [_part(turn.role, block) for block in turn.content if not isinstance(block, RedactedThinkingBlock)]
    return made or [{"role": turn.role, "content": ""}]


def _part(role: str, block: AnyBlock) -> dict[str, Any]:
    if isinstance(block, ThinkingBlock):
        return {"role": role, "reasoning_content": block.thinking}
    if isinstance(block, ToolUseBlock):
        function = {"name": block.name, "arguments": block.input}
        call = {"id": block.id.removeprefix(CALL_PREFIX), "type": "function", "function": function}
        return {"role": role, "tool_calls": [call]}
    if isinstance(block, ToolResultBlock):
        call_id = block.tool_use_id.removeprefix(CALL_PREFIX)
        return {"role": "tool", "tool_call_id": call_id, "content": block.content}
    if isinstance(block, ImageBlock):
        return {"role": role, "content": [ImagePart(block.source)]}
    assert isinstance(block, TextBlock)
    return {"role": role, "content": block.text}


def _goes_on(last: dict[str, Any], part: dict[str, Any]) -> bool:
    return bool(last["role"] == part["role"]) and part["role"] in ("user", "assistant")


def _joined(parts: Sequence[dict[str, Any]]) -> Message:
    """The message of parts that follow each other in one role. Raises `Refused` for too many calls."""
    fields = dict(parts[0])
    for name in ("reasoning_content", "content"):
        if any(name in part for part in parts):
            fields[name] = joined(part[name] for part in parts if name in part)
    calls = [call for part in parts for call in part.get("tool_calls", ())]
    if len(calls) > MAX_CALLS:
        reason = f"a turn of the assistant has {len(calls)} calls; at most {MAX_CALLS} are allowed"
        raise bad_field("messages", reason)
    if calls:
        fields["tool_calls"] = calls
    fields.setdefault("content", None if calls else "")  # some templates add it to a text
    return Message.model_construct(**fields)
