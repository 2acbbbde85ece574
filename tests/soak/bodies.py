"""Requests for text, by kind: each kind makes bodies of random numbers, the same for the same numbers."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Mapping
from typing import Any

from tests.fuzz.requests import CALLED, TOOL, schema
from tests.process import ROOT

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
Body = dict[str, Any]
Make = Callable[[random.Random], tuple[str, Body]]
WORDS = (
    "def",
    "x",
    "return",
    "for",
    "(a, b):",
    "\n    ",
    "self.",
    "value",
    "=",
    "None",
    "import os\n",
    "0",
    "é",
)
MOST_CHARS = 1400  # of a task's messages: some 600 tokens
N_SHARED, SHARED_CHARS = 4, 1000


@functools.cache
def _tasks() -> list[list[Body]]:
    lines = (ROOT / "demo" / "tasks.jsonl").read_text().splitlines()
    found = [json.loads(line)["messages"] for line in lines]
    return [one for one in found if len(json.dumps(one)) < MOST_CHARS]


@functools.cache
def _shared() -> list[str]:
    """Beginnings that many prompts have in common."""
    source = (ROOT / "demo" / "loop.py").read_text()
    return [source[i * 500 :][:SHARED_CHARS] for i in range(N_SHARED)]


def _words(dice: random.Random, least: int, most: int) -> str:
    return " ".join(dice.choices(WORDS, k=dice.randint(least, most)))


def _sampling(dice: random.Random, most_tokens: int = 48) -> Body:
    """A seed, a length, and one of several ways to sample."""
    ways: tuple[Body, ...] = (
        {"temperature": 0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 40, "min_p": 0.02},
        {"temperature": 0.7, "repeat_penalty": 1.1, "presence_penalty": 0.3, "frequency_penalty": 0.2},
        {"temperature": 1.2, "logit_bias": {str(dice.randrange(300)): -100}},
    )
    ends = {"ignore_eos": True} if dice.random() < 0.3 else {}
    return {
        "seed": dice.randrange(2**31),
        "max_tokens": dice.randint(1, most_tokens),
        **dice.choice(ways),
        **ends,
    }


def chat(dice: random.Random) -> tuple[str, Body]:
    return CHAT, {"messages": dice.choice(_tasks()), **_sampling(dice)}


def text(dice: random.Random) -> tuple[str, Body]:
    return TEXT, {"prompt": _words(dice, 1, 60), **_sampling(dice)}


def choices(dice: random.Random) -> tuple[str, Body]:
    """Several choices of one prompt, or one of several prompts, or both."""
    prompts: list[Any] = [_words(dice, 1, 20), _words(dice, 1, 20)]
    if dice.random() < 0.3:
        prompts = [[dice.randrange(300, 4000) for _ in range(9)], [7]]
    body = {"prompt": prompts if dice.random() < 0.6 else prompts[0], "n": dice.randint(1, 3)}
    return TEXT, {**body, **_sampling(dice, 24)}


def tools(dice: random.Random) -> tuple[str, Body]:
    messages = dice.choice((CALLED, *_tasks()[:5]))
    named = {"type": "function", "function": {"name": "look"}}
    choice = dice.choice(("required", "auto", named))
    return CHAT, {**_sampling(dice, 64), "messages": messages, "tools": [TOOL], "tool_choice": choice}


def of_schema(dice: random.Random) -> tuple[str, Body]:
    """A schema that is always the same, or one with a number in it that few requests have."""
    body: Mapping[str, Any] = schema()
    if dice.random() < 0.5:
        numbered = {"type": "object", "properties": {f"key_{dice.randrange(10**6)}": {"type": "boolean"}}}
        body = {"json_schema": {**numbered, "additionalProperties": False}}
    return CHAT, {"messages": dice.choice(_tasks()), **_sampling(dice), **body}


def lark(dice: random.Random) -> tuple[str, Body]:
    source = f'start: "{dice.choice(("yes", "no"))}" NAME "{dice.randrange(10**6)}"\nNAME: /[a-z]{{2,9}}/\n'
    return TEXT, {"prompt": _words(dice, 3, 9), "grammar": source, **_sampling(dice)}


def gbnf(dice: random.Random) -> tuple[str, Body]:
    source = f'root ::= item+ "{dice.randrange(10**6)}"\nitem ::= [a-z]{{1,5}} "\\n"\n'
    return TEXT, {"prompt": _words(dice, 3, 9), "grammar": source, **_sampling(dice)}


def logprobs(dice: random.Random) -> tuple[str, Body]:
    path, body = dice.choice((chat, text))(dice)
    asked: Body = {"logprobs": True, "top_logprobs": 3} if path == CHAT else {"logprobs": 2}
    return path, {**body, **asked}


def echo(dice: random.Random) -> tuple[str, Body]:
    asked = dice.choice(({"logprobs": 1}, {}))
    return TEXT, {"prompt": _words(dice, 1, 80), "echo": True, **asked, **_sampling(dice, 9)}


def prediction(dice: random.Random) -> tuple[str, Body]:
    messages = dice.choice(_tasks())
    return CHAT, {
        "messages": messages,
        "prediction": {"type": "content", "content": str(messages[-1]["content"])},
        **_sampling(dice, 64),
    }


def stops(dice: random.Random) -> tuple[str, Body]:
    body = {"messages": dice.choice(_tasks()), **_sampling(dice, 64)}
    body["min_tokens"] = dice.randint(0, min(4, body["max_tokens"]))
    return CHAT, body | {"stop": dice.sample(["\n", "def", "    ", "e", "return"], 2)}


def long(dice: random.Random) -> tuple[str, Body]:
    """A prompt of several chunks, which no other request begins with."""
    return TEXT, {"prompt": f"{dice.randrange(10**9)} " + _words(dice, 250, 330), **_sampling(dice, 16)}


def shared(dice: random.Random) -> tuple[str, Body]:
    """One of a few long beginnings."""
    return TEXT, {"prompt": dice.choice(_shared()) + _words(dice, 1, 20), **_sampling(dice, 32)}


def drafted(dice: random.Random) -> tuple[str, Body]:
    """Text that repeats itself, on which all drafters have something to say."""
    pattern = _words(dice, 4, 12)
    body = {"prompt": f"{pattern}\n" * dice.randint(3, 8), **_sampling(dice, 64), "spec_detail": True}
    return TEXT, body | {"temperature": 0}


BODIES: dict[str, Make] = {
    "chat": chat,
    "text": text,
    "choices": choices,
    "tools": tools,
    "schema": of_schema,
    "Lark": lark,
    "GBNF": gbnf,
    "logprobs": logprobs,
    "echo": echo,
    "prediction": prediction,
    "stop strings": stops,
    "long prompt": long,
    "shared prefix": shared,
    "drafted": drafted,
}


def speculation(dice: random.Random, drafters: list[str]) -> Body:
    """One of the ways to ask for drafts, or none. The text must not depend on it."""
    asked: Body = {}
    if dice.random() < 0.2:
        return {"speculative": {"types": "none"}}
    if dice.random() < 0.5:
        asked["types"] = dice.sample(drafters, dice.randint(1, len(drafters)))
    if dice.random() < 0.5:
        asked["n_max"] = dice.randint(0, 16)
    if dice.random() < 0.2:
        asked |= {"n_min": dice.randint(0, 3), "p_min": round(dice.random(), 2)}
    return {"speculative": asked} if asked else {}
