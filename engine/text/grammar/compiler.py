"""A grammar's text as a matcher in its first state, within limits of its size and of the work in each step.

llguidance's limits bound the work of a step, which cannot be interrupted: with these the worst grammars found take
0.1 s for a step, and schemas of a hundred tools are far from them. They do not bound compiling (`trial` does).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.engine.constraints import JSON_STYLE, Grammar
from slipstream.engine.errors import InvalidRequest, Unsupported
from slipstream.engine.text.panics import without_panics

_MOST_SYMBOLS = 100_000  # of a grammar; 128 tools of 10 properties each have 40,000
_MOST_STATES = 10_000  # of a lexer, of 1 to 2 kB each
_MOST_IN_ROW = 500  # items behind one byte
_MOST_ITEMS = 5_000  # in all of a step


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a compiler has to know of a tokenizer; plain data, so that another process can be given it."""

    tokenizer: str  # the text of tokenizer.json
    vocab_size: int  # tokens of a logits row
    eos_ids: Sequence[int]

    @without_panics
    def compiler(self, param: str) -> Compiler:
        """Takes a second for a large vocabulary. Raises `Unsupported`, naming the request's field `param`."""
        try:
            from llguidance import LLTokenizer
        except ImportError:
            raise Unsupported(param, "needs the package llguidance, which is not installed") from None
        try:
            tokenizer = LLTokenizer(
                self.tokenizer, n_vocab=self.vocab_size, eos_token=[*self.eos_ids] or None
            )
        except Exception as error:  # noqa: BLE001 - all it raises: kinds of tokenizers it cannot read
            reason = f"this model's tokenizer cannot be used with grammars ({first_line(str(error))})"
            raise Unsupported(param, reason) from None
        return Compiler(tokenizer)


class Compiler:
    """Makes matchers for one vocabulary."""

    def __init__(self, tokenizer: Any) -> None:
        """tokenizer: an `LLTokenizer`."""
        self._tokenizer = tokenizer
        self.n_words = 0  # of 32 bits, in a mask; known once there is a matcher

    @without_panics
    def matcher(self, grammar: Grammar) -> Any:
        """An `LLMatcher`; a first mask was taken of a copy, as some faults show only there. Raises `InvalidRequest`.

        Other threads run while it compiles.
        """
        from llguidance import LLMatcher, LLParserLimits

        try:
            source = _source(grammar, LLMatcher)
        except ValueError as error:
            raise InvalidRequest(grammar.param, f"not a usable grammar: {first_line(str(error))}") from None
        limits = LLParserLimits(
            max_grammar_size=_MOST_SYMBOLS,
            max_lexer_states=_MOST_STATES,
            max_items_in_row=_MOST_IN_ROW,
            step_max_items=_MOST_ITEMS,
            verbose_errors=False,
        )
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=limits)
        probe = matcher.deep_copy()
        allowed = probe.compute_bitmask()
        self.n_words = len(allowed) // 4
        if probe.is_error() or not any(allowed):
            reason = first_line(probe.get_error()) if probe.is_error() else "nothing can satisfy it"
            raise InvalidRequest(grammar.param, f"not a usable grammar: {reason}")
        return matcher


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
