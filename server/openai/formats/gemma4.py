"""The format of Gemma 4: a call is a name and an object, of which strings stand between tokens and keys without quotes.

    <|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:2}<tool_call|>

Keys may be strings too. Arguments become JSON piece by piece: each string, word and bracket as soon as it is whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slipstream.server.openai.formats.enforce import Rules, any_of, quoted
from slipstream.server.openai.formats.format import (
    CallArguments,
    CallEnd,
    Calls,
    CallStart,
    Content,
    Format,
    Mark,
    Piece,
    Tool,
    Tools,
)
from slipstream.server.openai.formats.json_call import MOST_HEAD
from slipstream.server.openai.formats.xml_call import WORDS, types_of

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
HEAD = re.compile(r"\s*call:\s*(?P<name>[A-Za-z0-9_.-]{1,64})\s*")
STRING = re.compile(rf"\s*{re.escape(QUOTE)}(?P<text>.*?){re.escape(QUOTE)}\s*", re.DOTALL)
# A word ends where the next bracket, comma or colon shows that it is whole.
WORD = re.compile(r"\s*(?P<text>[^\s{}\[\],:<][^{}\[\],:<]*)(?=[{}\[\],:])")
SIGN = re.compile(r"\s*(?P<text>[{}\[\],:])")
ANY_TEXT = r"/(.|\n)*/"  # as Lark
SPELT = {",": ", ", ":": ": "}
DEPTH = 4  # of objects and lists whose schema a grammar follows; below, any value may stand


class ObjectCall:
    """Reads the text between the markers of a call."""

    def __init__(self, marker: str, tools: Tools) -> None:
        self._raw = marker  # read since the call could last be said to be none
        self._text = ""  # not read yet
        self._closers: list[str] = []  # of the brackets that are open, the innermost last
        self._is_key = False  # the next string or word is a key
        self._is_begun = False
        self._has_ended = False  # the arguments' last bracket has come
        self._failed = False

    @property
    def in_string(self) -> bool:
        return not self._failed and self._text.lstrip().startswith(QUOTE)

    def feed(self, text: str) -> Iterator[Piece]:
        if self._failed:
            yield Content(text)
            return
        self._text += text
        if not self._is_begun:
            yield from self._begin()
        while self._is_begun and not self._has_ended and not self._failed:
            said = self._next()
            if said is None:
                return
            yield CallArguments(said)
        if self._has_ended and self._text.strip():
            yield from self._fail()

    def close(self, marker: str) -> Iterator[Piece]:
        if self._failed:
            yield Content(marker)
        elif self._has_ended:
            yield CallEnd()
        elif not self._is_begun or marker:  # else the reply was cut, and so is the call
            yield from self._fail()
            yield Content(marker)

    def _begin(self) -> Iterator[Piece]:
        head, brace, _ = self._text.partition("{")
        found = HEAD.fullmatch(head)
        if brace and found is not None:
            self._is_begun = True
            self._raw, self._text = "", self._text[len(head) :]
            yield CallStart(found["name"])
        elif brace or len(head) > MOST_HEAD:
            yield from self._fail()

    def _next(self) -> str | None:
        """The JSON text of the next string, word or sign; None if it is not whole yet, or cannot stand here."""
        text = self._text.lstrip()
        pattern = STRING if text.startswith(QUOTE) else SIGN if text[:1] in set("{}[],:") else WORD
        found = pattern.match(self._text)
        if found is None:
            return None
        self._text = self._text[found.end() :]
        if pattern is SIGN:
            return self._sign(found["text"])
        said, is_key, self._is_key = found["text"], self._is_key, False
        if pattern is STRING:
            return as_string(said)
        return as_string(said.strip()) if is_key else as_value(said.strip())

    def _sign(self, sign: str) -> str:
        if sign in "{[":
            self._closers.append("}" if sign == "{" else "]")
        elif sign in "}]":
            sign = self._closers.pop()  # one that does not fit its partner is taken for the partner
            self._has_ended = not self._closers
        self._is_key = sign in "{," and self._closers[-1:] == ["}"]
        return SPELT.get(sign, sign)

    def _fail(self) -> Iterator[Piece]:
        """What is left becomes content. A call that has begun ends with what it has."""
        self._failed = True
        if self._is_begun:
            yield CallEnd()
        yield Content(self._raw + self._text)


def as_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def as_value(text: str) -> str:
    """A word as JSON: itself if it is a number or one of JSON's words, or as Python writes them; else a string."""
    if text in WORDS:
        return json.dumps(WORDS[text])
    try:
        value = json.loads(text)
    except ValueError:
        return as_string(text)
    return text if value is None or isinstance(value, bool | int | float) else as_string(text)


def enforced(tools: Sequence[Tool], mark: Mark, *, many: bool) -> str:
    """The grammar of calls. Calls follow one another without anything between."""
    rules = Rules(mark)

    def function(rules: Rules, tool: Tool) -> str:
        return f"{quoted(f'call:{tool.name}')} {_Values(rules).object(tool.parameters, DEPTH)}"

    body = rules.add(f"{mark(OPEN)} {any_of(rules, tools, function)} {mark(CLOSE)}")
    return rules.source(f"{body}+" if many else body)


class _Values:
    """Rules of values in this spelling, by their schemas."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._any = ""  # the rule of any value, once there is one

    def of(self, schema: Any, depth: int) -> str:
        """Lark text of a value. What a schema says beyond types, choices and members is not enforced."""
        schema = schema if isinstance(schema, Mapping) else {}
        choices = schema.get("enum")
        if isinstance(choices, list) and choices and all(isinstance(one, str) for one in choices):
            return self._either([self._string(quoted(one)) for one in choices])
        kinds = types_of(schema)
        if depth <= 0 or not kinds or "anyOf" in schema or "oneOf" in schema:
            return self.any()
        return self._either([self._kind(kind, schema, depth) for kind in sorted(kinds)])

    def _kind(self, kind: str, schema: Mapping[str, Any], depth: int) -> str:
        if kind == "object":
            return self.object(schema, depth - 1) if _members(schema) else self.any("{}")
        if kind == "array":
            item = self.of(schema.get("items"), depth - 1)
            return f'("[" ({item} ("," {item})*)? "]")'
        return {
            "string": self._free(),
            "integer": "/-?(0|[1-9][0-9]*)/",
            "number": r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/",
            "boolean": '("true" | "false")',
            "null": '"null"',
        }.get(kind, self.any())

    def object(self, schema: Mapping[str, Any], depth: int) -> str:
        """The members in the order of their names, as the template shows them; those not required are optional.

        Rules run from the last member to the first: `rest` begins with a comma if a member follows, `fresh` does not.
        """
        required = schema.get("required")
        needed = set(required) if isinstance(required, list) else set()
        rest = fresh = '""'
        for name, inner in sorted(_members(schema).items(), key=lambda one: one[0].lower(), reverse=True):
            member = f"{quoted(f'{name}:')} {self.of(inner, depth)}"
            followed, alone = f'"," {member} {rest}', f"{member} {rest}"
            if name not in needed:
                followed, alone = f"{followed} | {rest}", f"{alone} | {fresh}"
            rest, fresh = self._rules.add(followed), self._rules.add(alone)
        return f'"{{" {fresh} "}}"'

    def any(self, brackets: str = "") -> str:
        """The rule of any value; of any object, with `brackets`."""
        if not self._any:
            value = self._any = self._rules.add("any_object | any_list | any_string | any_word")
            member = f"any_key {value}"
            self._rules.texts += [
                f'any_object: "{{" ({member} ("," {member})*)? "}}"',
                f'any_list: "[" ({value} ("," {value})*)? "]"',
                r"any_key: /[^\s{}\[\],:<]+:/",
                f"any_string: {self._free()}",
                r"any_word: /-?(0|[1-9][0-9]*)(\.[0-9]+)?/" + ' | "true" | "false" | "null"',
            ]
        return "any_object" if brackets else self._any

    def _string(self, body: str) -> str:
        return f"{self._rules.mark(QUOTE)} {body} {self._rules.mark(QUOTE)}"

    def _free(self) -> str:
        """Any string."""
        quote = self._rules.mark(QUOTE)
        if quote == quoted(QUOTE):  # not a token: the string ends where this text first occurs
            return f"{quote} {self._rules.add(ANY_TEXT, f'[suffix={quote}]')}"
        return self._string(self._rules.add(ANY_TEXT))

    def _either(self, choices: Sequence[str]) -> str:
        return f"({' | '.join(choices)})" if len(choices) > 1 else choices[0]


def _members(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


GEMMA4 = Format(
    name="gemma4",
    signs=(OPEN, QUOTE),
    reasoning=("<|channel>thought", "<channel|>"),
    calls=Calls(OPEN, CLOSE, ObjectCall),
    between=("<|tool_response>",),
    inside=(QUOTE, "<|channel>"),
    enforced=enforced,
)
