"""A choice's text as it comes, read into pieces: content, thinking, calls. Every dialect writes its reply from these.

The parsers in `formats` split the text; which of them, and what a request wants of it, is a `Reading`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from slipstream.engine.api import Delta, Done
from slipstream.server.openai.formats.format import CallEnd, CallStart, Content, Piece, Tools, joined
from slipstream.server.openai.formats.reading import Known, parser_of


class ReplyText(ABC):
    """Reads a choice's text."""

    n_reasoning: int | None = None  # tokens that were thinking; None if not counted
    n_read = 0  # pieces of what was fed last, up to the text's end
    _n_before = 0  # characters that were fed before

    @property
    @abstractmethod
    def is_ended(self) -> bool:
        """Whether no further text would be sent, so that the generation may end."""

    def read(self, delta: Delta) -> tuple[Sequence[Piece], Delta]:
        """The pieces that a step makes, and the step up to the text's end: with drafts there may be more in it."""
        pieces = self.feed(delta)
        if self.is_ended and self.n_read < len(delta.pieces):
            delta = _beginning(delta, self.n_read, self._n_before)
        self._n_before += len(delta.text)
        return pieces, delta

    @abstractmethod
    def feed(self, delta: Delta) -> Sequence[Piece]:
        """The pieces that more text makes; none while it is not known yet what the text is. Sets `n_read`."""

    @abstractmethod
    def finish(self) -> Sequence[Piece]:
        """The pieces of the text that was held back, now that the text has ended."""

    @abstractmethod
    def reason(self, done: Done) -> str:
        """The choice's `finish_reason`. Call it after `finish`."""


def _beginning(delta: Delta, n: int, n_before: int) -> Delta:
    """The first n tokens of a step. n_before: characters of the text before it."""
    pieces = delta.pieces[:n]
    text = "".join(pieces)
    judged = tuple(one for one in delta.logprobs if one.offset < n_before + len(text))
    return replace(
        delta,
        text=text,
        token_ids=delta.token_ids[:n],
        sources=delta.sources[:n],
        pieces=pieces,
        logprobs=judged,
    )


class FreeText(ReplyText):
    """Every character is content."""

    is_ended = False

    def __init__(self, prompt_tail: str) -> None: ...

    def feed(self, delta: Delta) -> Sequence[Piece]:
        self.n_read = len(delta.pieces)
        return (Content(delta.text),)

    def finish(self) -> Sequence[Piece]:
        return ()

    def reason(self, done: Done) -> str:
        return done.reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How the replies of a request are read. Calling it with the end of the prompt makes a choice's `ReplyText`."""

    known: Known
    tools: Tools = field(default_factory=dict)
    most_calls: int | None = None
    thinks_aloud: bool = False  # thinking is content
    is_forced: bool = False  # a grammar holds behind thinking: what looks like a call before that is none
    continued: str | None = None  # the reply's beginning, if the client sent it to be continued
    silent: frozenset[str] = frozenset()  # tokens to leave out of the text

    def __call__(self, prompt_tail: str) -> ReplyText:
        reasoning = self.known.format.reasoning
        if self.continued is None or reasoning is None:
            return FormattedText(self, prompt_tail)
        opener, closer = reasoning
        return FormattedText(
            self, opener if self.continued.rfind(opener) > self.continued.rfind(closer) else ""
        )


class FormattedText(ReplyText):
    """Text in the model's format: a `ReplyText`."""

    def __init__(self, reading: Reading, prompt_tail: str) -> None:
        self._silent = reading.silent
        self._longest = max(map(len, reading.silent), default=0)
        self._parser = parser_of(
            reading.known.format,
            reading.tools,
            prompt_tail,
            most_calls=reading.most_calls,
            thinks_aloud=reading.thinks_aloud,
            is_forced=reading.is_forced,
        )
        self._n_open = 0  # calls that were begun and not ended
        self._has_calls = False
        can_think = reading.known.format.reasoning or reading.known.format.channels
        self.n_reasoning: int | None = 0 if can_think else None

    @property
    def is_ended(self) -> bool:
        return self._parser.is_ended

    def feed(self, delta: Delta) -> Sequence[Piece]:
        pieces: list[Piece] = []
        # Without pieces the text cannot be divided among its tokens: all count as what the last of them is.
        n_tokens = 1 if delta.pieces else len(delta.token_ids)
        self.n_read = len(delta.pieces)
        for n_read, text in enumerate(delta.pieces or (delta.text,), 1):
            spoken = self._spoken(text)
            if text and not spoken:
                continue
            was_thinking = self._parser.is_thinking
            pieces += self._parser.feed(spoken)
            if self.n_reasoning is not None and (was_thinking or self._parser.is_thinking):
                self.n_reasoning += n_tokens
            if self.is_ended:
                self.n_read = n_read
                break
        return self._counted(joined(pieces))

    def finish(self) -> Sequence[Piece]:
        return self._counted(self._parser.finish())

    def _spoken(self, text: str) -> str:
        """A token's text without that of a token to leave out. Before this may stand what a stop string held back."""
        first = max(0, len(text) - self._longest)
        begins = (i for i in range(first, len(text)) if text[i:] in self._silent)
        return text[: next(begins, len(text))]

    def reason(self, done: Done) -> str:
        is_called = self._has_calls and self._n_open == 0
        return "tool_calls" if is_called and done.reason == "stop" else done.reason

    def _counted(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        n_begun = sum(isinstance(piece, CallStart) for piece in pieces)
        self._has_calls = self._has_calls or n_begun > 0
        self._n_open += n_begun - sum(isinstance(piece, CallEnd) for piece in pieces)
        return pieces
