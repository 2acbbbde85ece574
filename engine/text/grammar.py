"""Grammars for replies: which tokens may come next, whatever was drafted before them.

llguidance parses; this file says what a slot does with it. A constraint is a cache of the reply's tokens like
everything else: they can be pushed and popped, so drafts are checked on the very matcher that the reply moves.

Where a grammar forces text, llguidance's mask allows only the canonical next token, drafts or not. So a mask is a
function of the tokens before it alone, and forced text can be drafted with certainty.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.engine.api import JSON_STYLE, Grammar
from slipstream.engine.errors import InvalidRequest, Unsupported
from slipstream.engine.text.tokenizer import Tokenizer

Words = NDArray[np.int32]  # a mask: bit i of word w allows token 32 * w + i

Key = tuple[str, str]  # a grammar's kind and source

_MOST_KEPT = 64  # compiled grammars, and as many matchers that have been used
_MOST_STATES = 10_000  # of a lexer, of 1 to 2 kB each


@dataclass(frozen=True, slots=True)
class Thinking:
    """A part of the reply that comes first and is free."""

    start: int | None  # the token that opens it, if the reply may do that; None: the prompt has opened it
    end: bytes


class Grammars:
    """Compiles the grammars of one tokenizer, and keeps those used last. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """vocab_size: tokens that a logits row has, which may be more than the tokenizer has."""
        self._text = tokenizer
        self._vocab_size = vocab_size
        self._tokenizer: Any = None
        self._kept: OrderedDict[Key, Any] = OrderedDict()
        # Matchers of replies that are over: what they have found out about their grammar makes the next reply cheaper.
        self._used: list[tuple[Key, Any]] = []
        # Guards what is kept; held for moments, as the engine's thread takes it too.
        self._lock = threading.Lock()
        self._compiling = threading.Lock()

    def constraint(self, grammar: Grammar, prompt_tail: str) -> Constraint:
        """A fresh constraint for one reply. Raises `InvalidRequest` for an unusable grammar, `Unsupported`."""
        thinking = self._thinking(grammar, prompt_tail)
        key = (grammar.kind, grammar.source)
        with self._compiling:
            first = self._kept.get(key)
            if first is None:
                first = self._compile(grammar)
            self._keep(key, first)
        with self._lock:
            used = next((i for i, (of, _) in enumerate(self._used) if of == key), None)
            matcher = first.deep_copy() if used is None else self._used.pop(used)[1]
        return Constraint(self, key, first, matcher, thinking)

    def take_back(self, key: Key, matcher: Any) -> None:
        """Keep the matcher of a reply that is over, in its first state."""
        if matcher.is_error() or not matcher.reset():
            return
        with self._lock:
            if key in self._kept:
                self._used.append((key, matcher))
                del self._used[: len(self._used) - _MOST_KEPT]

    def _keep(self, key: Key, first: Any) -> None:
        with self._lock:
            self._kept[key] = first
            self._kept.move_to_end(key)
            if len(self._kept) > _MOST_KEPT:
                gone, _ = self._kept.popitem(last=False)
                self._used = [one for one in self._used if one[0] != gone]

    def _compile(self, grammar: Grammar) -> Any:
        """A matcher in its first state; it is never moved, only copied."""
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError:
            raise Unsupported(grammar.param, "needs the package llguidance, which is not installed") from None
        limits = LLParserLimits(max_lexer_states=_MOST_STATES, verbose_errors=False)
        try:
            source = _source(grammar, LLMatcher)
        except ValueError as error:
            raise InvalidRequest(grammar.param, f"not a usable grammar: {first_line(str(error))}") from None
        matcher = LLMatcher(self._opened(grammar.param), source, log_level=0, limits=limits)
        probe = matcher.deep_copy()
        allowed = probe.compute_bitmask()  # some faults show only here
        if probe.is_error() or not any(allowed):
            reason = first_line(probe.get_error()) if probe.is_error() else "nothing can satisfy it"
            raise InvalidRequest(grammar.param, f"not a usable grammar: {reason}")
        return matcher

    def _opened(self, param: str) -> Any:
        """llguidance's view of the vocabulary; made at first use, as a large vocabulary takes a second."""
        if self._tokenizer is None:
            from llguidance import LLTokenizer

            try:
                self._tokenizer = LLTokenizer(
                    self._text.backend.to_str(),
                    n_vocab=self._vocab_size,
                    eos_token=sorted(self._text.eos_ids) or None,
                )
            except Exception as error:  # noqa: BLE001 - all it raises: kinds of tokenizers it cannot read
                raise Unsupported(
                    param, f"this model's tokenizer cannot be used with grammars ({first_line(str(error))})"
                ) from None
        return self._tokenizer

    def _thinking(self, grammar: Grammar, prompt_tail: str) -> Thinking | None:
        """How the reply may think before the grammar begins; None if it begins at once."""
        if grammar.reasoning is None:
            return None
        start, end = grammar.reasoning
        # What users write stands before the control tokens that begin the reply.
        controls = [one for one in self._text.control_ids if one not in grammar.reasoning]
        prompt_tail = _behind(prompt_tail, controls)
        if prompt_tail.rfind(start) > prompt_tail.rfind(end):
            return Thinking(None, end.encode())
        # A template that writes an empty thinking part itself has ruled thinking out.
        opener = None if prompt_tail.rstrip().endswith(end) else self._text.backend.token_to_id(start)
        return None if opener is None else Thinking(opener, end.encode())

    def token_bytes(self, token_id: int) -> bytes:
        """What the token writes."""
        return self._text.token_bytes(token_id)


class Constraint:
    """What one reply may still be. Used by the engine's thread alone once it has a slot.

    While the reply thinks it is free; from the token behind the end of thinking on, the grammar rules.
    """

    def __init__(
        self, grammars: Grammars, key: Key, first: Any, matcher: Any, thinking: Thinking | None
    ) -> None:
        """first, matcher: two of the grammar's matchers in their first states; the second is moved."""
        self.failure: str | None = None  # why the grammar could not be followed any more
        self._grammars = grammars
        self._key = key
        self._first = first
        self._matcher = matcher
        self._thinking = thinking
        self._tokens: list[int] = []  # of the reply
        self._n_free = 0 if thinking is None else None  # tokens before the grammar; None: not known yet

    @property
    def complete(self) -> bool:
        """Whether the reply is all that the grammar allows: nothing but an end token can follow."""
        return self._n_free is not None and self._matcher.is_stopped() and not self._matcher.is_error()

    def push(self, token_id: int) -> bool:
        """One more token of the reply; False, and nothing happens, if the grammar forbids it."""
        n_free = self._n_free
        if n_free is None and self._decides(token_id):
            n_free = 0
        if n_free is not None and not self._matcher.try_consume_tokens([token_id]):
            return False
        self._tokens.append(token_id)
        self._n_free = len(self._tokens) if n_free is None and self._thought() else n_free
        return True

    def pop(self, n_tokens: int) -> None:
        """Take back the last tokens."""
        if not n_tokens:
            return
        before = self._n_ruled
        del self._tokens[len(self._tokens) - n_tokens :]
        n_left = len(self._tokens)
        if self._thinking is not None and (n_left < (self._n_free or 0) or not n_left):
            self._n_free = None
        if self._matcher.is_error() or not self._matcher.rollback(before - self._n_ruled):
            self._matcher = self._first.deep_copy()
            self._matcher.consume_tokens(self._tokens[n_left - self._n_ruled :])

    def close(self) -> None:
        """The reply is over."""
        self._grammars.take_back(self._key, self._matcher)

    def masks(self, drafts: Sequence[int] = ()) -> list[Words | None]:
        """What may follow after 0, 1, … drafts: [1 + n_drafts]; None where everything may.

        Masks behind a forbidden draft are None, as no pick can accept that draft.
        """
        found = [self._mask()]
        for token_id in drafts:
            if not self.push(token_id):
                break
            found.append(self._mask())
        self.pop(len(found) - 1)
        return found + [None] * (1 + len(drafts) - len(found))

    def mask(self, drafts: Sequence[int]) -> Words | None:
        """The last of `masks`."""
        n_pushed = self._pushed(drafts)
        found = self._mask() if n_pushed == len(drafts) else None
        self.pop(n_pushed)
        return found

    def n_legal(self, after: Sequence[int], drafts: Sequence[int]) -> int:
        """How many of the drafts, behind those of `after`, the grammar has a place for."""
        tokens = [*after, *drafts]
        if self._n_free is not None:
            n_found: int = self._matcher.validate_tokens(tokens)
        else:
            n_found = self._pushed(tokens)
            self.pop(n_found)
        return max(0, n_found - len(after))

    def forced(self, after: Sequence[int], n_max: int) -> list[int]:
        """The tokens that must come behind the drafts of `after`, as far as they are known now."""
        n_pushed = self._pushed(after)
        found: list[int] = []
        if n_pushed == len(after) and self._n_free is not None:
            found = self._matcher.compute_ff_tokens()[:n_max]
        self.pop(n_pushed)
        return found

    def _pushed(self, tokens: Sequence[int]) -> int:
        """Push as many of the tokens as may come; returns how many."""
        n_pushed = 0
        while n_pushed < len(tokens) and self.push(tokens[n_pushed]):
            n_pushed += 1
        return n_pushed

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
            piece = self._grammars.token_bytes(token_id)
            tail = piece + tail
            if len(tail) >= len(end) + len(piece):
                break
        last = self._grammars.token_bytes(self._tokens[-1])
        return end in tail[-(len(end) + len(last) - 1) :] if last else False

    def _mask(self) -> Words | None:
        opener = None if self._thinking is None or self._tokens else self._thinking.start
        if self._n_free is None and opener is None:
            return None
        words = np.frombuffer(self._matcher.compute_bitmask(), np.int32)  # [n_words]
        if self._matcher.is_error():
            self.failure = first_line(self._matcher.get_error())
            return np.zeros_like(words)
        return words if self._n_free is not None or opener is None else _with(words.copy(), opener)


def _behind(text: str, marks: Sequence[str]) -> str:
    """The text behind the last of the marks in it."""
    return text[max((text.rfind(one) + len(one) for one in marks if one in text), default=0) :]


def _with(words: Words, token_id: int) -> Words:
    """The mask with one more token allowed, in place."""
    words[token_id >> 5] |= np.uint32(1 << (token_id & 31)).astype(np.int32)
    return words


def _source(grammar: Grammar, matcher: Any) -> str:
    """The grammar as llguidance takes it. Raises ValueError."""
    made: str
    if grammar.kind == "json_schema":
        made = matcher.grammar_from_json_schema(grammar.source, overrides=dict(JSON_STYLE))
    elif grammar.kind == "regex":
        made = matcher.grammar_from_regex(grammar.source)
    else:
        made = matcher.grammar_from_lark(grammar.source)
    return made


def first_line(text: str) -> str:
    """The first line of a message, not too long: the rest may repeat the whole grammar."""
    return (text.strip().splitlines() or ["no reason given"])[0][:200]
