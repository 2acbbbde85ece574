"""The thinking that may begin a reply: whether it can come, and how it is cut after a number of tokens."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from slipstream.engine.constraints import ThinkingBudget
from slipstream.engine.text.grammar.constraint import Constraint, Words, only
from slipstream.engine.text.tokenizer import Tokenizer

_WHOLE = getincrementaldecoder("utf-8")
_LONGEST = 4  # bytes of a character


class Opening(Enum):
    """What a prompt leaves to say of thinking."""

    OPEN = "the prompt has opened it"
    MAY = "the reply may open it"
    NONE = "the prompt has closed it"


def opening(prompt_tail: str, markers: tuple[str, str], tokenizer: Tokenizer) -> Opening:
    """Whether a reply behind this prompt begins with thinking. markers: what opens and what closes it."""
    start, end = markers
    # What users write stands before the control tokens that begin the reply.
    controls = [one for one in tokenizer.control_ids if one in prompt_tail and one not in start + end]
    tail = prompt_tail[max((prompt_tail.rfind(one) + len(one) for one in controls), default=0) :]
    if tail.rfind(start) > tail.rfind(end):
        return Opening.OPEN
    # A template that writes an empty thinking part itself has ruled thinking out.
    return Opening.NONE if tail.rstrip().endswith(end) else Opening.MAY


@dataclass(frozen=True, slots=True)
class Cut:
    """After how many tokens thinking is ended, and how."""

    n_most: int
    start: bytes  # what the reply opens thinking with; empty: the prompt has opened it
    end: bytes
    closing: Sequence[int]  # tokens that end it, of which the last write `end`


def cut_of(budget: ThinkingBudget, prompt_tail: str, tokenizer: Tokenizer) -> Cut | None:
    """How to cut the thinking behind a prompt; None if there can be none."""
    stage = opening(prompt_tail, budget.markers, tokenizer)
    if stage is Opening.NONE:
        return None
    start, end = budget.markers
    message = tokenizer.encode(budget.message, add_special=False, parse_special=False)
    closing = [*message, *tokenizer.encode(end, add_special=False)]
    return Cut(budget.n_tokens, b"" if stage is Opening.OPEN else start.encode(), end.encode(), closing)


class _Phase(Enum):
    BEFORE, THINKING, CLOSING, OVER = range(4)


class _Place(NamedTuple):
    """Where a reply is behind some of its tokens."""

    phase: _Phase
    since: int  # tokens of the reply before the phase


class CutThinking:
    """A reply whose thinking is cut: behind so many tokens of it, nothing may come but the text that ends it.

    A constraint like a grammar's, around that of the reply if there is one. Where it is, is kept for every token, so
    that tokens can be pushed and popped, and drafts change nothing. Characters stay whole. Source of the idea: the
    reasoning budgets of llama.cpp and vLLM.
    """

    def __init__(
        self, cut: Cut, rules: Constraint | None, token_bytes: Callable[[int], bytes], n_words: int
    ) -> None:
        """rules: what else the reply must be. token_bytes: what a token writes. n_words: of a mask."""
        self._cut, self._rules = cut, rules
        self._token_bytes, self._n_words = token_bytes, n_words
        self._written: list[bytes] = []  # by each token of the reply
        self._places = [self._thinking(0) if not cut.start else _Place(_Phase.BEFORE, 0)]  # [1 + n_tokens]

    @property
    def complete(self) -> bool:
        """Whether nothing but an end token can follow."""
        return self._rules is not None and self._rules.complete

    @property
    def failure(self) -> str | None:
        """Why no token may follow where none could be picked."""
        return None if self._rules is None else self._rules.failure

    def may_rule(self, n_tokens: int) -> bool:
        """Whether any of so many tokens more may be ruled out."""
        phase, since = self._places[-1]
        n_left = self._cut.n_most - (self.n_tokens - since if phase is _Phase.THINKING else 0)
        is_near = phase is _Phase.CLOSING or (phase is not _Phase.OVER and n_left < n_tokens)
        return is_near or self._rules is not None

    @property
    def n_tokens(self) -> int:
        """Tokens of the reply so far."""
        return len(self._written)

    def push(self, token_id: int) -> bool:
        """One more token of the reply; False, and nothing happens, if it is forbidden."""
        if not self._follow([token_id]):
            return False
        if self._rules is None or self._rules.push(token_id):
            return True
        self._take_back(1)
        return False

    def pop(self, n_tokens: int) -> None:
        """Take back the last tokens."""
        if self._rules is not None:
            self._rules.pop(n_tokens)
        self._take_back(n_tokens)

    def masks(self, drafts: Sequence[int] = ()) -> list[Words | None]:
        """What may follow after 0, 1, … drafts: [1 + n_drafts]; None where everything may.

        Behind a forbidden draft they mean nothing, as no pick can accept that draft.
        """
        found: list[Words | None] = [None] * (1 + len(drafts))
        found = found if self._rules is None else self._rules.masks(drafts)
        n_followed = 0
        for i in range(len(found)):
            if due := self._due():
                found[i] = only(due[0], self._n_words)
            if i == len(drafts) or not self._follow(drafts[i : i + 1]):
                break
            n_followed += 1
        self._take_back(n_followed)
        return found

    def mask(self, drafts: Sequence[int]) -> Words | None:
        """The last of `masks`."""
        if due := self._due_behind(drafts):
            return only(due[0], self._n_words)
        return None if self._rules is None else self._rules.mask(drafts)

    def n_legal(self, after: Sequence[int], drafts: Sequence[int]) -> int:
        """How many of the drafts, behind those of `after`, may come."""
        n_followed = self._follow([*after, *drafts])
        self._take_back(n_followed)
        n = max(0, n_followed - len(after))
        return n if self._rules is None or not n else self._rules.n_legal(after, drafts[:n])

    def forced(self, after: Sequence[int], n_max: int) -> list[int]:
        """The tokens that must come behind the drafts of `after`, as far as they are known now."""
        if due := self._due_behind(after):
            return [*due[:n_max]]
        return [] if self._rules is None else self._rules.forced(after, n_max)

    def _due_behind(self, drafts: Sequence[int]) -> Sequence[int]:
        n_followed = self._follow(drafts)
        due = self._due() if n_followed == len(drafts) else ()
        self._take_back(n_followed)
        return due

    def _due(self) -> Sequence[int]:
        """What must come now to end the thinking; nothing if it goes on, or is over."""
        phase, since = self._places[-1]
        return self._cut.closing[self.n_tokens - since :] if phase is _Phase.CLOSING else ()

    def _follow(self, tokens: Sequence[int]) -> int:
        """Go on over as many of the tokens as the cut allows; returns how many."""
        for i, token_id in enumerate(tokens):
            due = self._due()
            if due and token_id != due[0]:
                return i
            self._written.append(self._token_bytes(token_id))
            self._places.append(self._next(*self._places[-1]))
        return len(tokens)

    def _take_back(self, n_tokens: int) -> None:
        n_left = self.n_tokens - n_tokens
        del self._written[n_left:], self._places[n_left + 1 :]

    def _next(self, phase: _Phase, since: int) -> _Place:
        """Where the reply is, which with one token less was in this phase."""
        n = self.n_tokens
        if phase is _Phase.BEFORE:
            text = b"".join(self._written).lstrip()
            if text.startswith(self._cut.start):
                return self._thinking(n)
            return _Place(phase if self._cut.start.startswith(text) else _Phase.OVER, 0)
        if phase is _Phase.THINKING:
            return _Place(_Phase.OVER, n) if self._ends(since) else self._thinking(since)
        is_closed = phase is _Phase.CLOSING and n - since == len(self._cut.closing)
        return _Place(_Phase.OVER, n) if is_closed else _Place(phase, since)

    def _thinking(self, since: int) -> _Place:
        """The reply thinks since that token, or has to end it."""
        n_tokens = len(self._written)
        if n_tokens - since < self._cut.n_most or not _is_whole(b"".join(self._written[-_LONGEST:])):
            return _Place(_Phase.THINKING, since)
        return _Place(_Phase.CLOSING, n_tokens)

    def _ends(self, since: int) -> bool:
        """Whether the last token has completed the marker that ends the thinking begun at a token."""
        end, last, tail = self._cut.end, self._written[-1], b""
        for piece in reversed(self._written[since:]):
            tail = piece + tail
            if len(tail) >= len(end) + len(last):
                break
        return bool(last) and end in tail[-(len(end) + len(last) - 1) :]


def _is_whole(text: bytes) -> bool:
    """Whether a text, which may begin inside a character, ends with a whole one."""
    decoder = _WHOLE("ignore")
    decoder.decode(text)
    return not decoder.getstate()[0]
