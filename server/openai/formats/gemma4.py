"""The format of Gemma 4: a call is a name and an object, of which strings stand between tokens and keys without quotes.

    <|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:2}<tool_call|>

Keys may be strings too, and strings stand between plain quotes where the model falls back to JSON. Arguments become
JSON piece by piece: each string, word and bracket as soon as it is whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slipstream.server.openai.formats.enforce import Rules, any_of, as_rule, quoted
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
from slipstream.server.openai.formats.json_call import MOST_HEAD, repaired
from slipstream.server.openai.formats.schemas import (
    ANY_TEXT,
    OF_TYPE,
    check_members,
    choices_of,
    members_of,
    number_of,
    referred,
    refuse,
    refuse_others,
    required_of,
    rooted,
    text_body,
    with_required,
)
from slipstream.server.openai.formats.value_types import types_of
from slipstream.server.openai.formats.xml_call import WORDS

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
HEAD = re.compile(r"\s*call:\s*(?P<name>[A-Za-z0-9_.-]{1,64})\s*")
STRING = re.compile(rf"\s*{re.escape(QUOTE)}(?P<text>.*?){re.escape(QUOTE)}\s*", re.DOTALL)
JSON_STRING = re.compile(r'\s*(?P<text>"[^"\\]*(?:\\.[^"\\]*)*")\s*(?=[{}\[\],:])', re.DOTALL)
# The same as far as it has come, if it may still become whole.
JSON_BEGUN = re.compile(r'\s*"[^"\\]*(?:\\.[^"\\]*)*(?:\\|(?P<end>"\s*))?', re.DOTALL)
# A word ends where the next bracket or comma shows that it is whole; as a key, where a colon does.
LESS = rf"<(?!{re.escape(QUOTE[1:])})"
KEY = re.compile(
    rf"\s*(?P<text>(?:[^\s{{}}\[\],:<]|{LESS})[^{{}}\[\],:<]*+(?:{LESS}[^{{}}\[\],:<]*+)*+)(?=[{{}}\[\],:])"
)
WORD = re.compile(
    rf"\s*(?P<text>(?:[^\s{{}}\[\],:<]|{LESS})[^{{}}\[\],<]*+(?:{LESS}[^{{}}\[\],<]*+)*+)(?=[{{}}\[\],])"
)
SIGN = re.compile(r"\s*(?P<text>[{}\[\],:])")
SIGNS = frozenset("{}[],:")
SPELT = {",": ", ", ":": ": "}


class ObjectCall:
    """Reads the text between the markers of a call."""

    def __init__(self, marker: str, tools: Tools) -> None:
        self._raw = marker  # read since the call could last be said to be none
        self._text = ""  # not read yet
        self._closers: list[str] = []  # of the brackets that are open, the innermost last
        self._is_key = False  # the next string or word is a key
        self._comma = ""  # told before what follows it, as some write one before a closing bracket
        self._may_close = False  # the open brackets could be closed here
        self._is_begun = False
        self._has_ended = False  # the arguments' last bracket has come
        self._failed = False

    @property
    def in_string(self) -> bool:
        if self._failed or not self._is_begun or self._has_ended:
            return False
        begun = JSON_BEGUN.fullmatch(self._text)
        return self._text.lstrip().startswith(QUOTE) or (begun is not None and not begun["end"])

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
            if said:
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
        pattern = self._pattern()
        found = pattern and pattern.match(self._text)
        if pattern is None or found is None:
            return None
        self._text = self._text[found.end() :]
        if pattern is SIGN:
            return self._sign(found["text"])
        self._may_close, self._is_key = not self._is_key, False
        comma, self._comma = self._comma, ""
        return comma + _spelt(pattern, found["text"])

    def _pattern(self) -> re.Pattern[str] | None:
        """The pattern of what the text begins with; None if that is not known yet."""
        text = self._text.lstrip()
        if text.startswith(QUOTE):
            return STRING
        if text[:1] in SIGNS:
            return SIGN
        if JSON_BEGUN.fullmatch(text):
            return None
        if JSON_STRING.match(text):
            return JSON_STRING
        return KEY if self._is_key else WORD

    def _sign(self, sign: str) -> str:
        comma, self._comma = self._comma, ""
        if sign == ",":
            comma, self._comma = "", SPELT[","]
        self._may_close = sign != ":"
        if sign in "{[":
            self._closers.append("}" if sign == "{" else "]")
        elif sign in "}]":
            sign = self._closers.pop()  # one that does not fit its partner is taken for the partner
            self._has_ended = not self._closers
            comma = ""
        self._is_key = sign in "{," and self._closers[-1:] == ["}"]
        return comma + (SPELT.get(sign, sign) if sign != "," else "")

    def _fail(self) -> Iterator[Piece]:
        """What is left becomes content. A call that has begun ends with what it has, if that can be made whole."""
        self._failed = True
        if self._is_begun and self._may_close:
            if self._closers:
                yield CallArguments("".join(reversed(self._closers)))
            yield CallEnd()
        yield Content(self._raw + self._text)


def _spelt(pattern: re.Pattern[str], text: str) -> str:
    """A string, key or word of this pattern as JSON."""
    if pattern is JSON_STRING:
        text = repaired(text)
        try:
            json.loads(text)
        except ValueError:
            return as_string(text[1:-1])
        return text
    if pattern is WORD:
        return as_value(text.strip())
    return as_string(text.strip() if pattern is KEY else text)


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
        return f"{quoted(f'call:{tool.name}')} {_Values(rules, tool.parameters).object(tool.parameters)}"

    body = rules.add(f"{mark(OPEN)} {any_of(rules, tools, function)} {mark(CLOSE)}")
    return rules.source(f"{body}+" if many else body)


class _Values:
    """Rules of values in this spelling, by their schemas. Raises `Refused` for what cannot be enforced."""

    def __init__(self, rules: Rules, root: Mapping[str, Any]) -> None:
        self._rules = rules
        self._root = root  # the schema in which references are looked up
        self._referred: dict[str, str] = {}  # the rules of what references mean

    def of(self, schema: Any) -> str:
        """Lark text of a value."""
        if not isinstance(schema, Mapping):
            return self.any()
        schema = rooted(schema)
        if "$ref" in schema:
            refuse_others(schema, {"$ref", "type"}, *OF_TYPE)
            return self._reference(schema["$ref"])
        choices = choices_of(schema)
        if choices is not None:
            refuse_others(schema, {"enum" if "enum" in schema else "const", "type"}, *OF_TYPE)
            return self._either([self._choice(one) for one in choices])
        for union in ("anyOf", "oneOf"):
            if isinstance(schema.get(union), list) and schema[union]:
                return self._union(schema, union)
        refuse_others(schema, {"type"})
        kinds = types_of(schema, {}) or ({"object"} if members_of(schema) else frozenset())
        if not kinds:
            refuse_others(schema, (), *OF_TYPE)
            return self.any()
        return self._either([self._kind(kind, schema) for kind in sorted(kinds)])

    def _reference(self, pointer: Any) -> str:
        """The rule of what a reference means, which may refer to itself."""
        found = referred(pointer, self._root)
        if not isinstance(found, Mapping):
            refuse("$ref")
        if pointer not in self._referred:
            texts, at = self._rules.texts, len(self._rules.texts)
            self._referred[pointer] = self._rules.add("")
            texts[at] += self.of(found)
        return self._referred[pointer]

    def _union(self, schema: Mapping[str, Any], union: str) -> str:
        """Any of the schemas of a union; with `oneOf`, if no value can be of two of them."""
        refuse_others(schema, {union, "type"}, *OF_TYPE)
        kinds = [types_of(one, {}) if isinstance(one, Mapping) else frozenset() for one in schema[union]]
        n_kinds = len(frozenset().union(*kinds))
        if union == "oneOf" and (n_kinds < sum(map(len, kinds)) or not all(kinds)):
            refuse(union)
        return self._either([self.of(one) for one in schema[union]])

    def _choice(self, value: Any) -> str:
        if isinstance(value, str):
            return self._string(quoted(value))
        if isinstance(value, dict | list):
            refuse("enum")
        return quoted(json.dumps(value))

    def _kind(self, kind: str, schema: Mapping[str, Any]) -> str:
        if kind == "object":
            return self.object(schema) if members_of(schema) else self._open(schema)
        if kind == "array":
            return self._list(schema)
        if kind == "string":
            return self._free(text_body(schema))
        bounds = {name: one for name, one in schema.items() if name in OF_TYPE["number"]}
        if kind in ("integer", "number") and bounds:
            return self._rules.add(as_rule({"type": kind, **bounds}))
        return {
            "integer": "/-?(0|[1-9][0-9]*)/",
            "number": r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/",
            "boolean": '("true" | "false")',
            "null": '"null"',
        }.get(kind, self.any())

    def _list(self, schema: Mapping[str, Any]) -> str:
        refuse_others(schema, {"type", "items", "minItems", "maxItems"}, "array")
        least, most = number_of(schema, "minItems"), number_of(schema, "maxItems")
        if isinstance(schema.get("items"), list):
            refuse("items")
        if most == 0 or schema.get("items") is False:
            if least:
                refuse("minItems")
            return '"[]"'
        item = self.of(schema.get("items"))
        rest = f"{{{max((least or 0) - 1, 0)},{'' if most is None else most - 1}}}"
        some = item if most == 1 else f'{item} ("," {item}){rest}'
        return f'("[" {some} "]")' if least else f'("[" ({some})? "]")'

    def _open(self, schema: Mapping[str, Any]) -> str:
        """An object of any members, or of any names."""
        check_members(schema)
        others = schema.get("additionalProperties", True)
        if others is False:
            return '"{}"'
        if not isinstance(others, Mapping) or not others:
            return self.any("{}")
        self.any()  # brings the rule of keys
        member = f"any_key {self.of(others)}"
        return f'("{{" ({member} ("," {member})*)? "}}")'

    def object(self, schema: Mapping[str, Any]) -> str:
        """The members in the order of their names, as the template shows them; those not required are optional.

        Rules run from the last member to the first: `rest` begins with a comma if a member follows, `fresh` does not.
        """
        schema = with_required(schema)
        check_members(schema)
        needed = set(required_of(schema))
        members = [one for one in members_of(schema).items() if one[1] is not False]
        rest = fresh = '""'
        for name, inner in sorted(members, key=lambda one: one[0].lower(), reverse=True):
            member = f"{quoted(f'{name}:')} {self.of(inner)}"
            followed, alone = f'"," {member} {rest}', f"{member} {rest}"
            if name not in needed:
                followed, alone = f"{followed} | {rest}", f"{alone} | {fresh}"
            rest, fresh = self._rules.add(followed), self._rules.add(alone)
        return f'"{{" {fresh} "}}"'

    def any(self, brackets: str = "") -> str:
        """The rule of any value; of any object, with `brackets`. All tools share it."""
        member = "any_key any_value"
        value = "any_value: any_object | any_list | any_string | any_word"
        if value not in self._rules.texts:
            self._rules.texts += [
                value,
                f'any_object: "{{" ({member} ("," {member})*)? "}}"',
                'any_list: "[" (any_value ("," any_value)*)? "]"',
                r"any_key: /[^\s{}\[\],:<]+:/",
                r"any_word: /-?(0|[1-9][0-9]*)(\.[0-9]+)?/" + ' | "true" | "false" | "null"',
            ]
            self._rules.texts.append(f"any_string: {self._free()}")
        return "any_object" if brackets else "any_value"

    def _string(self, body: str) -> str:
        return f"{self._rules.mark(QUOTE)} {body} {self._rules.mark(QUOTE)}"

    def _free(self, body: str = ANY_TEXT) -> str:
        """A string of which `body` is the Lark text."""
        quote = self._rules.mark(QUOTE)  # not a token: the string ends where this text first occurs
        return f"{quote} {self._rules.text(body, quote, is_literal=quote == quoted(QUOTE))}"

    def _either(self, choices: Sequence[str]) -> str:
        return f"({' | '.join(choices)})" if len(choices) > 1 else choices[0]


GEMMA4 = Format(
    name="gemma4",
    signs=(OPEN, QUOTE),
    reasoning=("<|channel>thought", "<channel|>"),
    calls=Calls(OPEN, CLOSE, ObjectCall, begins="call:"),
    between=("<|tool_response>",),
    inside=(QUOTE, "<|channel>"),
    enforced=enforced,
)
