"""A format read from what a chat template writes: the difference between a turn with a call and a turn without.

The conversations of `renderings.py` hold needles as names, keys and values. Where these stand in the text tells what
stands around them, and two calls tell what belongs to each call and what to the list of them:

    A NAME middle ARGUMENTS Z                                    one call
    A NAME middle ARGUMENTS M NAME middle ARGUMENTS Z            two: M = close + between + open

`close` is what M and Z begin with alike, `open` what A and M end with alike. Text is compared by tokens, so that no
marker is cut in two. A format so found has to read two calls with difficult arguments, as the template writes them,
without error; else there is none, and the caller has `generic`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slipstream.server.openai.formats.call_shape import COUNT, ID, MARK, Parameters, Shape
from slipstream.server.openai.formats.format import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Format,
    Piece,
    Reasoning,
    Tool,
)
from slipstream.server.openai.formats.json_call import KEYS, Keys
from slipstream.server.openai.formats.parser import Parser
from slipstream.server.openai.formats.renderings import (
    ARGUMENTS,
    CONTENT,
    FIRST,
    IDS,
    PARAMETERS,
    PROOF,
    SECOND,
    THOUGHT,
    TYPES,
    Renderings,
)

TOKEN = re.compile(rf"{MARK.pattern}|<[^<>\s][^<>]*|\s+|\w+|.", re.DOTALL)
NAME = "template"  # of derived formats


class _UnreadableError(Exception):
    """The text is of no shape that is known here."""


@dataclass(frozen=True, slots=True)
class _Call:
    """Where a call stands in a text. `object`: its name and arguments in one JSON object, if they are."""

    name: tuple[int, int]
    arguments: tuple[int, int]
    keys: Keys | None = None
    parameters: Parameters | None = None


def derived(seen: Renderings, tokens: Collection[str], ends: Collection[str]) -> Format | None:
    """The format of the template's calls, proved to read them; None if that fails. Call `scanner.load` first.

    `tokens`: the model's tokens beside its vocabulary proper; `ends`: those that end a reply, which no text holds.
    """
    thoughts = thinking(seen)
    try:
        shape = _shape(seen.texts, thoughts, ends)
    except (_UnreadableError, KeyError):
        return None
    plain = Format(NAME, reasoning=thoughts, around=_around(seen, thoughts, ends))
    found = shape.format(plain, tokens)
    return found if found and is_proved(found, seen) else None


def thinking(seen: Renderings) -> tuple[str, str] | None:
    """The markers around thinking; None if the template shows no thinking, or nothing marks it."""
    for name, what in (("thought", CONTENT), ("planned", FIRST)):  # some show it only in turns with calls
        turn = _turn(seen, name)
        before, _, after = turn.partition(THOUGHT)
        if what not in after:
            continue
        starts = [one.start() for one in MARK.finditer(before)]
        ends = [one.end() for one in MARK.finditer(after[: after.index(what)])]
        opener = next((one for i in reversed(starts) if turn.count(one := before[i:].rstrip()) == 1), "")
        closer = next((one for i in ends if turn.count(one := after[:i].lstrip()) == 1), "")
        plain = seen.texts.get("said", "").rpartition(CONTENT)[0]
        if opener and MARK.match(closer) and not plain.rstrip().endswith(opener):
            return opener, closer
    return None


def _around(seen: Renderings, thoughts: tuple[str, str] | None, ends: Collection[str]) -> tuple[str, ...]:
    """The markers that the template writes before and behind content, and at a turn's end if no token ends it."""
    if thoughts and CONTENT in (turn := _turn(seen, "thought")):
        head = turn.rpartition(CONTENT)[0].rpartition(thoughts[1])[2]
    else:
        begun, said = (seen.texts.get(one, "") for one in ("begun", "said"))
        head = said.rpartition(CONTENT)[0][_n_alike(begun, said) :]
    said, called = (_turn(seen, one) for one in ("said", "called"))
    tail = said.rpartition(CONTENT)[2].rstrip()
    n_end = _n_ending(tail, called.rstrip())
    parts = (head, tail[: len(tail) - n_end], tail[len(tail) - n_end :])
    cut = (next((one.removesuffix(token) for token in ends if one.endswith(token)), one) for one in parts)
    return tuple(dict.fromkeys(one.strip() for one in cut if MARK.search(one)))


def _shape(texts: Mapping[str, str], thoughts: tuple[str, str] | None, ends: Collection[str]) -> Shape:
    """The shape of calls. Raises `_UnreadableError`, or KeyError if a rendering is missing."""
    said_head, said, said_tail = texts["said"].rpartition(CONTENT)
    one = texts["called"]
    cdata = "<![CDATA[" in texts.get("proof of one", "")[len(texts["tools"]) :]
    start = _start(texts, said_head)
    call = _located(one, start, FIRST)
    end = len(one) - _n_ending(said_tail, one[call.arguments[1] :]) if said else len(one)
    lead, tail = one[start : call.name[0]], one[call.arguments[1] : end].rstrip()
    tail = next((tail.removesuffix(token) for token in ends if tail.endswith(token)), tail)
    middle = one[call.name[1] : call.arguments[0]]
    own: dict[str, Any] = {
        "middle": middle,
        "keys": call.keys,
        "parameters": call.parameters and replace(call.parameters, cdata=cdata),
        "elsewhere": texts["said"][_n_alike(texts["tools"], texts["said"]) :],
    }
    joint = _joint(texts.get("called twice", ""), start)
    if joint is None:
        return _holed(Shape(**own, open=lead, close=tail))
    close = joint[: _n_alike(joint, tail)]
    rest = joint[len(close) :]
    open_ = rest[len(rest) - _n_alike_at_end(lead, rest) :].lstrip()
    before = lead[: len(lead) - len(open_)]
    if thoughts:  # the template may show that there was none
        before = re.sub(rf"{re.escape(thoughts[0])}\s*{re.escape(thoughts[1])}", "", before)
    return _holed(
        Shape(
            **own,
            before=before[_n_alike(before, said_tail) :],
            open=open_,
            close=close,
            between=rest[: len(rest) - len(open_)],
            after=tail[len(close) :],
        )
    )


def _start(texts: Mapping[str, str], said_head: str) -> int:
    """Where the turn with a call parts from its beginning, which it shares with a turn without."""
    one = texts["called"]
    start = _n_alike(said_head, one)
    # What begins both content and calls, such as the first token of any tag, is not yet shared.
    return start if start == len(said_head) else min(start, _n_alike(texts.get("begun", one), one))


def _joint(text: str, start: int) -> str | None:
    """What stands between two calls; None if the template shows no second call."""
    if SECOND not in text[start:]:
        return None
    first = _located(text, start, FIRST)
    second = text.index(SECOND, first.arguments[1])
    return text[first.arguments[1] : second]


def _located(text: str, start: int, name: str) -> _Call:
    """Where the first call from `start` stands in a text. Raises `_UnreadableError`."""
    at = text.find(name, start)
    if at < 0:
        raise _UnreadableError
    named = (at, at + len(name))
    for i in (i for i in range(named[1], len(text)) if text[i] == "{"):
        value, end = _value(text, i)
        if value == ARGUMENTS:
            return _Call(named, (i, end), keys=_keys(text, start, at))
    return _tagged(text, named)


def _keys(text: str, start: int, at: int) -> Keys | None:
    """The keys of the JSON object around the name at `at`; None if its name is no value of an object."""
    for i in (i for i in range(start, at) if text[i] == "{"):
        value, _ = _value(text, i)
        if isinstance(value, dict) and FIRST in value.values() and ARGUMENTS in value.values():
            names = frozenset(key for key, one in value.items() if one == FIRST)
            inner = frozenset(key for key, one in value.items() if one == ARGUMENTS)
            return Keys(
                KEYS.name | names, KEYS.arguments | inner, KEYS.others | (value.keys() - names - inner)
            )
    return None


def _value(text: str, start: int) -> tuple[Any, int]:
    """The JSON value at a place of the text, and its end; None if there is none."""
    try:
        return json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, start


def _tagged(text: str, named: tuple[int, int]) -> _Call:
    """A call whose arguments are parameters, each with text around its key and its value."""
    keys = sorted(ARGUMENTS, key=lambda key: text.find(key, named[1]))
    starts = [text.find(key, named[1]) for key in keys]
    if starts[0] < 0:
        raise _UnreadableError
    ends = [at + len(key) for at, key in zip(starts, keys, strict=True)]
    values = [_spelt(text, end, ARGUMENTS[key]) for end, key in zip(ends, keys, strict=True)]
    if any(value[1] > after for value, after in zip(values, starts[1:], strict=False)):
        raise _UnreadableError
    gaps = {text[value[1] : after] for value, after in zip(values, starts[1:], strict=False)}
    if len(gaps) > 1:
        raise _UnreadableError
    gap, head, tail = gaps.pop(), text[named[1] : starts[0]], text[values[-1][1] :]
    close = gap[: _n_alike(gap, tail)]
    rest = gap[len(close) :]
    open_ = rest[len(rest) - _n_alike_at_end(head, rest) :]
    if not close.strip() or not open_.strip():
        raise _UnreadableError
    middles = {TYPES[key]: text[end : value[0]] for key, end, value in zip(keys, ends, values, strict=True)}
    middles.setdefault("number", middles["integer"])
    inner = Parameters(open_, tuple(middles.items()), close, rest[: len(rest) - len(open_)])
    return _Call(named, (starts[0] - len(open_), values[-1][1] + len(close)), parameters=inner)


def _spelt(text: str, start: int, value: Any) -> tuple[int, int]:
    """Where a parameter's value stands: a string without quotes, all else as JSON; true and false also as in Python."""
    for spelt in (value if isinstance(value, str) else json.dumps(value), str(value)):
        at = text.find(spelt, start)
        if at >= 0:
            return at, at + len(spelt)
    raise _UnreadableError


def _holed(shape: Shape) -> Shape:
    """The shape with holes for what differs from call to call."""
    names = ("before", "open", "middle", "close", "after")
    changed: dict[str, Any] = {one: "".join(map(_hole, _tokens(getattr(shape, one)))) for one in names}
    if shape.between is not None:
        changed["between"] = "".join(map(_hole, _tokens(shape.between)))
    return replace(shape, **changed)


def is_proved(format_: Format, seen: Renderings) -> bool:
    """Whether the format reads calls that the template writes, and sees none in a turn without calls."""
    name = "proof" if SECOND in _turn(seen, "proof") else "proof of one"
    wanted = [(FIRST, PROOF), (SECOND, {})][: 2 if name == "proof" else 1]
    told = _read(format_, _turn(seen, name))
    n_ended = len([one for one in told if isinstance(one, CallEnd)])
    plain = _read(format_, _turn(seen, "said"))
    is_plain = all(isinstance(one, Content | Reasoning) for one in plain)
    return calls_of(told) == wanted and n_ended == len(wanted) and is_plain


def _turn(seen: Renderings, name: str) -> str:
    """The assistant's turn in a rendering, with what the template writes before and behind it."""
    text = seen.texts.get(name, "")
    return text[_n_alike(seen.texts.get("tools", ""), text) :]


def _read(format_: Format, text: str) -> list[Piece]:
    parser = Parser(format_, {one: Tool(one, PARAMETERS) for one in (FIRST, SECOND)}, "")
    return [*parser.feed(text), *parser.finish()]


def calls_of(told: Sequence[Piece]) -> list[tuple[str, Any]]:
    """The calls among pieces: their names and arguments."""
    texts: list[tuple[str, list[str]]] = []
    for one in told:
        if isinstance(one, CallStart):
            texts.append((one.name, []))
        elif isinstance(one, CallArguments):
            texts[-1][1].append(one.text)
    return [(name, _value("".join(parts), 0)[0]) for name, parts in texts]


def _tokens(text: str) -> list[str]:
    return TOKEN.findall(text)


def _hole(token: str) -> str:
    return ID if token in IDS else COUNT if token.isdigit() else token


def _n_alike(one: str, other: str) -> int:
    """Characters that two texts begin with alike, in whole tokens; ids and numbers are all alike."""
    return _n_same(_tokens(one), _tokens(other))


def _n_alike_at_end(one: str, other: str) -> int:
    """Characters that two texts end with alike."""
    return _n_same(_tokens(one)[::-1], _tokens(other)[::-1])


def _n_ending(one: str, other: str) -> int:
    """Characters of the end that two turns have in common.

    A token that comes again in it, such as one that ends every tag, belongs to what stands before.
    """
    ending = _tokens(one[len(one) - _n_alike_at_end(one, other) :])
    while ending and ending[0] in ending[1:]:
        ending.pop(0)
    return sum(map(len, ending))


def _n_same(one: Sequence[str], other: Sequence[str]) -> int:
    n = 0
    for left, right in zip(one, other, strict=False):
        if _hole(left) != _hole(right):
            break
        n += len(left)
    return n
