"""Models of what `/v1/messages` answers, for the OpenAPI document and the tests that check replies against it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from slipstream.server.describe.shape import Shape, optional
from slipstream.server.openai.replies import Metrics, Resolved, Timings


class MessageText(Shape):
    type: Literal["text"]
    text: str


class MessageThinking(Shape):
    type: Literal["thinking"]
    thinking: str
    signature: Literal[""] = Field(description="empty: there is nothing to prove here")


class MessageToolUse(Shape):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] = Field(
        description="the arguments; of a call that was cut short, what there is of them"
    )


class ThinkingCount(Shape):
    thinking_tokens: int


class MessageUsage(Shape):
    input_tokens: int = Field(
        description="tokens of the prompt that were computed; in `message_start` all of them"
    )
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: int = Field(description="tokens of the prompt that were cached")
    output_tokens: int
    output_tokens_details: ThinkingCount | None = optional("where thinking can be told from the rest")


StopReason = Literal["end_turn", "max_tokens", "tool_use", "stop_sequence"]
Content = MessageText | MessageThinking | MessageToolUse


class MessageExtras(Shape):
    """What other replies have on their root, too."""

    timings: Timings
    metrics: Metrics
    speculative: Resolved
    seed: int
    synthetic: Literal[True] | None = optional("drafts were accepted at random: the text means nothing")


class MessageBody(MessageExtras):
    """A message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Content]
    stop_reason: StopReason
    stop_sequence: str | None = Field(description="the stop sequence that ended it")
    usage: MessageUsage


class BegunMessage(Shape):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Content] = Field(max_length=0)
    stop_reason: None
    stop_sequence: None
    usage: MessageUsage


class MessageStart(Shape):
    type: Literal["message_start"]
    message: BegunMessage


class BlockStart(Shape):
    type: Literal["content_block_start"]
    index: int = Field(description="of the block, from 0")
    content_block: Content = Field(description="the block without its text")


class TextDelta(Shape):
    type: Literal["text_delta"]
    text: str


class ThinkingDelta(Shape):
    type: Literal["thinking_delta"]
    thinking: str


class SignatureDelta(Shape):
    type: Literal["signature_delta"]
    signature: Literal[""]


class InputDelta(Shape):
    type: Literal["input_json_delta"]
    partial_json: str


class BlockDelta(Shape):
    type: Literal["content_block_delta"]
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(Shape):
    type: Literal["content_block_stop"]
    index: int


class StopDelta(Shape):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDeltaEvent(MessageExtras):
    type: Literal["message_delta"]
    delta: StopDelta
    usage: MessageUsage


class MessageStop(Shape):
    type: Literal["message_stop"]


ErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "timeout_error",
    "request_too_large",
    "rate_limit_error",
    "overloaded_error",
    "api_error",
]


class MessagesProblem(Shape):
    type: ErrorType
    message: str = Field(description="begins with the field it is about, as in `messages.0.content`")


class MessagesError(Shape):
    """Every refusal and failure below `/v1/messages`, also within a stream."""

    type: Literal["error"]
    error: MessagesProblem
    request_id: str


# The events of a stream; each is named by its type.
EVENTS = (MessageStart, BlockStart, BlockDelta, BlockStop, MessageDeltaEvent, MessageStop, MessagesError)


class TokenCount(Shape):
    input_tokens: int
