"""Constraints: what they allow is a function of the tokens before, however those were pushed and popped."""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from slipstream.engine.constraints import Grammar
from slipstream.engine.errors import InvalidRequest, Unsupported
from slipstream.engine.text.grammar import constraint as constraint_module
from slipstream.engine.text.grammar import grammars as grammars_module
from slipstream.engine.text.grammar.compiler import Vocabulary
from slipstream.engine.text.grammar.constraint import Constraint, Thinking, Words
from slipstream.engine.text.grammar.grammars import Grammars
from slipstream.engine.text.grammar.turns import Turns
from slipstream.engine.text.tokenizer import Tokenizer
from tests.attack.grammars import ambiguous

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


def constraint_of(grammars: Grammars, grammar: Grammar, tail: str = "", tenant: str = "") -> Constraint:
    return grammars.constraint(grammar, tail, tenant).result(timeout=60)


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
        text = tokenizer.decode(walk(constraint_of(grammars, grammar), random))
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
    moved, tokens = constraint_of(grammars, grammar), []
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
        fresh = constraint_of(grammars, grammar)
        assert all(fresh.push(one) for one in tokens)
        assert allowed(moved) == allowed(fresh)
        assert moved.forced((), 9) == fresh.forced((), 9)
        assert moved.complete == fresh.complete


@pytest.mark.parametrize("way", ["draft", "guess", "cut back", "reply before"])
def test_a_mask_is_not_that_of_other_text_of_the_same_shape(
    grammars: Grammars, tokenizer: Tokenizer, way: str
) -> None:
    """A string is a key or an element by what opened it, and other tokens, now taken back, had opened it otherwise."""
    nested = Grammar("json_schema", '{"type": "object"}')
    ids = {tokenizer.decode([one]): one for one in range(VOCAB)}
    before, key, element, name = [ids['{"'], ids["name"], ids['": ']], ids['{"'], ids['["'], ids["the"]
    constraint, fresh = (constraint_of(grammars, nested, tenant=one) for one in (way, "fresh"))
    assert all(constraint.push(one) for one in before)
    if way == "draft":
        constraint.masks([key])
    elif way == "guess":
        constraint.mask([key])
    elif way == "cut back":
        assert constraint.push(key)
        constraint.masks()
        constraint.pop(1)
    else:
        assert constraint.push(key)
        constraint.masks()
        constraint = constraint_of(grammars, nested, tenant=way)
        assert all(constraint.push(one) for one in before)
    for one in (element, name):
        assert constraint.push(one)
    assert all(fresh.push(one) for one in (*before, element, name))
    assert allowed(constraint) == allowed(fresh)
    assert ids['": '] not in allowed(constraint)
    assert ids['"]'] in allowed(constraint)


def test_masks_after_drafts_are_those_of_the_tokens(grammars: Grammars) -> None:
    random = np.random.default_rng(2)
    tokens = walk(constraint_of(grammars, SCHEMA), random)
    masks = constraint_of(grammars, SCHEMA).masks(tokens)
    assert len(masks) == len(tokens) + 1
    one_by_one = constraint_of(grammars, SCHEMA)
    for token_id, mask in zip(tokens, masks, strict=False):
        assert token_id in ids_of(mask)
        assert ids_of(mask) == allowed(one_by_one)
        assert ids_of(constraint_of(grammars, SCHEMA).mask(one_by_one._tokens)) == ids_of(mask)
        one_by_one.push(token_id)
    assert ids_of(masks[-1]) == [0, 2], "nothing but end tokens follows"


def test_behind_a_forbidden_draft_nothing_is_said(grammars: Grammars) -> None:
    constraint = constraint_of(grammars, SCHEMA)
    first = constraint.forced((), 1)
    assert constraint.n_legal((), [*first, 3, 4]) == 1
    masks = constraint.masks([*first, 3, 4])
    assert masks[0] is not None
    assert masks[2:] == [None, None]
    assert constraint.n_legal([3], first) == 0


def test_forced_text_allows_only_its_canonical_tokens(grammars: Grammars, tokenizer: Tokenizer) -> None:
    constraint = constraint_of(grammars, SCHEMA)
    forced = constraint.forced((), 99)
    assert tokenizer.decode(forced) == '{"name": "'[: len(tokenizer.decode(forced))]
    assert len(forced) > 1
    for token_id in forced:
        assert allowed(constraint) == [token_id]
        assert constraint.push(token_id)
    # Other tokens could spell the same text; they are no drafts either.
    other = tokenizer.encode("{", add_special=False)
    assert other != forced[:1]
    fresh = constraint_of(grammars, SCHEMA)
    assert fresh.push(other[0]), "the grammar has a place for them"
    fresh.pop(1)
    assert other[0] not in allowed(fresh)


def test_it_is_complete_when_only_an_end_token_can_follow(grammars: Grammars, tokenizer: Tokenizer) -> None:
    constraint = constraint_of(grammars, Grammar("regex", "ab?"))
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
    made = constraint_of(grammars, SCHEMA)
    thinking = Thinking(opener, b"</t>")
    return Constraint(made._first, thinking, made._token_bytes, made._n_words)


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
    straight = constraint_of(grammars, SCHEMA).forced((), 2)
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
    constraint = constraint_of(grammars, Grammar(SCHEMA.kind, SCHEMA.source, ("<t>", "</t>")), tail)
    assert (constraint.masks()[0] is None) == free


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
        constraint_of(grammars, Grammar(kind, source, param="response_format"))  # type: ignore[arg-type]
    message = str(caught.value)
    assert message.startswith("response_format: not a usable grammar: ")
    assert len(message) < 300
    assert "\n" not in message


def test_large_grammars_are_compiled_within_limits(grammars: Grammars) -> None:
    many = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(500)}}
    enum = {"enum": [f"value {i}" for i in range(5000)]}
    long = {"type": "string", "maxLength": 10000}
    for schema in (many, enum, long):
        assert allowed(constraint_of(grammars, Grammar("json_schema", json.dumps(schema))))
    assert allowed(constraint_of(grammars, Grammar("regex", "(((a{1,100}){1,100}){1,100}){1,100}")))


def test_compiled_grammars_are_kept_but_not_without_bound(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = Grammars(tokenizer, VOCAB)
    first = constraint_of(grammars, Grammar("regex", "a0"))._first
    assert constraint_of(grammars, Grammar("regex", "a0"))._first is first
    for i in range(1, 70):
        constraint_of(grammars, Grammar("regex", f"a{i}"))
    assert len(grammars._kept) <= 64
    assert constraint_of(grammars, Grammar("regex", "a0"))._first is not first
    monkeypatch.setattr(grammars_module, "_MOST_SOURCE", 5)
    for source in ("aa", "ab", "ac"):
        constraint_of(grammars, Grammar("regex", source))
    assert [source for *_, source in grammars._kept] == ["ab", "ac"]


# --- what would cost others ---

PRIME = json.dumps({"type": "integer", "multipleOf": 9999991})
PATTERNS = json.dumps(
    {"allOf": [{"type": "string", "pattern": f"^(.*[a-m]{{{i}}}.*)$"} for i in range(1, 24)]}
)


# A limit is met behind "ab": when b is consumed, and when a mask is computed.
HIDDEN = Grammar("lark", ambiguous(200, 7, '"ab" r0 | "ad" /[a-z]{3}/'))
LETTERS = (f' | "{chr(97 + i % 26)}"\n' for i in range(30))
WIDE = Grammar(
    "lark", re.sub(' \\| "x"\n', lambda _: next(LETTERS), ambiguous(30, 3, '"ab" r0 | "ad" /[a-z]{3}/'))
)


@pytest.mark.parametrize(
    ("kind", "source", "limit"),
    [
        ("json_schema", PRIME, "compiling it takes more than"),
        ("json_schema", PATTERNS, "compiling it takes more than"),
        ("lark", ambiguous(200, 4), "Too many items|compiling it takes more than"),
    ],
    ids=["multipleOf", "allOf", "ambiguous"],
)
def test_a_grammar_that_takes_too_much_is_refused_and_costs_the_server_nothing(
    grammars: Grammars, kind: str, source: str, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    constraint_of(grammars, SCHEMA)  # the child has been started
    monkeypatch.setattr(grammars, "_compiler", None)
    monkeypatch.setattr(Vocabulary, "compiler", lambda *_: None)  # here, not in the child
    with pytest.raises(InvalidRequest, match=limit) as caught:
        constraint_of(grammars, Grammar(kind, source, param="json_schema"))  # type: ignore[arg-type]
    assert caught.value.param == "json_schema"


def test_a_child_that_is_lost_costs_one_request(tokenizer: Tokenizer) -> None:
    grammars = Grammars(tokenizer, VOCAB)
    constraint_of(grammars, Grammar("regex", "a"))
    assert grammars._trial is not None
    grammars._trial.start().close()
    with pytest.raises(Unsupported, match="was lost"):
        constraint_of(grammars, Grammar("regex", "b"))
    assert allowed(constraint_of(grammars, Grammar("regex", "b")))
    grammars.close()


def test_tenants_share_no_grammars(grammars: Grammars) -> None:
    first = constraint_of(grammars, SCHEMA, tenant="a")
    assert constraint_of(grammars, SCHEMA, tenant="a")._first is first._first
    assert constraint_of(grammars, SCHEMA, tenant="b")._first is not first._first


def test_turns_are_those_of_owners(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def add(owner: str, work: object) -> Future[Constraint]:
        asked.append(owner)
        return Future()

    monkeypatch.setattr(grammars._turns, "add", add)
    for salt in "12":
        grammars.constraint(Grammar("regex", "owned"), "", f"key:{salt}", "key")
    assert asked == ["key", "key"]


def test_owners_take_turns() -> None:
    """Work that is cancelled while it waits is not done; what it raises is raised where it is awaited."""
    turns: Turns[object] = Turns("test")
    done: list[str] = []
    gate = threading.Event()
    held = turns.add("a", lambda: gate.wait(60))
    names = ("a1", "a2", "a3", "b1", "b2", "c1")
    added = {name: turns.add(name[0], partial(done.append, name)) for name in names}
    failing = turns.add("b", lambda: 1 // 0)
    assert added["a2"].cancel()
    gate.set()
    held.result(60)
    with pytest.raises(ZeroDivisionError):
        failing.result(60)
    added["a3"].result(60)
    assert done == ["b1", "c1", "a1", "b2", "a3"]
    turns.close()


def test_drafts_that_meet_a_limit_are_not_offered_again(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """A constraint that checked them is what it was without them."""
    constraint = constraint_of(grammars, HIDDEN)
    before = allowed(constraint)
    (a,), (b,), (x,), (d,) = (tokenizer.encode(one, add_special=False) for one in "abxd")
    assert constraint.n_legal([], [a, b, x, x]) < 4
    assert allowed(constraint) == before
    assert constraint.n_legal([], [a, d]) == 0
    assert constraint.push(a)
    assert constraint.push(d)
    assert constraint.failure is None


@pytest.mark.parametrize("grammar", [HIDDEN, WIDE], ids=["in a token", "in a mask"])
def test_masks_behind_drafts_that_meet_a_limit_fail_nothing(
    grammars: Grammars, tokenizer: Tokenizer, grammar: Grammar
) -> None:
    """Only a token that is kept can fail a reply: otherwise the same reply would go on without drafts."""
    (a,), (b,), (x,), (d,) = (tokenizer.encode(one, add_special=False) for one in "abxd")
    constraint = constraint_of(grammars, grammar)
    assert constraint.push(a)
    before = allowed(constraint)
    for look in (constraint.masks, constraint.mask, lambda drafts: constraint.forced(drafts, 4)):
        look([b, x])
        assert allowed(constraint) == before
    constraint.n_legal([], [b, x])
    assert allowed(constraint) == before
    assert constraint.push(d)
    assert len(allowed(constraint)) > 20


def test_a_kept_token_that_meets_a_limit_fails_the_reply(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """By name, and whatever drafts are looked at afterwards: it is not taken for the reply without that token."""
    (a,), (b,) = (tokenizer.encode(one, add_special=False) for one in "ab")
    constraint = constraint_of(grammars, HIDDEN)
    assert constraint.push(a)
    assert b in allowed(constraint)
    constraint.push(b)
    assert constraint.n_legal([], [b]) == 0
    assert constraint.forced([], 4) == []
    assert not allowed(constraint)
    assert "items" in (constraint.failure or "")


def test_a_grammar_that_goes_on_being_slow_fails_its_reply(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One slow call is forgiven, and time that was saved does not count."""
    calls = SimpleNamespace(seconds=0.0, looks=0)

    def perf_counter() -> float:
        """Looked at before and behind each call."""
        calls.looks += 1
        return 0.0 if calls.looks % 2 else float(calls.seconds)

    monkeypatch.setattr(constraint_module.time, "perf_counter", perf_counter)
    constraint = constraint_of(grammars, Grammar("regex", "[a-z]{1000}"))
    for seconds, n, fails in ((0.001, 2000, False), (9.0, 1, False), (0.001, 100, False), (0.02, 20, True)):
        calls.seconds = seconds
        for _ in range(n):
            constraint.masks()
        assert (constraint.failure is not None) == fails
    assert "5 ms a token" in (constraint.failure or "")
    assert not allowed(constraint)
