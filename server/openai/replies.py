"""Models of the OpenAI endpoints' replies, for the OpenAPI document and the tests that check replies against it.

Replies themselves are made in `reply.py` and `forms.py`, without these. A field with a default may be absent.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slipstream.engine.drafting import WhyNot
from slipstream.server.describe.shape import Shape, optional
from slipstream.server.report.replies import DrafterFigures


class PromptDetails(Shape):
    cached_tokens: int = Field(description="prompt tokens taken from the prefix cache")
    image_tokens: int | None = optional("prompt tokens that are images, if there are any")


class CompletionDetails(Shape):
    accepted_prediction_tokens: int | None = optional("tokens of `prediction` that came true")
    rejected_prediction_tokens: int | None = optional("tokens of `prediction` that did not")
    reasoning_tokens: int | None = None


class Usage(Shape):
    """Token counts of a request. A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | None = None


class TimingsSoFar(Shape):
    """`timings` of a choice that goes on."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class RoundParts(Shape):
    """Milliseconds of a reply's generation by what the engine did, for all requests that moved on with it."""

    draft: float = Field(description="drafts were made")
    verify: float = Field(
        description="the model ran and was read; on a GPU also what draft networks take while the host waits"
    )
    host: float = Field(description="all else")


class Timings(TimingsSoFar):
    """llama-server's `timings`; of several choices the slowest one's."""

    predicted_parts_ms: RoundParts | None = optional("of `predicted_ms`; in the last chunk")

    draft_n: int | None = None
    draft_n_accepted: int | None = None
    drafters: dict[str, DrafterFigures] | None = None


class PromptProgress(Shape):
    """How far a prompt is, in tokens."""

    total: int
    cache: int = Field(description="taken from the prefix cache")
    processed: int = Field(description="there, cached tokens included")
    time_ms: float


class SpeculativeDecoding(Shape):
    """vLLM's figures of speculation; the histogram counts steps by accepted drafts."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_accepted_tokens_per_pos: list[int] = Field(description="[i]: at place i of their draft")
    num_draft_tokens_per_pos: list[int]
    num_spec_tokens: int


class Metrics(Shape):
    """vLLM's figures of a request."""

    time_to_first_token_ms: float
    generation_time_ms: float
    queue_time_ms: float
    mean_itl_ms: float
    tokens_per_second: float
    speculative_decoding: SpeculativeDecoding | None = None


class Resolved(Shape):
    """The speculation settings that were in force, after the server's limits."""

    types: list[str]
    n_max: int
    n_min: int
    p_min: float
    ngram_size_n: int | None = None
    ngram_size_m: int | None = None
    ngram_min_hits: int | None = None


class DraftedStep(Shape):
    """A step of a reply: what it drafted, and how much of that was kept. Behind the kept draft tokens comes one of the
    model's own, unless the reply ends before."""

    index: int = Field(description="of the reply's steps, from 0: the pass that ends the prompt")
    drafter: str | None = Field(
        description="who drafted most of the tokens (`sources` tells of each kept token); null: nothing was drafted"
    )
    drafted: list[int] = Field(description="token ids, at most `n_max`")
    drafted_pieces: list[str] = Field(
        description="what each would have written: control tokens their names, and a character that is spread over"
        " tokens with the last of them"
    )
    n_accepted: int = Field(description="how many of them are in the reply, from the first on")
    why_not: WhyNot | None = Field(
        description="why nothing was drafted, in the words of `GET /speculation`; null if something was, and where"
        " nothing could be: with tokens of the prompt, right before the limit, in a pass that had to be run again"
    )


class Detail(Shape):
    """`spec_detail`: which drafter guessed each token, each token's share of the text, and what was drafted besides."""

    sources: list[str | None]
    token_ids: list[int]
    pieces: list[str] | None = None
    steps: list[DraftedStep] = Field(
        description="those that brought the tokens, oldest first; where a client reads slowly, several at once"
    )


class Function(Shape):
    name: str
    arguments: str = Field(description="JSON text")


class ToolCall(Shape):
    id: str
    type: Literal["function"]
    function: Function


class AssistantMessage(Shape):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: None = None
    tool_calls: list[ToolCall] | None = None


class FunctionPiece(Shape):
    name: str | None = optional("in a call's first piece only")
    arguments: str | None = optional("to be joined to those before")


class ToolCallPiece(Shape):
    index: int
    id: str | None = optional("in a call's first piece only")
    type: Literal["function"] | None = None
    function: FunctionPiece


class MessageDelta(Shape):
    """What a chunk adds to a message; strings are to be joined."""

    role: Literal["assistant"] | None = optional("in a choice's first chunk only")
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallPiece] | None = None


class TopLogprob(Shape):
    token: str
    bytes: list[int] | None
    logprob: float


class TokenLogprob(Shape):
    token: str
    bytes: list[int] | None = Field(description="what the token writes; not always whole characters")
    logprob: float = Field(
        description="of the model's own row: before bias, penalties, grammar and temperature"
    )
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Shape):
    """Entries of the tokens that begin in the delivered text, thinking and calls included: none of an end token."""

    content: list[TokenLogprob] | None
    refusal: None = None


class TextLogprobs(Shape):
    """Lists of one entry per token that begins in the text, with `echo` also of an end token; nulls where nothing is
    before a token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class PromptToken(Shape):
    logprob: float
    rank: int = Field(description="1 of the likeliest")
    decoded_token: str


PromptLogprobs = list[dict[str, PromptToken] | None]
_OF_PROMPT = (
    "with `prompt_logprobs`: per token of the prompt, by token id, itself and the likeliest; null first"
)


class Choice(Shape):
    index: int
    stop_reason: str | int | None = optional(
        "the stop string or stop token that ended it, null if none did; where the choice ends"
    )
    token_ids: list[int] | None = optional("with `return_token_ids`")


class ChatChoice(Choice):
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatChunkChoice(Choice):
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None


class TextChoice(Choice):
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = optional(_OF_PROMPT)


class TextChunkChoice(Choice):
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    prompt_token_ids: list[int] | None = None


class Head(Shape):
    """What every reply and every chunk begins with; constant over a stream."""

    id: str
    created: int = Field(description="Unix seconds")
    model: str
    system_fingerprint: str = Field(description="changes with version, weights, dtype and drafters")
    service_tier: Literal["default"] | None = optional("with a `service_tier` of the request")


class Whole(Head):
    usage: Usage
    timings: Timings
    metrics: Metrics
    speculative: Resolved
    seed: int = Field(description="of the first choice; choice i has this plus i")
    synthetic: bool | None = optional("drafts were accepted at random: the text means nothing")
    spec: list[list[Detail]] | None = optional("with `spec_detail`: per choice, per step")
    prompt_token_ids: list[int] | None = optional("with `return_token_ids`")


class ChatCompletion(Whole):
    object: Literal["chat.completion"]
    prompt_logprobs: PromptLogprobs | None = optional(_OF_PROMPT)
    choices: list[ChatChoice]


class TextCompletion(Whole):
    object: Literal["text_completion"]
    choices: list[TextChoice]


class Chunk(Head):
    usage: Usage | None = optional("in the last chunk with `include_usage`")
    timings: Timings | None = optional(
        "in the last chunk; with `timings_per_token` in each, so far without drafts"
    )
    prompt_progress: PromptProgress | None = optional("with `return_progress`, in chunks of their own")
    metrics: Metrics | None = optional("in the last chunk")
    speculative: Resolved | None = optional("in the last chunk")
    seed: int | None = optional("in the last chunk")
    synthetic: bool | None = None
    spec: Detail | None = optional("with `spec_detail`")
    prompt_token_ids: list[int] | None = None


class ChatCompletionChunk(Chunk):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class TextCompletionChunk(Chunk):
    object: Literal["text_completion"]
    choices: list[TextChunkChoice]


class ModelMeta(Shape):
    architecture: str
    n_vocab: int
    n_ctx: int
    n_ctx_train: int
    n_embd: int = Field(description="width of a hidden state")
    n_params: int
    size: int


class ModelArchitecture(Shape):
    """What goes in and comes out, as OpenRouter and llama-server have it."""

    input_modalities: list[Literal["text", "image"]]
    output_modalities: list[Literal["text"]]


class ModelCard(Shape):
    id: str
    object: Literal["model"]
    type: Literal["model"]
    display_name: str = Field(description="the `id`; Anthropic's field")
    created: int = Field(description="when the server was started")
    created_at: str = Field(description="the same as text; Anthropic's field")
    owned_by: str
    max_model_len: int = Field(description="most tokens of one sequence")
    architecture: ModelArchitecture
    aliases: list[str] = Field(description="all names of the model, its `id` first (`--alias`)")
    tags: list[str] = Field(max_length=0)
    meta: ModelMeta


class OllamaDetails(Shape):
    family: str = Field(description="the model's architecture")
    parameter_size: str = Field(description="number of parameters, as in `0.6B`")


class OllamaModel(Shape):
    name: str
    model: str
    modified_at: str = Field(description="when the server was started")
    size: int = Field(description="bytes of weights in memory")
    type: Literal["model"]
    capabilities: list[Literal["completion", "tools", "vision", "multimodal"]]
    details: OllamaDetails


class ModelList(Shape):
    object: Literal["list"]
    data: list[ModelCard]
    has_more: Literal[False]
    first_id: str
    last_id: str
    models: list[OllamaModel] = Field(
        description="the same in Ollama's form, which clients of llama-server read"
    )


class RenderedPrompt(Shape):
    prompt: str


class InputTokens(Shape):
    object: str
    input_tokens: int
