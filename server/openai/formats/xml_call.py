"""The reader of calls written as tags, a tag per parameter. Tags have no types, so a value is read by its schema.

Arguments become JSON at the end of each parameter; until then nothing of the parameter is put out. Tags cannot be
quoted, so a value may hold some as text, as a file about calls does: an end tag ends a parameter only where what comes
behind it may stand there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from slipstream.server.openai.formats.format import CallArguments, CallEnd, CallStart, Content, Piece, Tools
from slipstream.server.openai.formats.json_call import NAME
from slipstream.server.openai.formats.schemas import parameter_of
from slipstream.server.openai.formats.value_types import Schema, is_of, types_of

PYTHON = re.compile(r"'((?:[^'\\]|\\.)*)'|\"(?:[^\"\\]|\\.)*\"|True|False|None", re.DOTALL)
SPACE = re.compile(r"\s*")
IN_QUOTES = re.compile(r'\\.|"', re.DOTALL)
MOST_FOOT = 256  # characters, with the white space around it
WORDS = {"True": True, "False": False, "None": None}  # models also write these as Python does


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags of a format. `head` has a group `name`, `parameter` the groups `key` and `value`."""

    head: re.Pattern[str]  # all before the first parameter
    parameter_start: str
    parameter: re.Pattern[str]
    parameter_end: str
    foot: re.Pattern[str]  # what may follow the last parameter
    foot_start: str  # what a foot begins with; empty if there is none


class XmlCall:
    """Reads a call. Its start is put out with its first parameter, or at its end if it has no parameters."""

    def __init__(self, marker: str, tags: Tags, tools: Tools) -> None:
        self._tags = tags
        self._tools = tools
        self._marker = marker
        self._text = ""  # not read yet
        self._seen = 0  # the parameter's end does not begin before here
        self._is_begun = False  # a parameter has begun
        self._name: str | None = None
        self._n_told = 0
        self._failed = False

    @property
    def in_string(self) -> bool:
        """Whether a parameter has begun and not ended. Behind a foot it was only left without its end tag."""
        self._is_begun = self._is_begun or self._begins()
        if self._failed or not self._is_begun:
            return False
        has_end = self._text[self._seen :].rstrip() == self._tags.parameter_end
        foot = self._tags.foot.search(self._text, max(0, len(self._text) - MOST_FOOT))
        return not has_end and not (foot and foot[0].strip())

    def feed(self, text: str) -> Iterator[Piece]:
        if self._failed:
            yield Content(text)
            return
        self._text += text
        while not self._failed and (end := self._end()) is not None:
            yield from self._parameter(end)

    def close(self, marker: str) -> Iterator[Piece]:
        yield from self._last(marker)
        rest = self._text
        if self._failed:
            yield Content(marker)
        elif self._n_told:
            if marker or self._is_over(rest):  # else the reply was cut, and so is the call
                yield from self._ended()
            if not self._tags.foot.fullmatch(rest):
                yield Content(rest + marker)
        else:
            foot = self._tags.foot.search(rest)
            assert foot is not None  # it may be empty
            # Without a parameter any word could be a name, so it must be a tool's; in a cut reply it could go on.
            name = self._named(rest[: foot.start()]) if marker or foot[0].strip() else None
            if name is None or name not in self._tools:
                yield Content(self._marker + rest + marker)
            else:
                yield CallStart(name)
                yield from self._ended()

    def _begins(self) -> bool:
        """Whether a parameter has begun: it would be whole if its end came now."""
        start = max(0, self._text.find(self._tags.parameter_start)) if self._name is None else 0
        name = self._name or self._named(self._text[:start])
        whole = self._text[start:] + self._tags.parameter_end
        return name is not None and self._tags.parameter.fullmatch(whole) is not None

    def _end(self) -> int | None:
        """Where the first parameter of the text ends; None if that is not known yet."""
        tag = self._tags.parameter_end
        while (found := self._text.find(tag, self._seen)) >= 0:
            is_end = self._is_end(found + len(tag))
            self._seen = found if is_end is None else found + len(tag)
            if is_end is not False:
                return self._seen if is_end else None
        self._seen = max(self._seen, len(self._text) - len(tag) + 1)
        return None

    def _is_end(self, end: int) -> bool | None:
        """Whether the end tag up to `end` is a parameter's; None if what comes behind it is not known yet."""
        space = SPACE.match(self._text, end)
        assert space is not None  # it may be empty
        wanted = [one for one in (self._tags.parameter_start, self._tags.foot_start) if one]
        parts = [(one, self._text[space.end() : space.end() + len(one)]) for one in wanted]
        if any(part == one for one, part in parts):
            return True
        return None if any(one.startswith(part) for one, part in parts) else False

    def _last(self, marker: str) -> Iterator[Piece]:
        """Read the parameter that the call has ended or was cut in, if an end tag shows where it may end."""
        head, tag, rest = self._text.rpartition(self._tags.parameter_end)
        if tag and (marker or not rest.strip() or self._is_over(rest)):
            yield from self._parameter(len(head + tag))

    def _is_over(self, rest: str) -> bool:
        """Whether the text behind the last parameter says that the call has ended."""
        return rest.strip() != "" and self._tags.foot.fullmatch(rest) is not None

    def _parameter(self, end: int) -> Iterator[Piece]:
        """Read the parameter that ends at `end`, and the call's name before its first parameter."""
        start = max(0, self._text.find(self._tags.parameter_start, 0, end)) if self._name is None else 0
        name = self._name or self._named(self._text[:start])
        found = self._tags.parameter.fullmatch(self._text[start:end])
        if name is None or found is None:
            yield from self._fail()
            return
        if self._name is None:
            self._name = name
            yield CallStart(name)
        value = self._value(name, found["key"], found["value"])
        yield CallArguments(f"{', ' if self._n_told else '{'}{json.dumps(found['key'])}: {value}")
        self._n_told += 1
        self._text, self._seen, self._marker = self._text[end:], 0, ""
        self._is_begun = False

    def _fail(self) -> Iterator[Piece]:
        """Give up: what is left becomes content. A call that has begun ends with the parameters it has."""
        self._failed = True
        if self._n_told:
            yield from self._ended()
        yield Content(self._marker + self._text)
        self._text = ""

    def _value(self, name: str, key: str, text: str) -> str:
        tool = self._tools.get(name)
        return as_json(text, parameter_of(tool, key), tool.parameters if tool else {})

    def _ended(self) -> Iterator[Piece]:
        yield CallArguments("}" if self._n_told else "{}")
        yield CallEnd()

    def _named(self, head: str) -> str | None:
        found = self._tags.head.fullmatch(head)
        return found["name"] if found and NAME.fullmatch(found["name"]) else None


def as_json(text: str, schema: Schema, root: Schema) -> str:
    """A parameter's text as JSON: the value that it spells, if the schema allows such a value; else a string.

    `root`: the schema of all parameters, which has what the parameter's refers to.
    Objects and lists may also be spelt as in Python, where the schema wants such: some templates write them so.
    """
    types = types_of(schema, root)
    value: Any = WORDS.get(text.strip(), text)
    if value is text:
        value = _loaded(text)
        if value is text and types & {"object", "array"} and text.lstrip()[:1] in ("{", "["):
            spelt = _loaded(PYTHON.sub(_from_python, text))
            value = spelt if isinstance(spelt, dict | list) else text
    fits = not types or any(is_of(value, one) for one in types)
    return json.dumps(value if fits else text, ensure_ascii=False)


def _loaded(text: str) -> Any:
    """The JSON value of a text, or the text itself."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text


def _from_python(found: re.Match[str]) -> str:
    """A word or a string of Python as JSON."""
    if found[0] in WORDS:
        return json.dumps(WORDS[found[0]])
    if found[1] is None:
        return found[0]
    told = {"\\'": "'", '"': '\\"'}
    return f'"{IN_QUOTES.sub(lambda one: told.get(one[0], one[0]), found[1])}"'


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
