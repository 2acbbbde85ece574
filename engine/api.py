"""What crosses the border between the server and the engine: plain frozen data, no torch, no JSON.

A request goes in through `AsyncEngine.submit`; its events come out of the returned stream. Closing the
stream (`aclose`) cancels the request. Every admitted request ends in exactly one `Done` or `Failed`.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol

from slipstream.engine.constraints import Grammar, ThinkingBudget
from slipstream.engine.drafting import Drafting, Step
from slipstream.engine.errors import DeviceLost, EngineError
from slipstream.engine.stats import DrafterCount, EngineStats


@dataclass(frozen=True)
class Image:
    """A picture, upright, without transparency, as its pixels are."""

    width: int
    height: int
    pixels: bytes = field(repr=False)  # [height, width, 3] uint8: red, green, blue

    @cached_property
    def key(self) -> bytes:
        """The same for the same pixels alone, [32] bytes."""
        return hashlib.sha256(f"{self.width} {self.height} ".encode() + self.pixels).digest()


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation to be rendered by the model's chat template.

    images: what the parts `{"type": "image"}` of its messages show, in their order.
    """

    messages: Sequence[Mapping[str, Any]]
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    images: tuple[Image, ...] = ()


@dataclass(frozen=True, slots=True)
class Infill:
    """Text between two others, for models whose tokenizer has fill-in-the-middle tokens."""

    prefix: str
    suffix: str
    extra: tuple[tuple[str, str], ...] = ()  # other texts that it may refer to, each with a file's name


# The last: token ids, and texts between them.
Prompt = Chat | Infill | str | tuple[int | str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling fields as the caller gave them; None falls back to flags, then generation_config, then OpenAI's."""

    temperature: float | None = None
    top_k: int | None = None  # 0 is off
    top_p: float | None = None  # 1 is off
    min_p: float | None = None  # 0 is off
    repeat_penalty: float | None = None  # 1 is off
    repeat_last_n: int | None = None  # window of the repeat penalty, prompt included; 0 is off, default 64
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    # By token, or by text, all of whose tokens are meant; -inf bans.
    logit_bias: Sequence[tuple[int | str, float]] = ()
    allowed_token_ids: Sequence[int] | None = None  # None: all
    bad_words: Sequence[str] = ()  # whose tokens never follow each other in the reply
    seed: int | None = None  # 0 … 2**64 - 1; None draws one, reported in Done.seed
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculate:
    """A request's own speculation settings; it may only narrow what the server loaded. None is the server's."""

    types: tuple[str, ...] | None = None
    n_max: int | None = None
    n_min: int | None = None
    p_min: float | None = None
    ngram_size_n: int | None = None  # of ngram-simple, ngram-map-k and ngram-map-k4v, 1 … 1024
    ngram_size_m: int | None = None
    ngram_min_hits: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One completion to generate."""

    id: str
    prompt: Prompt
    sampling: Sampling = Sampling()
    speculate: Speculate = Speculate()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # they end the reply like the model's own end tokens
    include_stop: bool = False  # the stop string or end token that ends the reply is part of its text
    max_tokens: int | None = None  # None: until the end token or the context's end
    min_tokens: int = 0  # no end token, stop token or stop string ends the reply before
    logprobs: int | None = None  # alternatives per token, 0 … MOST_LOGPROBS; None: no log-probabilities
    # Alternatives per token of the prompt, 0 … MOST_LOGPROBS; None: no log-probabilities of the prompt.
    prompt_logprobs: int | None = None
    echo: bool = False  # the prompt is sent back first, as it is wherever its log-probabilities are asked for
    grammar: Grammar | None = None
    thinking_budget: ThinkingBudget | None = None  # None: thinking goes on as long as the model likes
    skip_special: bool = True  # leave control tokens out of the text
    prediction: str | None = None  # text the reply is expected to resemble; the draft source of highest prior
    slot: int | None = None  # the only slot that it may have; None: any
    progress: bool = False  # whether `Progress` is sent while the prompt is computed
    steps: bool = False  # whether every `Delta` says what its steps drafted
    owner: str = ""  # the API key it came with, or what stands for it; owners take turns
    tenant: str = ""  # salts prefix keys, so that one API key never hits another's cached prompt
    # Tokens of the reply that the caller has from earlier runs of the same request: all `Delta.token_ids` so far. The
    # reply goes on behind them, and only what is new is sent. Needs those runs' seed. The prompt is neither sent back
    # nor judged again, nor is its progress reported.
    emitted: tuple[int, ...] = ()


MOST_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with its log-probability: of the model's own row, before bias, penalties, grammar and temperature."""

    token_id: int
    data: bytes  # what the token writes; not always whole characters
    logprob: float  # finite
    # The likeliest tokens, falling; the picked token only if it is among them.
    top: tuple[TokenLogprob, ...] = ()
    offset: int = 0  # characters before it in the text of the reply, or of an echo; in `top` without meaning
    rank: int | None = None  # of tokens of the prompt: 1 is the likeliest; None: not counted


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt sent back: the first event of a request with `echo` or `prompt_logprobs`."""

    token_ids: tuple[int, ...]
    pieces: tuple[str, ...]  # text of each token; joined they are the prompt's
    logprobs: tuple[TokenLogprob | None, ...] = ()  # None for the first token; empty unless asked for


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the prompt is: when the request gets its slot, and after each pass that computed some of it.

    The last says that all of it is there.
    """

    n_prompt: int
    n_cached: int  # tokens taken from the prefix cache
    n_processed: int  # tokens that are there, cached tokens included
    seconds: float  # since the request got its slot
    slot: int  # its number


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to the text. `sources[i]` names the drafter that guessed `token_ids[i]`, or is None."""

    text: str
    token_ids: tuple[int, ...]
    sources: tuple[str | None, ...]
    pieces: tuple[str, ...] = ()  # visible text each token added; joined they are `text`
    # If asked for, of the tokens that begin in `text`, among them those of earlier steps whose text was held back; with
    # `echo` also of tokens that have no text.
    logprobs: tuple[TokenLogprob, ...] = ()
    steps: tuple[Step, ...] = ()  # if asked for: this step; of joined deltas all of them


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a finished request."""

    n_prompt: int
    n_cached: int  # prompt tokens taken from the prefix cache
    n_completion: int
    n_image: int = 0  # prompt tokens that are images


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of a finished request's phases."""

    queue_s: float  # admitted → slot
    prompt_s: float  # slot → first token
    generation_s: float  # first token → last token
    # Of `generation_s`, what the engine's steps took to draft, and to run and read the target, for all slots.
    draft_s: float = 0.0
    verify_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Speculation:
    """What speculation did for a request, and the values in force for it."""

    types: tuple[str, ...]
    n_max: int
    n_min: int
    p_min: float
    n_steps: int  # target passes that produced tokens; if synthetic, of those only the ones with n_max drafts
    histogram: tuple[int, ...]  # [n_max + 1]: these steps by accepted drafts; sums to n_steps
    drafters: Mapping[str, DrafterCount]
    ngram_size_n: int | None = None  # None: each drafter's own setting
    ngram_size_m: int | None = None
    ngram_min_hits: int | None = None
    synthetic: bool = False  # drafts were accepted at random: the text means nothing

    @property
    def n_drafted(self) -> int:
        return sum(one.n_drafted for one in self.drafters.values())

    @property
    def n_accepted(self) -> int:
        return sum(one.n_accepted for one in self.drafters.values())


@dataclass(frozen=True, slots=True)
class Done:
    """The last event of a request that ended as it should."""

    reason: Literal["stop", "length"]
    stop_string: str | None  # the stop string that ended it, if any
    usage: Usage
    timings: Timings
    speculation: Speculation
    seed: int
    stop_token: int | None = None  # the token of `stop_token_ids` that ended it, if any
    slot: int = 0  # the slot that it had


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event of a request that could not go on."""

    error: EngineError


Event = Echo | Progress | Delta | Done | Failed


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the server reports about the loaded model and the values worked out at start."""

    name: str
    path: str
    architecture: str
    n_params: int
    weight_bytes: int
    vocab_size: int
    n_ctx: int
    n_ctx_train: int
    n_slots: int
    batch_size: int
    n_pages: int
    page_size: int
    device: str
    dtype: str
    drafters: tuple[str, ...]  # loaded types, in order
    chat_template: str | None
    bos_token: str | None
    eos_tokens: tuple[str, ...]
    fingerprint: str  # changes with version, weights, dtype, drafters
    created: int  # Unix seconds
    sampling_defaults: Mapping[str, float | int]
    # Tokens beside the vocabulary proper, by their text; true: a control token, left out of replies.
    added_tokens: Mapping[str, bool] = field(default_factory=dict)
    # The chat template for conversations with tools, if it differs from `chat_template`.
    tool_template: str | None = None
    n_embd: int = 0  # width of a hidden state; 0: not known
    # Sentences on operators that run in another way than they should, as their best code failed on this machine.
    replaced_operators: tuple[str, ...] = ()
    inexact_sums: str | None = None  # over ranks: in what a row's bits depend on other rows
    modalities: tuple[str, ...] = ("text",)  # what prompts may hold: text, image


@dataclass(frozen=True, slots=True)
class SlotFile:
    """What saving or restoring a slot did."""

    n_tokens: int
    n_bytes: int  # of the file
    seconds: float


Status = Literal["loading", "ready", "draining", "failed"]


class EventStream(Protocol):
    """The events of one request; the prompt's tokens are there at once.

    `finish` asks for the end once there is enough: a few more tokens may come, then `Done` with the reason "stop".
    Before the first token it has no effect. `aclose` cancels what is not finished.
    """

    prompt_ids: Sequence[int]
    prompt_tail: str  # the prompt's last 64 tokens as text, control tokens included

    def __aiter__(self) -> AsyncIterator[Event]: ...

    async def __anext__(self) -> Event: ...

    def finish(self) -> None: ...

    async def aclose(self) -> None: ...


class AsyncEngine(Protocol):
    """The engine as the server sees it: the real engine, or a fake in the HTTP tests."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def status(self) -> Status: ...

    @property
    def device_loss(self) -> DeviceLost | None:
        """Set once the status is "failed" because the device answers no more."""

    @property
    def step_age_s(self) -> float:
        """Seconds since the running step began; 0 between steps."""

    async def submit(self, request: Request) -> EventStream:
        """Check and admit a request. Raises `RequestError`, `Overloaded` or `EngineStopped` before any event."""

    async def prompt_ids(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt, as `submit` would make them. Raises `RequestError`."""

    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]: ...

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Raises `InvalidRequest` for an id that is not in the vocabulary, and for too many."""

    async def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        """What each token writes by itself: not always whole characters. Raises as `detokenize`."""

    async def render(self, chat: Chat) -> str:
        """The chat as the model's template writes it. Raises `InvalidRequest` if the template refuses."""

    def stats(self) -> EngineStats: ...

    async def speculation(self) -> Drafting:
        """Worked out when it is asked for, between two steps. Raises `EngineStopped`."""

    async def save_slot(self, slot_id: int, filename: str, tenant: str) -> SlotFile:
        """Write what is cached of a slot's last or running sequence to a file; n_tokens: of whole pages.

        Another tenant's sequences and files are treated as absent. Raises `InvalidRequest` for an impossible slot or
        file name, and if there is nothing to save; `Unsupported` if no folder is set (`--slot-save-path`).
        """

    async def restore_slot(self, slot_id: int, filename: str, tenant: str) -> SlotFile:
        """Put a file's sequence back into the cache, as the last sequence of an idle slot.

        n_tokens: tokens that the next request beginning with them need not compute; fewer than the file holds if the
        cache lacks room. Raises like `save_slot`, `InvalidRequest` for a busy slot, and `SlotFileRefused`.
        """

    async def erase_slot(self, slot_id: int, tenant: str) -> int:
        """Forget an idle slot's last sequence and what is cached of it alone; returns the number of those tokens.

        Raises `InvalidRequest` for a slot that is busy or not there.
        """

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests (`EngineStopped`), let running and queued requests finish, fail what is left."""

    async def close(self) -> None: ...
