"""Forced text that is remembered changes nothing: masks, drafts and ends are those of a matcher without memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.engine.constraints import Grammar
from slipstream.engine.text.grammar.constraint import Constraint, Words
from slipstream.engine.text.grammar.forced_text import ForcedText
from slipstream.engine.text.grammar.grammars import Grammars
from slipstream.engine.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer(Path(__file__).parents[2] / "demo" / "target")
VOCAB = 4096
END = 2
RECORD = {
    "type": "object",
    "properties": {
        "snake_case_number_1234567": {"enum": ["the quick brown fox", "the quick  12345678\n\n\tfox"]},
        "größe": {"const": "漢字 éè"},
        "count": {"const": 1234567890123},
        "free": {"type": "string", "maxLength": 5},
    },
    "required": ["snake_case_number_1234567", "größe", "count", "free"],
    "additionalProperties": False,
}
GRAMMARS = (
    Grammar("json_schema", json.dumps(RECORD)),
    Grammar("lark", 'start: "once upon a time" ("and a time" | " and again") /[a-c]{2}/ "the end of it"'),
)


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(TOKENIZER, VOCAB)
    yield made
    made.close()


def constraint_of(grammars: Grammars, grammar: Grammar) -> Constraint:
    return grammars.constraint(grammar, "", "").result(timeout=60)


def ids_of(words: Words) -> list[int]:
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little", count=VOCAB)).tolist()


def bare(constraint: Constraint, tokens: Sequence[int]) -> Any:
    """A matcher in the state behind the tokens."""
    matcher = constraint._first.deep_copy()
    assert matcher.try_consume_tokens(list(tokens)) == len(tokens)
    return matcher


def others(token_id: int) -> list[int]:
    """Tokens that begin the text of this one, and are not it."""
    data = TOKENIZER.token_bytes(token_id)
    return [
        i
        for i in range(3, VOCAB)
        if i != token_id and (own := TOKENIZER.token_bytes(i)) and data.startswith(own)
    ]


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda one: one.kind)
def test_what_is_said_is_what_a_matcher_says(grammars: Grammars, grammar: Grammar) -> None:
    random = np.random.default_rng(3)
    seen = {"forced": 0, "astray": 0, "complete": 0}
    for _ in range(3):
        constraint, tokens = constraint_of(grammars, grammar), list[int]()
        for _ in range(130):
            matcher = bare(constraint, tokens)
            known = matcher.compute_ff_tokens()
            drafts = [*known[: int(random.integers(0, len(known) + 1))]]
            if len(known) > len(drafts) and random.random() < 0.4 and (spelt := others(known[len(drafts)])):
                drafts.append(int(random.choice(spelt)))  # legal, and not what is forced
                seen["astray"] += 1
            drafts += [int(one) for one in random.integers(3, VOCAB, int(random.integers(0, 2)))]
            looks = list(random.permutation(4))
            for look in looks:
                if look == 0:
                    n_legal = matcher.try_consume_tokens(drafts)
                    matcher.rollback(n_legal)
                    assert constraint.n_legal((), drafts) == n_legal
                elif look == 1:
                    assert constraint.forced((), 99) == known
                elif look == 2:
                    check_masks(constraint, tokens, drafts)
                else:
                    assert constraint.complete == matcher.is_stopped()
            seen["forced"] += bool(known)
            seen["complete"] += constraint.complete
            if (tokens and random.random() < 0.02) or constraint.complete:
                n_popped = int(random.integers(1, 1 + min(len(tokens), 20)))
                constraint.pop(n_popped)
                del tokens[len(tokens) - n_popped :]
            else:
                allowed = [one for one in ids_of(constraint.masks()[0]) if one != END]
                token_id = int(random.choice(allowed))
                assert constraint.push(token_id)
                tokens.append(token_id)
    assert all(seen.values()), seen


def check_masks(constraint: Constraint, tokens: Sequence[int], drafts: Sequence[int]) -> None:
    matcher = bare(constraint, tokens)
    for draft, mask in zip([*drafts, None], constraint.masks(drafts), strict=True):
        if mask is None:
            return
        assert mask.tobytes() == matcher.compute_bitmask()
        if draft is None or not matcher.try_consume_tokens([draft]):
            matcher = bare(constraint, tokens)


def test_a_matcher_is_asked_once_for_text_that_is_forced(grammars: Grammars) -> None:
    constraint = constraint_of(grammars, GRAMMARS[0])
    known = constraint.forced((), 99)
    assert len(known) > 5

    class Silent:
        """A matcher that must not be asked."""

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(name)

        def is_error(self) -> bool:
            return False

    matcher, constraint._matcher = constraint._matcher, Silent()
    for i, token_id in enumerate(known[:-1]):
        assert ids_of(constraint.masks()[0] if i % 2 else constraint.mask(())) == [token_id]
        assert constraint.push(token_id)
        assert constraint.n_legal((), known[i + 1 :]) == len(known) - i - 1
        assert not constraint.complete
    # Astray and back.
    constraint._forced.follow(len(known) - 1, END)
    constraint._forced.cut(len(known) - 1)
    assert ids_of(constraint.masks()[0]) == known[-1:]
    constraint._matcher = matcher
    assert constraint.push(known[-1])
    assert constraint.masks()[0].tobytes() == bare(constraint, known).compute_bitmask()


def test_a_place_is_known_until_it_is_cut_off() -> None:
    text = ForcedText()
    text.learn(2, [5, 6, 7])
    assert text.after(2) == [5, 6, 7]
    assert text.follow(2, 5)
    assert text.after(3) == [6, 7]
    assert not text.follow(3, 9), "another token"
    assert not text.after(4)
    text.learn(4, [1])
    assert not text.after(4), "nothing is kept of places astray"
    text.cut(3)
    assert text.after(3) == [6, 7]
    assert text.follow(3, 6)
    assert not text.follow(4, 7), "the last that is known"
    text.learn(5, [8])
    text.cut(4)
    assert text.after(4) == [7]
    text.cut(1)
    assert not text.after(1)


def test_endless_text_is_not_kept() -> None:
    text = ForcedText()
    text.learn(0, [1] * 5000)
    assert not text.after(0)
