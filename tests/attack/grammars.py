"""Attacks by schemas and grammars that are ruinous to compile, or to follow once they are compiled.

A caller repeats a new variant of its grammar each time, so that no refusal or compiled grammar can be remembered.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Awaitable, Callable
from typing import Any

from tests.attack.cases import TEXT, Target

_variants = itertools.count()


def asking(field: str, make: Callable[[int], Any], **fields: Any) -> Callable[[Target], Awaitable[None]]:
    """Ask for a completion under what `make` makes of a number."""

    async def attack(target: Target) -> None:
        body = {"prompt": "x", "max_tokens": 64, field: make(next(_variants)), **fields}
        await target.send(TEXT, json.dumps(body).encode())

    return attack


def ambiguous(n_rules: int, n_ways: int, start: str = "r0") -> str:
    """A Lark grammar whose every text can be read in very many ways."""
    ways = [[(i * j + 1) % n_rules for j in range(1, n_ways + 1)] for i in range(n_rules)]
    bodies = (" | ".join(f"r{to} r{j}" for j, to in enumerate(way, 1)) for way in ways)
    return f"start: {start}\n" + "".join(f'r{i}: {body} | "x"\n' for i, body in enumerate(bodies))


def _patterns(i: int) -> dict[str, Any]:
    return {"allOf": [{"type": "string", "pattern": f"^(.*[a-m]{{{n}}}.*){i}?$"} for n in range(1, 24)]}


def _intersection(i: int) -> str:
    terms = (f"/(.*[a-{chr(98 + n % 20)}].){{{n + 1}}}.*{i}?/" for n in range(29))
    return "start: A\nA: " + " & ".join(terms)


GRAMMARS = {
    "multipleOf": asking("json_schema", lambda i: {"type": "integer", "multipleOf": 9999991 + 2 * i}),
    "allOf of patterns": asking("json_schema", _patterns),
    "intersections": asking("grammar", _intersection),
    "200 rules": asking("grammar", lambda i: ambiguous(200, 4) + f'z: "{i}"\n'),
    "100 rules of 40 ways": asking("grammar", lambda i: ambiguous(100, 40) + f'z: "{i}"\n'),
    "rules behind a word": asking(
        "grammar",
        lambda i: ambiguous(200, 7, '"y" r0 | "n"') + f'z: "{i}"\n',
        logit_bias={"91": 100},
    ),
    "long strings": asking("json_schema", lambda i: {"type": "string", "minLength": 9000 + i}),
    "many new schemas": asking("json_schema", lambda i: {"enum": [f"{i} {n}" for n in range(3000)]}),
}
