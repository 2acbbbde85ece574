"""Control tokens in user text: kept apart from those that a chat template writes.

A break, a code point that no input holds, is put inside every control token found in an input string, after
its first character. No trimming, splitting or slicing by a template can take it out again, so such a token
never reaches the tokenizer whole. After rendering, a broken token is encoded as the plain text it was, and
what lies between in one piece each, so text without control tokens is encoded as usual. Control tokens of one
character cannot be broken and stay what they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from slipstream.engine.errors import InvalidRequest
from slipstream.engine.text.tokenizer import Tokenizer

# Code points that Unicode keeps free for a program's own use.
NONCHARACTERS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))


class Breaker:
    """Breaks control tokens in input strings of one tokenizer's templates, and encodes what is rendered."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._tokens = sorted((one for one in tokenizer.control_ids if len(one) > 1), key=len, reverse=True)
        self._whole = re.compile(either(self._tokens))
        self._prefixes = frozenset(one[:n] for one in self._tokens for n in range(1, len(one)))
        self._longest = max(map(len, self._prefixes), default=0)

    def guard(self, data: Any, mark: str) -> Any:
        """A copy of JSON data with the mark inside every control token of its strings, keys included."""
        if isinstance(data, str):
            return self._guard_text(data, mark)
        if isinstance(data, Mapping):
            return {self.guard(key, mark): self.guard(value, mark) for key, value in data.items()}
        if isinstance(data, list | tuple):
            return [self.guard(one, mark) for one in data]
        return data

    def _guard_text(self, text: str, mark: str) -> str:
        n_found = 1
        while n_found:  # breaking one token can leave another that overlaps it
            text, n_found = self._whole.subn(lambda found: found[0][0] + mark + found[0][1:], text)
        # A template may write the next input right behind this one, and the two could make a token together.
        if any(text[-n:] in self._prefixes for n in range(1, min(self._longest, len(text)) + 1)):
            text += mark
        return text

    def encode(self, text: str, mark: str) -> list[int]:
        """Token ids of a rendered text: whole control tokens are the template's, broken tokens plain text."""
        pieces, literals = [text], [""]
        if mark in text:
            broken = either([one[0] + mark + one[1:] for one in self._tokens])
            parts = re.split(f"({broken})|{mark}", text)
            pieces, literals = parts[::2], [(one or "").replace(mark, "") for one in [*parts[1::2], ""]]
        of_literal = {one: self._encode_literal(one) for one in set(literals)}
        encoded = self.tokenizer.encode_all(pieces, add_special=False)
        return [
            i for ids, literal in zip(encoded, literals, strict=True) for i in (*ids, *of_literal[literal])
        ]

    def _encode_literal(self, text: str) -> list[int]:
        ids = self.tokenizer.encode(text, add_special=False, parse_special=False) if text else []
        if text and self.tokenizer.control_ids[text] in ids:  # the vocabulary also makes it from plain text
            pieces = self.tokenizer.encode_all([text[0], text[1:]], add_special=False)
            return [*pieces[0], *pieces[1]]
        return ids


def either(texts: list[str]) -> str:
    """A pattern that matches any of the texts, earlier ones first; nothing if there are none."""
    return "|".join(map(re.escape, texts)) or r"(?!)"


def strings(data: Any) -> Iterator[str]:
    """All strings in JSON data, keys included."""
    if isinstance(data, str):
        yield data
    elif isinstance(data, Mapping):
        for key, value in data.items():
            yield from strings(key)
            yield from strings(value)
    elif isinstance(data, list | tuple):
        for one in data:
            yield from strings(one)


def free_marks(data: Any) -> tuple[str, str]:
    """Two characters that no string in the data holds. Raises `InvalidRequest` if there are none left."""
    text = "".join(strings(data))
    free = [mark for mark in NONCHARACTERS if mark not in text]
    if len(free) < 2:
        raise InvalidRequest("messages", "the text uses nearly all noncharacters U+FDD0 to U+FDEF")
    return free[0], free[1]
