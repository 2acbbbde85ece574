"""Thinking that is cut after a number of tokens: what may come is a function of the reply's tokens alone."""

from __future__ import annotations

import json

import numpy as np
import pytest

from slipstream.engine.constraints import Grammar, ThinkingBudget
from slipstream.engine.text.grammar.constraint import Constraint, Words
from slipstream.engine.text.grammar.grammars import Grammars
from slipstream.engine.text.thinking import CutThinking, Opening, cut_of, opening
from slipstream.engine.text.tokenizer import Tokenizer
from tests.oracle.lab import DEMO

TAGS = ("<t>", "</t>")
N_WORDS = 128


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(DEMO.target)


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special=False)


def cut(
    tokenizer: Tokenizer,
    n_tokens: int,
    tail: str = "<t>",
    message: str = "",
    rules: Constraint | None = None,
) -> CutThinking:
    made = cut_of(ThinkingBudget(n_tokens, TAGS, message), tail, tokenizer)
    assert made is not None
    return CutThinking(made, rules, tokenizer.token_bytes, N_WORDS)


def only_token(words: Words | None) -> int | None:
    """The token that a mask leaves; None: it leaves all."""
    if words is None:
        return None
    (token_id,) = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
    return int(token_id)


def forced(made: CutThinking) -> int | None:
    return only_token(made.masks()[0])


def test_thinking_is_free_until_it_is_cut_and_so_is_what_follows(tokenizer: Tokenizer) -> None:
    thoughts, closing = (
        ids(tokenizer, "so x < y, then")[:5],
        ids(tokenizer, "Enough.") + ids(tokenizer, TAGS[1]),
    )
    made = cut(tokenizer, 5, message="Enough.")
    for token_id in thoughts:
        assert forced(made) is None
        assert made.forced((), 9) == []
        assert made.push(token_id)
    assert made.forced((), 99) == closing
    assert made.forced(closing[:1], 2) == closing[1:3]
    assert made.forced([closing[0] + 1], 2) == []
    assert not made.push(closing[0] + 1)
    for i, token_id in enumerate(closing):
        assert forced(made) == token_id
        assert made.forced((), 99) == closing[i:]
        assert made.push(token_id)
    for token_id in ids(tokenizer, "an answer as long as it likes"):
        assert forced(made) is None
        assert made.push(token_id)
    assert not made.complete


def test_drafts_meet_the_cut_where_the_reply_does(tokenizer: Tokenizer) -> None:
    closing = ids(tokenizer, TAGS[1])
    reply = [*ids(tokenizer, "one two three four")[:4], *closing, *ids(tokenizer, "then free")]
    step = cut(tokenizer, 4)
    single = []
    for token_id in reply:
        single.append(forced(step))
        assert step.mask(()) is None or only_token(step.mask(())) == single[-1]
        assert step.push(token_id)
    burst = cut(tokenizer, 4)
    assert [only_token(one) for one in burst.masks(reply)] == [*single, forced(step)]
    assert [only_token(burst.mask(reply[:n])) for n in range(len(reply))] == single
    assert burst.n_tokens == 0, "drafts leave no trace"
    assert burst.n_legal((), reply) == len(reply)
    assert burst.n_legal(reply[:3], reply[3:]) == len(reply) - 3
    wrong = [*reply[:4], closing[0] + 1, *reply[5:]]
    assert burst.n_legal((), wrong) == 4
    assert burst.n_legal(wrong[:5], wrong[5:]) == 0
    masks = burst.masks(wrong)
    assert only_token(masks[4]) == closing[0]
    assert masks[5:] == [None] * (len(wrong) - 4)


def test_pushing_and_popping_leaves_what_a_fresh_one_has(tokenizer: Tokenizer) -> None:
    random = np.random.default_rng(3)
    words = ids(tokenizer, "<t> </t> <t>x</t> a b c < / t > <")
    for _ in range(20):
        made, tokens = cut(tokenizer, 4, tail="", message="no"), list[int]()
        for _ in range(40):
            if tokens and random.random() < 0.4:
                n = int(random.integers(1, len(tokens) + 1))
                made.pop(n)
                del tokens[-n:]
            else:
                due = forced(made)
                tokens.append(int(random.choice(words)) if due is None or random.random() < 0.1 else due)
                if not made.push(tokens[-1]):
                    tokens.pop()
            fresh = cut(tokenizer, 4, tail="", message="no")
            assert all(fresh.push(one) for one in tokens)
            assert (made.n_tokens, made.forced((), 9), forced(made)) == (
                len(tokens),
                fresh.forced((), 9),
                forced(fresh),
            )


def test_a_far_cut_rules_nothing_yet(tokenizer: Tokenizer) -> None:
    """Passes may then be launched behind one that is not read, as if there were no limit."""
    opened, made = cut(tokenizer, 200, tail=""), cut(tokenizer, 200)
    assert (opened.may_rule(200), opened.may_rule(201)) == (False, True)
    word = ids(tokenizer, "a")[0]
    for n in range(200):
        assert made.may_rule(130) == (n > 70)
        assert made.push(word)
    for token_id in ids(tokenizer, TAGS[1]):
        assert made.may_rule(1)
        assert made.push(token_id)
    assert not made.may_rule(130)


@pytest.mark.parametrize("reply", ["a</t> and much more text", "</t> at once", "x<t></t> and more than ten"])
def test_thinking_that_ends_in_time_is_not_cut(tokenizer: Tokenizer, reply: str) -> None:
    made = cut(tokenizer, 10)
    for token_id in ids(tokenizer, reply):
        assert made.push(token_id)
        assert forced(made) is None


def test_a_reply_opens_its_thinking_or_goes_straight_to_the_point(tokenizer: Tokenizer) -> None:
    closing = ids(tokenizer, TAGS[1])
    opened = cut(tokenizer, 3, tail="assistant\n")
    for token_id in [*ids(tokenizer, "\n<t>"), *ids(tokenizer, "one two three")[:3]]:
        assert forced(opened) is None
        assert opened.push(token_id)
    assert forced(opened) == closing[0]
    straight = cut(tokenizer, 3, tail="assistant\n")
    for token_id in ids(tokenizer, "an answer that speaks of <t> and is long"):
        assert straight.push(token_id)
        assert forced(straight) is None


def test_no_thinking_at_all(tokenizer: Tokenizer) -> None:
    closing = ids(tokenizer, TAGS[1])
    assert cut(tokenizer, 0).forced((), 99) == closing
    opened = cut(tokenizer, 0, tail="")
    assert all(opened.push(one) for one in ids(tokenizer, TAGS[0]))
    assert opened.forced((), 99) == closing


def test_a_character_is_not_cut_in_half(tokenizer: Tokenizer) -> None:
    letters = ids(tokenizer, "𝔘𝔘")
    assert len(letters) >= 4, "characters of several tokens"
    assert b"".join(map(tokenizer.token_bytes, letters)).decode() == "𝔘𝔘"
    made = cut(tokenizer, 1)
    n = 0
    while forced(made) is None:
        assert made.push(letters[n])
        n += 1
    assert b"".join(map(tokenizer.token_bytes, letters[:n])).decode() == "𝔘"


def test_what_else_a_reply_must_be_rules_behind_the_cut(tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    grammar = Grammar("json_schema", json.dumps(schema), TAGS)
    grammars = Grammars(tokenizer, 32 * N_WORDS)
    made = cut(tokenizer, 2, rules=grammars.constraint(grammar, "<t>", "").result(timeout=60))
    closing = ids(tokenizer, TAGS[1])
    thoughts = ids(tokenizer, "well, well")[:2]
    assert all(made.push(one) for one in [*thoughts, *closing])
    begins = made.forced((), 9)
    assert tokenizer.decode(begins).startswith('{"a')
    assert forced(made) == begins[0]
    assert not made.push(closing[0]), "not what the grammar forces"
    assert made.n_tokens == 2 + len(closing)
    made.pop(1)
    assert forced(made) == closing[-1]
    assert made.n_legal(closing[-1:], [*begins, closing[0]]) == len(begins)
    assert made.push(closing[-1])
    for token_id in [*begins, *ids(tokenizer, "true}")]:
        made.push(token_id)
    assert made.complete
    assert made.failure is None
    grammars.close()


@pytest.mark.parametrize(
    ("tail", "wanted"),
    [
        ("x<t>\n", Opening.OPEN),
        ("<t>\n\n</t>\n\n", Opening.NONE),
        ("</t> y <t>", Opening.OPEN),
        ("nothing", Opening.MAY),
        ("user: what is <t>?<|im_end|>\n<|im_start|>assistant\n", Opening.MAY),
        ("<t>hm</t> so<|im_end|>\n", Opening.MAY),
    ],
)
def test_the_prompts_end_says_whether_thinking_has_begun(
    tokenizer: Tokenizer, tail: str, wanted: Opening
) -> None:
    assert opening(tail, TAGS, tokenizer) is wanted
    if wanted is Opening.NONE:
        assert cut_of(ThinkingBudget(1, TAGS), tail, tokenizer) is None


def test_a_control_token_in_the_marker_does_not_begin_a_turn(tokenizer: Tokenizer) -> None:
    markers = ("<|im_start|>thought", "<|im_end|>")
    assert opening("<|im_start|>thought\n", markers, tokenizer) is Opening.OPEN
    assert opening("<|im_start|>thought\n<|im_end|>", markers, tokenizer) is Opening.NONE
