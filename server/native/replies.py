"""Models of the replies of llama-server's own endpoints, for the OpenAPI document and its tests."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from slipstream.server.describe.shape import Shape, optional
from slipstream.server.openai.replies import Metrics, PromptProgress, Resolved, Timings, TimingsSoFar


class Piece(Shape):
    id: int
    piece: str | list[int] = Field(description="its text, or its bytes where they are not whole characters")


class Tokens(Shape):
    tokens: list[int] | list[Piece] = Field(description="token ids; with `with_pieces` objects")
    count: int | None = optional("for a `prompt` and for `messages`: how many")
    max_model_len: int | None = optional("for these: most tokens of a sequence")


class Content(Shape):
    content: str
    prompt: str = Field(description="the same under vLLM's name")


class TokenizerInfo(Shape):
    """What evaluation harnesses ask vLLM for, to tokenize through the server."""

    bos_token: str | None
    eos_token: str | None
    chat_template: str | None
    max_model_len: int = Field(description="most tokens of a sequence")


class Judged(Shape):
    """A token with its log-probability."""

    id: int
    token: str
    bytes: list[int] = Field(description="what the token writes; not always whole characters")
    logprob: float


class JudgedToken(Judged):
    top_logprobs: list[Judged]


class Generated(Shape):
    """A choice that has ended; with `response_fields` an object of those alone."""

    index: int
    content: str = Field(description="the text; empty in the last event of a stream")
    tokens: list[int] = Field(description="the token ids, with `return_tokens`")
    id_slot: int
    stop: bool
    model: str
    tokens_predicted: int
    tokens_evaluated: int = Field(description="tokens of the prompt")
    generation_settings: dict[str, Any] = Field(description="what was in force")
    prompt: str
    has_new_line: bool
    truncated: bool = Field(description="whether the context's end ended it")
    stop_type: Literal["eos", "limit", "word"]
    stopping_word: str = Field(description="the stop string that ended it")
    tokens_cached: int
    timings: Timings
    metrics: Metrics
    speculative: Resolved
    seed: int
    synthetic: bool | None = optional("drafts were accepted at random: the text means nothing")
    completion_probabilities: list[JudgedToken] | None = optional("with `n_probs`; of streams in each chunk")


class GeneratedPiece(Shape):
    """What a step adds to a choice."""

    index: int
    content: str
    tokens: list[int]
    stop: Literal[False]
    id_slot: int
    tokens_predicted: int = Field(description="so far")
    tokens_evaluated: int = Field(description="tokens of the prompt")
    timings: TimingsSoFar | None = optional("with `timings_per_token`")
    prompt_progress: PromptProgress | None = optional("with `return_progress`, in chunks of their own")
    completion_probabilities: list[JudgedToken] | None = optional("with `n_probs`")


class Adapter(Shape):
    """A LoRA adapter; there are none, so lists of them are empty."""

    id: int
    scale: float


class Success(Shape):
    success: Literal[True]


class SaveTimings(Shape):
    save_ms: float


class RestoreTimings(Shape):
    restore_ms: float


class SlotSaved(Shape):
    id_slot: int
    filename: str
    n_saved: int = Field(description="tokens written")
    n_written: int = Field(description="bytes of the file")
    timings: SaveTimings


class SlotRestored(Shape):
    id_slot: int
    filename: str
    n_restored: int = Field(description="tokens the next request that begins with them is spared")
    n_read: int = Field(description="bytes of the file")
    timings: RestoreTimings


class SlotErased(Shape):
    id_slot: int
    n_erased: int = Field(description="tokens forgotten")
