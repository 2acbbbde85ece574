"""Grammars for replies: which tokens may come next, whatever was drafted before them.

llguidance parses; this file says what a slot does with it. A constraint is a cache of the reply's tokens like
everything else: they can be pushed and popped. Whether drafts are legal is found out on the very matcher that the reply
moves. The masks behind them are those of a copy of it: llguidance (1.7.2 to 1.9.1) keeps its last mask by the number of
the parser's rows and the lexer's state, and keeps it when it is rolled back, so that other text of the same shape would
get the mask of what was taken back.

Where a grammar forces text, llguidance's mask allows only the canonical next token, drafts or not. So a mask is a
function of the tokens before it alone, and forced text can be drafted with certainty. It is asked for once: while a
reply follows it, its masks are known, and the matcher, which is moved only when more has to be known, falls behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from slipstream.engine.text.grammar.compiler import first_line
from slipstream.engine.text.grammar.forced_text import ForcedText
from slipstream.engine.text.panics import without_panics

Words = NDArray[np.int32]  # a mask: bit i of word w allows token 32 * w + i
T = TypeVar("T")

_CALL_S = 0.005  # that a call of a matcher may take for ever; most take 20 to 200 µs
_BURST_S = 0.2  # and beyond that in all, for a moment
_BITS = (np.uint32(1) << np.arange(32, dtype=np.uint32)).view(np.int32)  # [32]: of a word, token by token
_PAUSE_S = 0.05  # most that one call counts, as the process may have been suspended in it


@dataclass(frozen=True, slots=True)
class Thinking:
    """A part of the reply that comes first and is free."""

    start: int | None  # the token that opens it, if the reply may do that; None: the prompt has opened it
    end: bytes


class Constraint:
    """What one reply may still be. Used by the engine's thread alone once it has a slot.

    While the reply thinks it is free; from the token behind the end of thinking on, the grammar rules.

    A matcher that meets a limit of its work is in error from then on. If only drafts led there it is made anew, as the
    reply would not have come there without them. If a token of the reply did, or all takes too long, the reply is lost.
    """

    def __init__(
        self,
        first: Any,
        thinking: Thinking | None,
        token_bytes: Callable[[int], bytes],
        n_words: int,
    ) -> None:
        """first: the grammar's matcher in its first state, which is not moved. token_bytes: what a token writes.

        n_words: of a mask.
        """
        self.failure: str | None = None  # why no token may follow where none could be picked
        self._first = first
        self._matcher = first.deep_copy()
        self._thinking = thinking
        self._token_bytes = token_bytes
        self._n_words = n_words
        self._tokens: list[int] = []  # of the reply
        self._n_masked = 0  # tokens that the matcher had seen when its last mask was taken
        self._forced = ForcedText()
        # The last tokens, so many, that the matcher has not seen; behind them more text is forced.
        self._n_behind = 0
        self._n_free = 0 if thinking is None else None  # tokens before the grammar; None: not known yet
        self._spent_s = 0.0  # beyond _CALL_S a call
        self._takes_drafts = True  # until one of them has met a limit
        self._is_lost = False  # the grammar cannot be followed any more; `failure` says why

    @property
    def complete(self) -> bool:
        """Whether the reply is all that the grammar allows: nothing but an end token can follow."""
        if self._n_free is None or self._n_behind:
            return False
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def may_rule(self, n_tokens: int) -> bool:
        """Whether any of the next tokens may be ruled out."""
        return True

    @property
    def n_tokens(self) -> int:
        """Tokens of the reply so far."""
        return len(self._tokens)

    def push(self, token_id: int) -> bool:
        """One more token of the reply; False, and nothing happens, if the grammar forbids it."""
        if self._push(token_id):
            return True
        if self._matcher.is_error():
            self._lose(first_line(self._matcher.get_error()))
        return False

    def _push(self, token_id: int) -> bool:
        """As `push`, of a draft perhaps: then `pop` must follow, also if it fails."""
        n_free = self._n_free
        if n_free is None and self._decides(token_id):
            n_free = 0
        if n_free is not None:
            if self._forced.follow(len(self._tokens), token_id):
                self._n_behind += 1
            elif not self._consumed([token_id]):
                return False
        self._tokens.append(token_id)
        self._n_free = len(self._tokens) if n_free is None and self._thought() else n_free
        return True

    def pop(self, n_tokens: int) -> None:
        """Take back the last tokens."""
        if not n_tokens and not self._matcher.is_error():
            return
        n_unseen = min(self._n_behind, n_tokens)
        self._n_behind -= n_unseen
        before = self._n_ruled - n_unseen
        self._cut(len(self._tokens) - n_tokens)
        self._roll_back(before - self._n_ruled)

    def _cut(self, n_left: int) -> None:
        """Forget the tokens behind the first n_left; what the matcher has seen of them is the caller's affair."""
        del self._tokens[n_left:]
        if self._thinking is not None and (n_left < (self._n_free or 0) or not n_left):
            self._n_free = None
        self._forced.cut(n_left)

    def masks(self, drafts: Sequence[int] = ()) -> list[Words | None]:
        """What may follow after 0, 1, … drafts: [1 + n_drafts]; None where everything may.

        Masks behind a forbidden draft are None, as no pick can accept that draft.
        """
        found = [self._mask()]
        self.pop(0)
        if drafts:
            with self._aside():
                for token_id in drafts:
                    if not self._push(token_id):
                        break
                    found.append(self._mask())
        return found + [None] * (1 + len(drafts) - len(found))

    def mask(self, drafts: Sequence[int]) -> Words | None:
        """The last of `masks`."""
        if not drafts:
            return self.masks()[0]
        with self._aside():
            return self._mask() if self._pushed(drafts) == len(drafts) else None

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """What is pushed and masked within is of drafts: a copy of the matcher sees it, and it is taken back."""
        matcher, n_tokens = self._matcher, len(self._tokens)
        n_masked, n_behind = self._n_masked, self._n_behind
        self._matcher = without_panics(matcher.deep_copy)()
        try:
            yield
        finally:
            # Each draft that meets a limit costs as much as the limit allows.
            self._takes_drafts = self._takes_drafts and not self._matcher.is_error()
            self._matcher, self._n_masked, self._n_behind = matcher, n_masked, n_behind
            self._cut(n_tokens)

    def n_legal(self, after: Sequence[int], drafts: Sequence[int]) -> int:
        """How many of the drafts, behind those of `after`, the grammar has a place for."""
        tokens = [*after, *drafts]
        if self._is_lost or not self._takes_drafts:
            return 0
        if self._forced.begins_with(len(self._tokens), tokens):
            n_found = len(tokens)
        elif self._n_free is not None:
            # Not by `validate_tokens`, which has no limits.
            n_found = self._consumed(tokens)
            self._roll_back(n_found)
        else:
            n_found = self._pushed(tokens)
            self.pop(n_found)
        return max(0, n_found - len(after))

    def forced(self, after: Sequence[int], n_max: int) -> list[int]:
        """The tokens that must come behind the drafts of `after`, as far as they are known now."""
        if self._is_lost:
            return []
        n_pushed = self._pushed(after)
        found: list[int] = []
        if n_pushed == len(after) and self._n_free is not None:
            found = [*self._known()[:n_max]]
        self.pop(n_pushed)
        return found

    def _pushed(self, tokens: Sequence[int]) -> int:
        """Push as many of the drafts as may come; returns how many, which `pop` takes back."""
        n_pushed = 0
        while self._takes_drafts and n_pushed < len(tokens) and self._push(tokens[n_pushed]):
            n_pushed += 1
        return n_pushed

    def _known(self) -> Sequence[int]:
        """The tokens that must come now, as far as they are known."""
        n_tokens = len(self._tokens)
        known = self._forced.after(n_tokens)
        if not known:
            known = self._timed(self._matcher.compute_ff_tokens)
            self._forced.learn(n_tokens, known)
        return known

    def _consumed(self, tokens: Sequence[int]) -> int:
        """Move the matcher on to where the reply is, and over as many of the tokens as may come; returns how many."""
        behind, self._n_behind = self._tokens[len(self._tokens) - self._n_behind :], 0
        n_consumed = self._timed(lambda: int(self._matcher.try_consume_tokens([*behind, *tokens])))
        if n_consumed < len(behind) and not self._matcher.is_error():
            self._lose("it refuses a token that it has forced")
        return max(0, n_consumed - len(behind))

    @without_panics
    def _roll_back(self, n_tokens: int) -> None:
        """Move the matcher back, to behind `_tokens`."""
        if self._is_lost or (not n_tokens and not self._matcher.is_error()):
            return
        # Each draft that meets a limit costs as much as the limit allows, and the matcher's making.
        self._takes_drafts = self._takes_drafts and not self._matcher.is_error()
        knows_taken_back = self._n_masked > self._n_ruled  # its last mask is of what is taken back
        if knows_taken_back or self._matcher.is_error() or not self._matcher.rollback(n_tokens):
            self._matcher, self._n_behind, self._n_masked = self._first.deep_copy(), 0, 0
            self._consumed(self._tokens[len(self._tokens) - self._n_ruled :])

    @without_panics
    def _timed(self, call: Callable[[], T]) -> T:
        """Call the matcher. One that goes on taking too long fails the reply, or it would slow all others down."""
        started = time.perf_counter()
        result = call()
        taken_s = min(time.perf_counter() - started, _PAUSE_S)
        self._spent_s = max(0.0, self._spent_s + taken_s - _CALL_S)
        if self._spent_s > _BURST_S:
            self._lose(f"it takes more than {1e3 * _CALL_S:g} ms a token, for longer than {_BURST_S:g} s")
        return result

    def _lose(self, why: str) -> None:
        self._is_lost, self.failure = True, self.failure if self._is_lost else why

    @property
    def _n_ruled(self) -> int:
        """Tokens that the matcher has seen."""
        return 0 if self._n_free is None else len(self._tokens) - self._n_free

    def _decides(self, token_id: int) -> bool:
        """Whether this token, the reply's first, says that there will be no thinking."""
        assert self._thinking is not None
        return not self._tokens and self._thinking.start not in (None, token_id)

    def _thought(self) -> bool:
        """Whether the last token has completed the marker that ends the thinking."""
        assert self._thinking is not None
        end, tail = self._thinking.end, b""
        for token_id in reversed(self._tokens):
            piece = self._token_bytes(token_id)
            tail = piece + tail
            if len(tail) >= len(end) + len(piece):
                break
        last = self._token_bytes(self._tokens[-1])
        return end in tail[-(len(end) + len(last) - 1) :] if last else False

    def _mask(self) -> Words | None:
        opener = None if self._thinking is None or self._tokens else self._thinking.start
        if self._n_free is None and opener is None:
            return None
        if self._n_free is not None and (known := self._known()) and not self._is_lost:
            return only(known[0], self._n_words)
        self._n_masked = self._n_ruled
        words = np.frombuffer(self._timed(self._matcher.compute_bitmask), np.int32)  # [n_words]
        if self._matcher.is_error() and not self._is_lost:
            self.failure = first_line(self._matcher.get_error())
        if self._is_lost or self._matcher.is_error():
            return np.zeros_like(words)
        return words if self._n_free is not None or opener is None else _with(words.copy(), opener)


def only(token_id: int, n_words: int) -> Words:
    """The mask of a token that must come."""
    return _with(np.zeros(n_words, np.int32), token_id)


def _with(words: Words, token_id: int) -> Words:
    """The mask with one more token allowed, in place."""
    words[token_id >> 5] |= _BITS[token_id & 31]
    return words
