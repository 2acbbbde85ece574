"""The grammars of one model: tried, compiled, kept per tenant, and handed to replies as constraints."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from slipstream.engine.constraints import Grammar
from slipstream.engine.text.grammar.compiler import Compiler, Vocabulary
from slipstream.engine.text.grammar.constraint import Constraint, Thinking
from slipstream.engine.text.grammar.trial import Trial
from slipstream.engine.text.grammar.turns import Turns
from slipstream.engine.text.panics import without_panics
from slipstream.engine.text.thinking import Opening, opening
from slipstream.engine.text.tokenizer import Tokenizer

Key = tuple[str, str, str]  # a grammar's tenant, kind and source

_MOST_KEPT = 64  # compiled grammars
_MOST_SOURCE = 8 << 20  # characters of all their sources; a matcher takes some 50 bytes for each


class Grammars:
    """Compiles the grammars of one tokenizer, and keeps those used last. Safe to use from several threads.

    Tenants share nothing, so that the time of a first use tells one nothing about another.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """vocab_size: tokens that a logits row has, which may be more than the tokenizer has."""
        self._text = tokenizer
        self._vocab_size = vocab_size
        self._compiler: Compiler | None = None
        self._trial: Trial | None = None
        self._turns: Turns[Any] = Turns("grammars")
        self._kept: OrderedDict[Key, Any] = OrderedDict()
        self._lock = threading.Lock()  # held for moments, as the engine's thread takes it too

    def constraint(
        self, grammar: Grammar, prompt_tail: str, tenant: str, owner: str = ""
    ) -> Future[Constraint]:
        """A fresh constraint for one reply; at once if the tenant's grammar is known, else when it is compiled.

        owner: whose turn it is then. An owner may have any number of tenants, one for each salt.
        The future may raise `InvalidRequest` for an unusable or too expensive grammar, and `Unsupported`.
        """
        thinking = self._thinking(grammar, prompt_tail)
        key = (tenant, grammar.kind, grammar.source)
        with self._lock:
            first = self._kept.get(key)
        if first is None:
            return self._turns.add(owner, partial(self._made, key, grammar, thinking))
        future: Future[Constraint] = Future()
        future.set_result(self._constraint(key, first, thinking))
        return future

    def close(self) -> None:
        """End the child process. Grammars that are not compiled yet are cancelled."""
        self._turns.close()
        if self._trial is not None:
            self._trial.close()

    def _made(self, key: Key, grammar: Grammar, thinking: Thinking | None) -> Constraint:
        """On the worker: try the grammar, then compile it, unless the request before in the queue has."""
        with self._lock:
            first = self._kept.get(key)
        if first is None:
            first = self._compile(grammar)
        return self._constraint(key, first, thinking)

    def _compile(self, grammar: Grammar) -> Any:
        if self._trial is None:
            text = self._text
            self._trial = Trial(Vocabulary(text.backend.to_str(), self._vocab_size, sorted(text.eos_ids)))
        with suppress(OSError):  # which `check` will meet again
            self._trial.start()  # at first it reads the vocabulary while the next line does
        if self._compiler is None:
            self._compiler = self._trial.vocabulary.compiler(grammar.param)
        self._trial.check(grammar)
        return self._compiler.matcher(grammar)

    @without_panics
    def _constraint(self, key: Key, first: Any, thinking: Thinking | None) -> Constraint:
        self._keep(key, first)
        return Constraint(
            first,
            thinking,
            token_bytes=self._text.token_bytes,
            n_words=0 if self._compiler is None else self._compiler.n_words,
        )

    def _keep(self, key: Key, first: Any) -> None:
        with self._lock:
            self._kept[key] = first
            self._kept.move_to_end(key)
            while len(self._kept) > 1 and (
                len(self._kept) > _MOST_KEPT or sum(len(source) for *_, source in self._kept) > _MOST_SOURCE
            ):
                self._kept.popitem(last=False)

    def _thinking(self, grammar: Grammar, prompt_tail: str) -> Thinking | None:
        """How the reply may think before the grammar begins; None if it begins at once."""
        if grammar.reasoning is None:
            return None
        start, end = grammar.reasoning
        stage = opening(prompt_tail, grammar.reasoning, self._text)
        if stage is Opening.OPEN:
            return Thinking(None, end.encode())
        opener = None if stage is Opening.NONE else self._text.backend.token_to_id(start)
        return None if opener is None else Thinking(opener, end.encode())
