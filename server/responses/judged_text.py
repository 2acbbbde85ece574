"""Which log-probabilities go with which text: those of the tokens that wrote it.

A parser holds text back that may turn out to be a marker, and a step may bring any number of tokens. So the text is
read token by token, and a token waits for what becomes of its text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from slipstream.engine.api import Delta, TokenLogprob
from slipstream.server.openai.formats.format import Content, Piece, joined
from slipstream.server.openai.reply_text import ReplyText

Judged = tuple[Piece, list[TokenLogprob]]


class JudgedText:
    """Reads a reply's text into pieces, and says of content which tokens wrote it."""

    def __init__(self, text: ReplyText) -> None:
        self._text = text
        self._n_read = 0  # characters
        self._waiting: list[
            tuple[str, Sequence[TokenLogprob]]
        ] = []  # texts that are no piece yet, or never will be

    def read(self, delta: Delta) -> list[Judged]:
        """The pieces that a step makes."""
        found: list[Judged] = []
        for token in self._tokens(delta):
            pieces, _ = self._text.read(token)
            self._waiting.append((token.text, token.logprobs))
            found += self._judged(pieces)
            if self._text.is_ended:
                break
        return _joined(found)

    def finish(self) -> list[Judged]:
        """The pieces of the text that was held back, now that the text has ended."""
        return [*self._judged(self._text.finish())]

    def _tokens(self, delta: Delta) -> Iterator[Delta]:
        """A step's tokens one by one, as far as its text can be divided among them."""
        left = delta.logprobs
        for i, text in enumerate(delta.pieces or (delta.text,)):
            self._n_read += len(text)
            ids = delta.token_ids[i : i + 1] if delta.pieces else delta.token_ids
            begun = tuple(one for one in left if one.offset < self._n_read)
            left = left[len(begun) :]
            yield Delta(text, ids, (None,) * len(ids), (text,) if delta.pieces else (), begun)

    def _judged(self, pieces: Iterable[Piece]) -> Iterator[Judged]:
        for piece in pieces:
            if isinstance(piece, Content):
                yield piece, self._writers(piece.text)
            else:
                self._waiting = self._waiting[-1:]  # content may begin in the same token
                yield piece, []

    def _writers(self, content: str) -> list[TokenLogprob]:
        """The tokens that wrote this content, which is part of what waits; what is behind it goes on waiting."""
        waiting, self._waiting = self._waiting, []
        start = max(0, "".join(text for text, _ in waiting).find(content))
        end, place, writers = start + len(content), 0, list[TokenLogprob]()
        for text, tokens in waiting:
            place += len(text)
            if place > start and place - len(text) < end:
                writers += tokens
                tokens = ()
            if place > end:
                self._waiting.append((text[-(place - end) :], tokens))
        return writers


def _joined(found: Iterable[Judged]) -> list[Judged]:
    """The pieces, with neighbouring texts of the same kind joined."""
    told: list[Judged] = []
    for _, group in groupby(found, lambda one: type(one[0])):
        same = [*group]
        pieces = joined(piece for piece, _ in same)
        tokens = [token for _, writers in same for token in writers]
        told += [(piece, tokens if len(pieces) == 1 else []) for piece in pieces]
    return told
