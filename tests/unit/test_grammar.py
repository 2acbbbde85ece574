"""Constraints: what they allow is a function of the tokens before, however those were pushed and popped."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from slipstream.engine.api import Grammar
from slipstream.engine.errors import InvalidRequest
from slipstream.engine.text.grammar import Constraint, Grammars, Thinking, Words
from slipstream.engine.text.tokenizer import Tokenizer

DEMO = Path(__file__).parents[2] / "demo" / "target"
VOCAB = 4096
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["animal", "vegetable"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 4},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}
SCHEMA = Grammar("json_schema", json.dumps(PERSON))
KINDS = (
    SCHEMA,
    Grammar("regex", "[a-c]{2,5}(x|yy)?"),
    Grammar("lark", 'start: "yes" | "no, " /[a-z ]{3,12}/ "."'),
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(DEMO)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, VOCAB)


def ids_of(words: Words | None) -> list[int]:
    """The tokens that a mask allows."""
    if words is None:
        return list(range(VOCAB))
    bits = np.unpackbits(words.view(np.uint8), bitorder="little", count=VOCAB)
    return [int(i) for i in np.flatnonzero(bits)]


def allowed(constraint: Constraint) -> list[int]:
    return ids_of(constraint.masks()[0])


def walk(constraint: Constraint, random: np.random.Generator, most: int = 60) -> list[int]:
    """A random reply under the constraint, without its end token."""
    tokens: list[int] = []
    while not constraint.complete and len(tokens) < most:
        token_id = int(random.choice(allowed(constraint)))
        if token_id in (0, 2):
            break
        assert constraint.push(token_id)
        tokens.append(token_id)
    return tokens


@pytest.mark.parametrize("grammar", KINDS, ids=lambda one: one.kind)
def test_a_reply_under_a_grammar_is_in_it(grammars: Grammars, tokenizer: Tokenizer, grammar: Grammar) -> None:
    random = np.random.default_rng(0)
    for _ in range(20):
        text = tokenizer.decode(walk(grammars.constraint(grammar, ""), random))
        if grammar.kind == "json_schema":
            made = json.loads(text)
            assert list(made) == ["name", "kind", "sizes"]
            assert len(made["name"]) <= 12
            assert all(0 <= one <= 99 for one in made["sizes"])
        elif grammar.kind == "regex":
            assert re.fullmatch(grammar.source, text)
        else:
            assert re.fullmatch(r"yes|no, [a-z ]{3,12}\.", text)


@pytest.mark.parametrize("grammar", KINDS, ids=lambda one: one.kind)
def test_pushing_and_popping_leaves_what_a_fresh_constraint_has(grammars: Grammars, grammar: Grammar) -> None:
    random = np.random.default_rng(1)
    moved, tokens = grammars.constraint(grammar, ""), []
    for _ in range(60):
        if tokens and random.random() < 0.4:
            n = int(random.integers(1, len(tokens) + 1))
            moved.pop(n)
            del tokens[-n:]
        else:
            tokens += walk(moved, random, int(random.integers(1, 8)))
        drafts = [int(one) for one in random.integers(0, VOCAB, 3)]
        assert moved.n_legal((), drafts) <= 3
        moved.masks(drafts)
        fresh = grammars.constraint(grammar, "")
        assert all(fresh.push(one) for one in tokens)
        assert allowed(moved) == allowed(fresh)
        assert moved.forced((), 9) == fresh.forced((), 9)
        assert moved.complete == fresh.complete


def test_masks_after_drafts_are_those_of_the_tokens(grammars: Grammars) -> None:
    random = np.random.default_rng(2)
    tokens = walk(grammars.constraint(SCHEMA, ""), random)
    masks = grammars.constraint(SCHEMA, "").masks(tokens)
    assert len(masks) == len(tokens) + 1
    one_by_one = grammars.constraint(SCHEMA, "")
    for token_id, mask in zip(tokens, masks, strict=False):
        assert token_id in ids_of(mask)
        assert ids_of(mask) == allowed(one_by_one)
        assert ids_of(grammars.constraint(SCHEMA, "").mask(one_by_one._tokens)) == ids_of(mask)
        one_by_one.push(token_id)
    assert ids_of(masks[-1]) == [0, 2], "nothing but end tokens follows"


def test_behind_a_forbidden_draft_nothing_is_said(grammars: Grammars) -> None:
    constraint = grammars.constraint(SCHEMA, "")
    first = constraint.forced((), 1)
    assert constraint.n_legal((), [*first, 3, 4]) == 1
    masks = constraint.masks([*first, 3, 4])
    assert masks[0] is not None
    assert masks[2:] == [None, None]
    assert constraint.n_legal([3], first) == 0


def test_forced_text_allows_only_its_canonical_tokens(grammars: Grammars, tokenizer: Tokenizer) -> None:
    constraint = grammars.constraint(SCHEMA, "")
    forced = constraint.forced((), 99)
    assert tokenizer.decode(forced) == '{"name": "'[: len(tokenizer.decode(forced))]
    assert len(forced) > 1
    for token_id in forced:
        assert allowed(constraint) == [token_id]
        assert constraint.push(token_id)
    # Other tokens could spell the same text; they are no drafts either.
    other = tokenizer.encode("{", add_special=False)
    assert other != forced[:1]
    fresh = grammars.constraint(SCHEMA, "")
    assert fresh.push(other[0]), "the grammar has a place for them"
    fresh.pop(1)
    assert other[0] not in allowed(fresh)


def test_it_is_complete_when_only_an_end_token_can_follow(grammars: Grammars, tokenizer: Tokenizer) -> None:
    constraint = grammars.constraint(Grammar("regex", "ab?"), "")
    a, b = (tokenizer.encode(one, add_special=False)[0] for one in "ab")
    assert constraint.push(a)
    assert not constraint.complete
    assert {0, 2, b} <= set(allowed(constraint))
    assert constraint.push(b)
    assert constraint.complete
    constraint.pop(1)
    assert not constraint.complete


# --- thinking first ---


def think(grammars: Grammars, opener: int | None) -> Constraint:
    made = grammars.constraint(SCHEMA, "")
    return Constraint(grammars, made._key, made._first, made._matcher, Thinking(opener, b"</t>"))


def test_thinking_is_free_and_the_grammar_rules_behind_its_end(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    constraint = think(grammars, None)
    tokens = tokenizer.encode("so x < y </t>", add_special=False)
    for token_id in tokens:
        assert constraint.masks()[0] is None
        assert constraint.forced((), 5) == []
        assert constraint.push(token_id)
    forced = constraint.forced((), 9)
    assert allowed(constraint) == forced[:1]
    assert not constraint.push(3)
    # The same inside a burst that crosses the end.
    burst = think(grammars, None)
    masks = burst.masks([*tokens, *forced, 3])
    assert masks[: len(tokens)] == [None] * len(tokens)
    assert ids_of(masks[len(tokens)]) == forced[:1]
    assert burst.n_legal((), [*tokens, *forced, 3]) == len(tokens) + len(forced)
    assert burst.masks()[0] is None, "drafts leave no trace"


def test_taking_back_the_end_of_thinking_makes_the_reply_free_again(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    constraint = think(grammars, None)
    tokens = tokenizer.encode("a </t>", add_special=False)
    assert all(constraint.push(one) for one in tokens)
    forced = constraint.forced((), 2)
    assert all(constraint.push(one) for one in forced)
    constraint.pop(len(forced) + 1)
    assert constraint.masks()[0] is None
    assert constraint.push(tokens[-1])
    assert constraint.forced((), 2) == forced


def test_a_reply_may_open_its_thinking_or_go_straight_to_the_point(grammars: Grammars) -> None:
    opener = 1  # <|im_start|>
    constraint = think(grammars, opener)
    straight = grammars.constraint(SCHEMA, "").forced((), 2)
    assert allowed(constraint) == sorted([opener, straight[0]])
    assert constraint.push(straight[0])
    assert allowed(constraint) == [straight[1]]
    constraint.pop(1)
    assert allowed(constraint) == sorted([opener, straight[0]])
    assert constraint.push(opener)
    assert constraint.masks()[0] is None


@pytest.mark.parametrize(
    ("tail", "free"),
    [
        ("x<t>\n", True),
        ("<t>\n\n</t>\n\n", False),
        ("</t> y <t>", True),
        ("nothing", False),
        ("user: what is <t>?<|im_end|>\n<|im_start|>assistant\n", False),
        ("user: what is </t>?<|im_end|>\n<|im_start|>assistant\n<t>\nwell, ", True),
    ],
)
def test_the_prompts_end_says_whether_thinking_has_begun(grammars: Grammars, tail: str, free: bool) -> None:
    made = grammars.constraint(Grammar(SCHEMA.kind, SCHEMA.source, ("<t>", "</t>")), tail)
    assert (made.masks()[0] is None) == free


# --- what cannot be ---


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("json_schema", '{"type": "strin"}'),
        ("json_schema", "[1"),
        ("json_schema", '{"allOf": [{"type": "string"}, {"type": "integer"}]}'),
        ("json_schema", '{"$ref": "#"}'),
        ("json_schema", '{"$ref": "#/nowhere"}'),
        ("json_schema", '{"$ref": "https://example.com/schema"}'),
        ("json_schema", '{"type": "string", "pattern": "(?=a)b"}'),
        ("regex", "(a"),
        ("regex", "(?=a)b"),
        ("lark", "start: nowhere"),
        ("lark", "no rules at all"),
        ("json_schema", '{"type": "array", "items": ' * 5000 + "{}" + "}" * 5000),
    ],
)
def test_a_grammar_that_cannot_be_is_refused_in_a_line(grammars: Grammars, kind: str, source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        grammars.constraint(Grammar(kind, source, param="response_format"), "")  # type: ignore[arg-type]
    message = str(caught.value)
    assert message.startswith("response_format: not a usable grammar: ")
    assert len(message) < 300
    assert "\n" not in message


def test_large_grammars_are_compiled_within_limits(grammars: Grammars) -> None:
    many = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(500)}}
    enum = {"enum": [f"value {i}" for i in range(5000)]}
    long = {"type": "string", "maxLength": 10000}
    for schema in (many, enum, long):
        assert allowed(grammars.constraint(Grammar("json_schema", json.dumps(schema)), ""))
    assert allowed(grammars.constraint(Grammar("regex", "(((a{1,100}){1,100}){1,100}){1,100}"), ""))


def test_compiled_grammars_are_kept_but_not_without_bound(tokenizer: Tokenizer) -> None:
    grammars = Grammars(tokenizer, VOCAB)
    first = grammars.constraint(Grammar("regex", "a0"), "")._first
    assert grammars.constraint(Grammar("regex", "a0"), "")._first is first
    for i in range(1, 70):
        grammars.constraint(Grammar("regex", f"a{i}"), "")
    assert len(grammars._kept) <= 64
    assert grammars.constraint(Grammar("regex", "a0"), "")._first is not first


@pytest.mark.parametrize("grammar", KINDS, ids=lambda one: one.kind)
def test_a_matcher_that_is_used_again_starts_anew(tokenizer: Tokenizer, grammar: Grammar) -> None:
    grammars, random = Grammars(tokenizer, VOCAB), np.random.default_rng(3)
    fresh = Grammars(tokenizer, VOCAB)
    for _ in range(10):
        constraint = grammars.constraint(grammar, "")
        tokens = walk(constraint, random, int(random.integers(1, 30)))
        for n in range(len(tokens)):
            anew = fresh.constraint(grammar, "")
            assert all(anew.push(one) for one in tokens[:n])
            again = grammars.constraint(grammar, "")
            assert all(again.push(one) for one in tokens[:n])
            assert allowed(again) == allowed(anew)
            again.close()
        matcher = constraint._matcher
        constraint.close()
        assert grammars._used[-1][1] is matcher
    assert grammars._used
    assert not fresh._used
    for i in range(70):
        grammars.constraint(Grammar("regex", f"b{i}"), "").close()
    assert len(grammars._used) <= 64
    assert all(key[1].startswith("b") for key, _ in grammars._used)
