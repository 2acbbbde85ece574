"""Models of what `/v1/responses` answers, for the OpenAPI document and the tests that check replies against it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from slipstream.server.describe.shape import Shape, optional
from slipstream.server.openai.replies import (
    Metrics,
    PromptProgress,
    Resolved,
    Timings,
    TimingsSoFar,
    TokenLogprob,
)

Status = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(Shape):
    type: Literal["output_text"]
    text: str
    annotations: list[Any] = Field(description="always empty")
    logprobs: list[TokenLogprob] | None = optional("with `include`; empty otherwise")


class ReasoningText(Shape):
    type: Literal["reasoning_text"]
    text: str


class SummaryText(Shape):
    type: Literal["summary_text"]
    text: str


class InputText(Shape):
    type: Literal["input_text"]
    text: str


class OutputMessage(Shape):
    id: str
    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    status: ItemStatus
    content: list[OutputText | InputText]


class ReasoningOutput(Shape):
    id: str
    type: Literal["reasoning"]
    summary: list[SummaryText] = Field(description="the whole thinking, if `reasoning.summary` asks for it")
    content: list[ReasoningText] = Field(description="the thinking, if it is not in the summary")
    encrypted_content: str | None = optional("with `include`: the thinking, to be given back")
    status: ItemStatus | None = None


class FunctionCallOutput(Shape):
    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = optional("of a function that was given in one")
    arguments: str = Field(description="JSON text")
    status: ItemStatus


class CustomCallOutput(Shape):
    id: str
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = optional("of a tool that was given in one")
    input: str = Field(description="the text for the tool")
    status: ItemStatus


class FunctionResult(Shape):
    id: str
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: str
    status: ItemStatus


OutputItem = OutputMessage | ReasoningOutput | FunctionCallOutput | CustomCallOutput


class InputDetails(Shape):
    cached_tokens: int = Field(description="prompt tokens taken from the prefix cache")
    image_tokens: int | None = optional("prompt tokens that are images, if there are any")
    cache_write_tokens: int


class OutputDetails(Shape):
    reasoning_tokens: int


class ResponseUsage(Shape):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(Shape):
    reason: Literal["max_output_tokens"]


class ResponseFailure(Shape):
    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class ReasoningShown(Shape):
    effort: str | None
    summary: str | None


class Response(Shape):
    """A response. What it says of the request is what was in force."""

    id: str
    object: Literal["response"]
    created_at: int = Field(description="Unix seconds")
    completed_at: int | None
    status: Status
    background: bool
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ReasoningShown
    service_tier: Literal["default"]
    store: bool = Field(description="whether the response is kept")
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    timings: Timings | None = optional("once it has ended")
    metrics: Metrics | None = optional("once it has ended")
    speculative: Resolved | None = optional("once it has ended")
    seed: int | None = optional("once it has ended")
    synthetic: bool | None = optional("drafts were accepted at random: the text means nothing")


class ResponseEvent(Shape):
    """An event of a stream: OpenAI's, in its order. Which fields it has follows from its type."""

    type: str
    sequence_number: int = Field(description="counts the events of a stream")
    response: Response | None = optional("of events about the response as a whole")
    output_index: int | None = optional("the item's place in `output`")
    item: OutputItem | None = optional("of events about an item as a whole")
    item_id: str | None = None
    content_index: int | None = None
    summary_index: int | None = None
    part: OutputText | ReasoningText | SummaryText | None = None
    prompt_progress: PromptProgress | None = optional("with `return_progress`, in events of their own")
    timings: Timings | TimingsSoFar | None = optional(
        "with `timings_per_token`, beside what is added, and at the end"
    )
    delta: str | None = optional("text to be joined to that before")
    text: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    logprobs: list[TokenLogprob] | None = None


class DeletedResponse(Shape):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ItemList(Shape):
    object: Literal["list"]
    data: list[OutputItem | FunctionResult]
    first_id: str | None
    last_id: str | None
    has_more: bool
