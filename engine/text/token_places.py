"""Where in a reply's text each of its tokens begins, in characters, and which tokens the client has seen text of.

A token belongs to the text in which its first byte lies: of a text that ends inside a token, the token is a part.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from slipstream.engine.text.tokenizer import Tokenizer


class Place(NamedTuple):
    """A token of a reply."""

    number: int  # 0: the reply's first token
    offset: int  # characters of the text before it; of a token inside a character: before that character
    has_text: bool  # false: a control token that the text leaves out, or an id that writes nothing


class TokenPlaces:
    """The places of a reply's tokens; those whose text the client has not seen yet wait."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool) -> None:
        """skip_special: whether control tokens are left out of the text."""
        self._tokenizer = tokenizer
        self._skips = skip_special
        self._n_chars = 0  # of the text of all tokens so far
        self._waiting: deque[Place] = deque()

    @property
    def n_waiting(self) -> int:
        """Tokens that were not taken yet."""
        return len(self._waiting)

    def add(self, token_ids: Sequence[int], text: str, n_tokens: int) -> None:
        """The reply's latest tokens and the text that they make together; n_tokens: so many there are with them."""
        first, last_char = n_tokens - len(token_ids), max(len(text) - 1, 0)
        parts = [self._written(one) for one in token_ids]
        # A decoder that leaves out a space, or replaces bytes one by one, makes a text that its bytes do not.
        begins = [min(one, last_char) for one in begins_of(parts)] if len(parts) > 1 else [0]
        self._waiting += [
            Place(first + i, self._n_chars + at, bool(part))
            for i, (at, part) in enumerate(zip(begins, parts, strict=True))
        ]
        self._n_chars += len(text)

    def pass_over(self, number: int) -> None:
        """A token that is kept out of the text, such as the one that ends it."""
        self._waiting.append(Place(number, self._n_chars, has_text=False))

    def take(self, n_visible: int, *, is_complete: bool) -> list[Place]:
        """The tokens that begin in the text's first characters, without those that were taken before.

        is_complete: the text has ended there of itself, so that tokens without text may stand behind it.
        """
        found = []
        while self._waiting and (self._waiting[0].offset < n_visible or is_complete):
            found.append(self._waiting.popleft())
        return found

    def _written(self, token_id: int) -> bytes:
        if self._skips and self._tokenizer.is_control(token_id):
            return b""
        return self._tokenizer.token_bytes(token_id)


def begins_of(parts: Sequence[bytes]) -> list[int]:
    """The number of the character in which each part of a text begins; bytes that are no text count as U+FFFD."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    found, n_chars = [], 0
    for part in parts:
        if part and not _goes_on(part):
            # The bytes before are a broken character of their own.
            n_chars += len(decoder.decode(b"", final=True))
        found.append(n_chars)
        n_chars += len(decoder.decode(part))
    return found


def _goes_on(part: bytes) -> bool:
    """Whether a part begins with a byte that no character begins with."""
    return part[0] & 0xC0 == 0x80
