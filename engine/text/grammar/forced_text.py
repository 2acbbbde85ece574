"""Text that a grammar leaves no choice about, as tokens at their places in a reply, so that it is asked for once.

A place's token, once known, is a function of the tokens before it: it stays known however many tokens are pushed and
popped behind it.
"""

from __future__ import annotations

from collections.abc import Sequence

# Tokens of a run that is kept. A grammar that forces text without end says so where a token of it is consumed.
_MOST = 256


class ForcedText:
    """Runs of forced tokens, and how far a reply follows the last of them."""

    def __init__(self) -> None:
        self._runs: list[tuple[int, list[int]]] = []  # (place of the first token, tokens), rising
        self._left: int | None = None  # the place at which the reply has other tokens than the last run

    def after(self, n_tokens: int) -> Sequence[int]:
        """The tokens that are known to follow the reply's first n_tokens, which must be its length."""
        if self._left is not None or not self._runs:
            return ()
        start, tokens = self._runs[-1]
        return tokens[n_tokens - start :]

    def begins_with(self, n_tokens: int, tokens: Sequence[int]) -> bool:
        """Whether all these tokens are known to follow the reply's n_tokens."""
        known = self.after(n_tokens)
        return len(tokens) <= len(known) and [*tokens] == [*known[: len(tokens)]]

    def learn(self, n_tokens: int, tokens: Sequence[int]) -> None:
        """These tokens must follow the reply's n_tokens, behind which nothing was known; too many are forgotten."""
        if 0 < len(tokens) <= _MOST and self._left is None:
            self._runs.append((n_tokens, list(tokens)))

    def follow(self, n_tokens: int, token_id: int) -> bool:
        """One more token, behind n_tokens; whether it is the known one, and not the last that is known."""
        if self._left is not None or not self._runs:
            return False
        start, tokens = self._runs[-1]
        place = n_tokens - start
        if place >= len(tokens):
            return False
        if tokens[place] != token_id:
            self._left = n_tokens
            return False
        return place + 1 < len(tokens)

    def cut(self, n_tokens: int) -> None:
        """The reply is back at n_tokens."""
        if self._left is not None and n_tokens <= self._left:
            self._left = None
        while self._runs and self._runs[-1][0] > n_tokens:
            self._runs.pop()
