"""Readers of calls written as JSON. They go character by character, so that a call's name and arguments can be streamed
before its last brace.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slipstream.server.openai.formats.format import CallArguments, CallEnd, CallStart, Content, Piece, joined

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
ESCAPED = '"\\/bfnrtu'  # what may follow a backslash
MOST_HEAD = 256  # characters before the brace of a call that is named outside its JSON


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a call's object: of its name, of its arguments, and those that say nothing here."""

    name: frozenset[str] = frozenset({"name"})
    arguments: frozenset[str] = frozenset({"arguments", "parameters"})
    others: frozenset[str] = frozenset({"id", "type"})


KEYS = Keys()


class Value:
    """Finds the end of one JSON value, a character at a time. Only strings and brackets matter for that.

    What JSON does not allow inside a string is put right: models write line breaks as they are, and Python's escapes.
    """

    def __init__(self) -> None:
        self._depth = 0
        self.in_string = False
        self._is_escaped = False
        self.done = False  # the last character fed was the value's last

    def feed(self, char: str) -> str:
        """Returns the text that is valid JSON so far: the character, but a backslash only with the next one."""
        if self.in_string:
            return self._inside(char)
        if char == '"':
            self.in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.done = self._depth <= 0
        return char

    def _inside(self, char: str) -> str:
        """Read a character of a string."""
        if self._is_escaped:
            self._is_escaped = False
            return escape(char)
        if char == "\\":
            self._is_escaped = True
            return ""
        if char == '"':
            self.in_string = False
            self.done = self._depth == 0
        return json.dumps(char)[1:-1] if char < " " else char


def escape(char: str) -> str:
    """A character behind a backslash, with that or what was meant by it."""
    if char in ESCAPED:
        return f"\\{char}"
    if char < " ":
        return json.dumps(char)[1:-1]
    return char if char == "'" else f"\\\\{char}"


def repaired(text: str) -> str:
    """JSON with its strings put right."""
    value = Value()
    return "".join(map(value.feed, text))


class _Steps:
    """A reader as a state machine: `_step` reads a character and sets the step for the next character."""

    def __init__(self, marker: str) -> None:
        self._raw = marker  # read since the last piece; content, if it does not become a call
        self._step: Callable[[str], None] = self._failed
        self._out: list[Piece] = []
        self._value = Value()
        self._is_open = False  # a CallStart was put out, but no CallEnd yet
        self._n_calls = 0

    @property
    def in_string(self) -> bool:
        return self._step != self._failed and self._value.in_string

    def feed(self, text: str) -> list[Piece]:
        for i, char in enumerate(text):
            if self._step == self._failed:
                self._out.append(Content(text[i:]))
                break
            self._raw += char
            self._step(char)
        told, self._out = self._out, []
        return joined(told)

    def close(self, marker: str) -> list[Piece]:
        told: list[Piece] = []
        was_open = self._is_open  # then what is left belongs to the call's object
        if self._is_open and (marker or self._value.done):  # else the reply was cut, and so is the call
            self._is_open = False
            told.append(CallEnd())
        if self._step == self._failed:
            return [*told, Content(marker)]
        silent = was_open or (self._n_calls > 0 and self._is_silent(self._raw))
        return told if silent else [*told, Content(self._raw + marker)]

    def _is_silent(self, text: str) -> bool:
        """Whether this text after a call means nothing and is dropped."""
        return not text.strip()

    def _tell(self, *pieces: Piece) -> None:
        self._out += pieces
        self._raw = ""

    def _tell_argument(self, char: str) -> None:
        """Put out a character of the arguments."""
        said = self._value.feed(char)
        self._tell(*([CallArguments(said)] if said else []))

    def _start(self, name: str) -> None:
        self._is_open = True
        self._tell(CallStart(name))

    def _end(self) -> None:
        self._is_open = False
        self._n_calls += 1
        self._tell(CallEnd())

    def _fail(self) -> None:
        self._step = self._failed
        raw = self._raw
        if self._is_open:
            self._end()
        self._tell(Content(raw))

    def _failed(self, char: str) -> None:
        raise AssertionError("nothing is read behind a failure")


class JsonCalls(_Steps):
    """`{"name": …, "arguments": {…}}`, one or several, alone or in a list; `parameters` is as good as `arguments`.

    `known`: only objects with these names are calls; None: any name. `keys`: of an object that is a call.
    """

    def __init__(self, marker: str, known: frozenset[str] | None = None, keys: Keys = KEYS) -> None:
        super().__init__(marker)
        self._known = known
        self._keys = keys
        self._step = self._before
        self._reset()

    def _reset(self) -> None:
        self._key = ""
        self._text = ""  # of the key or value being read
        self._name: str | None = None
        self._given: str | None = None  # the arguments, if they came in one piece

    def _is_silent(self, text: str) -> bool:
        return not text.strip(" \t\r\n],;")

    def _before(self, char: str) -> None:
        if char == "{":
            self._reset()
            self._step = self._member
        elif not char.isspace() and char not in "[],;":
            self._fail()

    def _member(self, char: str) -> None:
        if char == '"':
            self._begin(char, self._key_text)
        elif char == "}":
            self._finish()
        elif not char.isspace() and char != ",":
            self._fail()

    def _begin(self, char: str, step: Callable[[str], None]) -> None:
        self._text, self._value, self._step = "", Value(), step
        step(char)

    def _key_text(self, char: str) -> None:
        self._text += self._value.feed(char)
        if self._value.done:
            self._key = str(_loaded(self._text))
            self._step = self._colon
            if self._key in self._keys.name:
                is_wrong = self._name is not None
            elif self._key in self._keys.arguments:
                is_wrong = self._given is not None
            elif self._name is None or self._given is None:  # behind both, models add keys of their own
                is_wrong = self._key not in self._keys.others
            else:
                is_wrong = False
            if is_wrong:
                self._fail()

    def _colon(self, char: str) -> None:
        if char == ":":
            self._step = self._value_start
        elif not char.isspace():
            self._fail()

    def _value_start(self, char: str) -> None:
        if char.isspace():
            return
        if char == "{" and self._key in self._keys.arguments and self._name is not None:
            self._given = ""
            self._start(self._name)
            self._begin(char, self._arguments)
        else:
            self._begin(char, self._value_text if char in '"{[' else self._bare_value)

    def _arguments(self, char: str) -> None:
        self._tell_argument(char)
        if self._value.done:
            self._step = self._member

    def _bare_value(self, char: str) -> None:
        """A number, true, false or null, whose end shows only in the character after it."""
        if char in ",}" or char.isspace():
            self._step = self._member
            self._take()
            if self._step == self._member:
                self._member(char)
        else:
            self._text += char

    def _value_text(self, char: str) -> None:
        self._text += self._value.feed(char)
        if self._value.done:
            self._step = self._member
            self._take()

    def _take(self) -> None:
        """Take over a member's value, which has been read whole."""
        value = _loaded(self._text)
        if value is _NOTHING:
            self._fail()
        elif self._key in self._keys.name:
            is_known = isinstance(value, str) and (self._known is None or value in self._known)
            if is_known and NAME.fullmatch(value):
                self._name = value
            else:
                self._fail()
        elif self._key in self._keys.arguments:
            # Some models write the arguments as a string that holds JSON, as in OpenAI's messages.
            text = repaired(value) if isinstance(value, str) else "{}" if value is None else self._text
            if isinstance(_loaded(text), dict):
                self._given = text
            else:
                self._fail()

    def _finish(self) -> None:
        """End the call at the end of its object."""
        if self._name is None:
            self._fail()
            return
        if not self._is_open:
            self._start(self._name)
            self._tell(CallArguments(self._given or "{}"))
        self._end()
        self._step = self._before


class HeadedJson(_Steps):
    """Calls whose name stands before their JSON. `head` has a group `name` and must match all text before the JSON.

    `silent`: text that may follow a call and is dropped. `n_braces`: opening braces in a head.
    """

    def __init__(
        self, marker: str, head: re.Pattern[str], silent: re.Pattern[str], n_braces: int = 0
    ) -> None:
        super().__init__(marker)
        self._pattern = head
        self._silent = silent
        self._n_braces = n_braces
        self._text = ""
        self._step = self._head

    def _is_silent(self, text: str) -> bool:
        return bool(self._silent.fullmatch(text))

    def _head(self, char: str) -> None:
        if char != "{" or self._text.count("{") < self._n_braces:
            self._text += char
            if len(self._text) > MOST_HEAD:
                self._fail()
            return
        found = self._pattern.fullmatch(self._text)
        if found is None or not NAME.fullmatch(found["name"]):
            self._fail()
            return
        self._start(found["name"])
        self._text, self._value, self._step = "", Value(), self._arguments
        self._arguments(char)

    def _arguments(self, char: str) -> None:
        self._tell_argument(char)
        if self._value.done:
            self._end()
            self._step = self._head


_NOTHING = object()


def _loaded(text: str) -> Any:
    """The JSON value of a text, or `_NOTHING` if it is not valid JSON."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return _NOTHING
