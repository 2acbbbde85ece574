"""Random grammars, cheap ones and ruinous ones, and how long their compiling and each step of a reply take.

    python -m tests.fuzz.grammars [--seconds 60] [--seed N] [--model demo/target]

A finding is a call of the engine's thread over MOST_S, an error that is not one of ours, or more memory at the end.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from slipstream.engine.constraints import Grammar
from slipstream.engine.errors import RequestError
from slipstream.engine.text.grammar.constraint import Constraint
from slipstream.engine.text.grammar.grammars import Grammars
from slipstream.engine.text.tokenizer import Tokenizer

MOST_S = 0.25
MOST_MIB = 600  # grown by all grammars and matchers that are kept
LONGEST = 40  # tokens of a random reply
N_DRAFTS = 8
LETTERS = "abcxyz019 .-"


class Source:
    """An endless source of grammars, the same for the same random numbers."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice

    def next(self) -> tuple[str, Any]:
        """A field of a completion request, and its value."""
        kind = self._dice.randrange(3)
        if kind == 0:
            return "json_schema", self._schema(self._dice.randrange(5))
        if kind == 1:
            return "guided_regex", self._pattern(self._dice.randrange(5))
        return "grammar", self._lark()

    def _few(self, make: Callable[[], Any], most: int = 4) -> list[Any]:
        return [make() for _ in range(self._dice.randint(1, most))]

    def _schema(self, depth: int) -> dict[str, Any]:
        dice = self._dice

        def inner() -> dict[str, Any]:
            return self._schema(depth - 1)

        leaves: list[Callable[[], dict[str, Any]]] = [
            lambda: {
                "type": "integer",
                "multipleOf": dice.choice((3, 1000, 9973, 99991, 9999991, 10**9 + 7)),
            },
            lambda: {
                "type": "number",
                "multipleOf": dice.choice((0.1, 1e-5, 0.37)),
                "minimum": dice.random(),
            },
            lambda: {"type": "string", "pattern": self._pattern(3), "maxLength": dice.choice((3, 200, 9999))},
            lambda: {
                "type": "string",
                "minLength": dice.choice((0, 50)),
                "maxLength": dice.choice((60, 5000)),
            },
            lambda: {"enum": [f"value {i * i}" for i in range(dice.choice((2, 40, 900)))]},
            lambda: {"$ref": f"#/$defs/d{dice.randrange(4)}"},
        ]
        if depth <= 0:
            return dice.choice(leaves)()
        kind = dice.randrange(7)
        if kind == 0:
            return {dice.choice(("allOf", "anyOf", "oneOf")): self._few(inner)}
        if kind == 1:
            patterns = self._few(lambda: {"type": "string", "pattern": self._pattern(3)}, 12)
            return {"allOf": patterns}
        if kind == 2:
            names = [f"p{i}" for i in range(dice.choice((1, 3, 30)))]
            made = {"type": "object", "properties": {name: inner() for name in names[:4]}}
            return {**made, "required": names[:2], "additionalProperties": dice.random() < 0.5}
        if kind == 3:
            return {"type": "array", "items": inner(), "minItems": dice.choice((0, 5, 10**9))}
        if kind == 4:
            return {"$defs": {f"d{i}": inner() for i in range(4)}, **inner()}
        return dice.choice(leaves)()

    def _pattern(self, depth: int) -> str:
        dice = self._dice
        if depth <= 0:
            letter = dice.choice(LETTERS)
            return dice.choice(
                (letter, ".", "[a-m]", "[^x]", f"\\{letter}" if letter in ".-" else letter, r"\w")
            )
        kind = dice.randrange(5)
        part = self._pattern(depth - 1)
        if kind == 0:
            return part + self._pattern(depth - 1)
        if kind == 1:
            return f"({part}|{self._pattern(depth - 1)})"
        if kind == 2:
            return f"({part}){dice.choice(('*', '+', '?', '{3}', '{2,40}', '{0,3000}'))}"
        return f".*{part}.{{{dice.choice((1, 8, 18))}}}" if kind == 3 else part

    def _lark(self) -> str:
        """Rules that call each other, with terminals that are combined by | & ~."""
        dice = self._dice
        n_rules, n_ways = dice.choice(((2, 2), (6, 3), (40, 4), (150, 6))), dice.randint(1, 4)
        names, terminals = [f"r{i}" for i in range(n_rules[0])], [f"T{i}" for i in range(3)]
        parts = [*names, *names, *terminals, '"x"', '"ab"', "/[a-z]+/"]

        def way() -> str:
            return " ".join(dice.choices(parts, k=dice.randint(1, n_rules[1])))

        lines = ["start: " + dice.choice(("r0", '"y" r0 | "n"', "r0 r1"))]
        lines += [f"{name}: " + " | ".join([*(way() for _ in range(n_ways)), '"x"']) for name in names]
        for name in terminals:
            terms = [
                f"{dice.choice(('', '', '~'))}/{self._pattern(3)}/" for _ in range(dice.choice((1, 2, 20)))
            ]
            lines.append(f"{name}: " + f" {dice.choice('|&')} ".join(terms))
        return "\n".join(lines) + "\n"


def as_grammar(field: str, value: Any) -> Grammar:
    """What the server makes of it."""
    if field == "json_schema":
        return Grammar("json_schema", json.dumps(value), param=field)
    return Grammar("regex" if field == "guided_regex" else "lark", value, param=field)


def slowest(constraint: Constraint, n_tokens: int, dice: random.Random) -> float:
    """The longest call, in seconds, while a random reply is written; drafts are checked on the way."""
    found = 0.0

    def timed(call: Callable[[], Any]) -> Any:
        nonlocal found
        started = time.perf_counter()
        result = call()
        found = max(found, time.perf_counter() - started)
        return result

    for _ in range(n_tokens):
        words = timed(constraint.masks)[0]
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        if not len(allowed) or constraint.complete:
            break
        drafts = [int(one) for one in dice.choices(allowed, k=N_DRAFTS)]
        timed(lambda drafts=drafts: constraint.n_legal((), drafts))
        timed(lambda: constraint.forced((), N_DRAFTS))
        timed(lambda drafts=drafts: constraint.mask(drafts[:1]))
        timed(lambda token_id=drafts[0]: constraint.push(token_id))
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--model", default="demo/target")
    options = parser.parse_args(arguments)
    seed = random.randrange(2**32) if options.seed is None else options.seed
    dice, ends, faults = random.Random(seed), time.monotonic() + options.seconds, 0
    tokenizer = Tokenizer(options.model)
    grammars, source, seen = Grammars(tokenizer, tokenizer.vocab_size), Source(dice), Counter[str]()
    before, worst = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0.0
    while time.monotonic() < ends and faults < 10:
        grammar = as_grammar(*source.next())
        try:
            constraint = grammars.constraint(grammar, "", "").result()
        except RequestError as error:
            seen[str(error).partition(": ")[2][:60]] += 1
            continue
        took = slowest(constraint, LONGEST, dice)
        seen["failed on the way" if constraint.failure else "followed"] += 1
        worst = max(worst, took)
        if took > MOST_S:
            faults += 1
            sys.stdout.write(f"FOUND a call of {took:.3f} s: {grammar}\n")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    if grown > MOST_MIB:
        faults += 1
        sys.stdout.write(f"FOUND {grown} MiB more than before\n")
    grammars.close()
    sys.stdout.writelines(f"{n:6} {what}\n" for what, n in seen.most_common(15))
    sys.stdout.write(f"seed {seed}: slowest call {1e3 * worst:.0f} ms, {grown} MiB grown\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
