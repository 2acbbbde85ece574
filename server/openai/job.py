"""A job: everything an HTTP request asks for, as engine requests and a dialect in which their results are written.

`convert.py` and its like make jobs, `choices.py` runs them. A dialect is a `Form`, which makes a `Reply` per request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from slipstream.engine.api import Delta, Done, Echo, EventStream, ModelInfo, Progress, Prompt, Request
from slipstream.server.http.error_table import Refused
from slipstream.server.openai.reply_text import FreeText, ReplyText


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request wants of each choice, and how the choice's text is read."""

    logprobs: int | None = None  # so many of the likeliest tokens beside each; None: no log-probabilities
    prompt_logprobs: int | None = None  # the same of the prompt
    echo: bool = False  # the text begins with the prompt
    token_ids: bool = False
    text: Callable[[str], ReplyText] = FreeText  # takes the end of the prompt
    silent: frozenset[str] = frozenset()  # tokens that are left out of the text
    has_content: bool = True  # false: the reply is calls, whatever the model writes
    reasoning_fields: tuple[str, ...] = ()  # of a chat message, which thinking is put into


Happened = Echo | Progress | Delta


class Reply(Protocol):
    """A job's reply while it is generated, in the bytes of its dialect.

    For a stream: `opening`, then `piece` per event, `end` per choice, and `closing`; `failed` in case of an error. For
    a whole reply: `keep` per event, then `whole`.
    """

    closing: bytes  # what a stream ends with, also behind an error

    def is_ended(self, index: int) -> bool:
        """Whether no further text of the choice would be sent."""

    def opening(self) -> Iterable[bytes]:
        """What comes before any text."""

    def piece(self, index: int, happened: Happened) -> Iterable[bytes]:
        """What a step adds to a choice."""

    def end(self, index: int, ends: Mapping[int, Done]) -> Iterable[bytes]:
        """What ends a choice. `ends`: of all choices that have ended, this choice included."""

    def failed(self, problem: Refused) -> bytes:
        """An error once the status has been sent."""

    def keep(self, index: int, happened: Echo | Delta) -> None: ...

    def whole(self, ends: Sequence[Done]) -> bytes: ...


def delta_of(happened: Happened) -> Delta:
    """The text of a step, for a dialect whose requests ask for nothing else. Raises TypeError for other events."""
    if not isinstance(happened, Delta):
        raise TypeError(f"{type(happened).__name__}: it was not asked for")
    return happened


@dataclass(frozen=True, slots=True)
class Form:
    """A dialect, as far as a request decides about it."""

    id_prefix: str
    prompt_field: str  # the request field that errors about the prompt name
    # Makes a job's reply of its admitted streams.
    reply: Callable[[Job, ModelInfo, Sequence[EventStream]], Reply]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The choices to generate and the shape of the answer."""

    id: str
    request_id: str
    form: Form
    wanted: Wanted
    requests: tuple[Request, ...]  # n per prompt, prompt by prompt
    n: int
    seed: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    detail: bool
    progress: bool  # how far the prompt is, in chunks of its own
    timings: bool  # times so far in each chunk
    predicted: bool  # the request has a prediction, which may be empty
    service_tier: bool  # the request names a service tier, so the reply has the field too

    @property
    def prompts(self) -> list[Prompt]:
        """Each prompt once."""
        return [one.prompt for one in self.requests[:: self.n]]
