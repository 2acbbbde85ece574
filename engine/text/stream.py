"""Token ids -> visible text, token by token: never half a character, never the beginning of a stop string.

A token's text can appear later than the token: bytes of one character may be spread over several tokens, and
text that could still become a stop string is held back until it cannot.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

from engine.text.tokenizer import Tokenizer

# Prompt tokens that give the first reply token its context: only a text's start drops a leading space.
N_CONTEXT = 8
# Tokens that may wait for their character to be complete. A character has at most 4 bytes; beyond this the
# bytes are no text, and each further one would cost a decode of all that wait.
N_PENDING_MAX = 32


class TextStream:
    """The text of one reply. Used by one thread."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stop: tuple[str, ...] = ()) -> None:
        self.stopped: str | None = None  # the stop string that ended the text
        self._tokenizer = tokenizer
        self._stop = tuple(one for one in stop if one)
        self._held = ""  # decoded text that is a proper prefix of a stop string
        self._shown: list[int] = []  # the tokens whose text was decoded last
        self._pending: list[int] = []  # tokens after them without text so far
        self._decoder = DecodeStream(skip_special_tokens=True)
        for one in prompt_ids[-N_CONTEXT:]:
            self._step(one)  # their text belongs to the prompt
        self._shown, self._pending = list(prompt_ids[-N_CONTEXT:]), []

    def restarted(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> TextStream:
        """The stream of the same reply after other tokens."""
        stream = TextStream(self._tokenizer, prompt_ids, self._stop)
        for token_id in token_ids:
            stream.push(token_id)
        return stream

    def push(self, token_id: int) -> str:
        """The text that becomes visible with one more token; empty once a stop string was complete."""
        if self.stopped is not None:
            return ""
        self._pending.append(token_id)
        text = self._step(token_id)
        if text is not None:
            self._shown, self._pending = self._pending, []
        elif len(self._pending) < N_PENDING_MAX:
            return ""
        else:
            text = self._decode_pending()
            self._restart()
        return self._release(text) if self._stop else text

    def flush(self) -> str:
        """What is left at the end: held text, and an incomplete character as U+FFFD."""
        if self.stopped is not None:
            return ""
        text = self._decode_pending()
        text = self._release(text) if self._stop else text
        text += self._held
        self._pending, self._held = [], ""
        return text

    def _step(self, token_id: int) -> str | None:
        """What the decoder makes of one more token; None while its characters are incomplete."""
        try:
            text: str | None = self._decoder.step(self._tokenizer.backend, token_id)
        except Exception:  # noqa: BLE001 - all it raises: bytes that looked like text turned out to be none
            self._restart()
            self._pending = [token_id]
            text = self._decoder.step(self._tokenizer.backend, token_id)
        return text

    def _restart(self) -> None:
        """Decode the coming tokens as if the text began with them."""
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._shown, self._pending = [], []

    def _decode_pending(self) -> str:
        """The text of the pending tokens after those shown, incomplete characters included."""
        if not self._pending:
            return ""
        before = self._tokenizer.decode(self._shown).rstrip("\ufffd")
        return self._tokenizer.decode(self._shown + self._pending)[len(before) :]

    def _release(self, text: str) -> str:
        """The part of held and new text that no stop string can claim; sets `stopped` if one is complete."""
        text = self._held + text
        found = [(start, one) for one in self._stop if (start := text.find(one)) >= 0]
        if found:
            start, self.stopped = min(found)
            self._held = ""
            return text[:start]
        n_held = max(n_open(text, one) for one in self._stop)
        cut = len(text) - n_held
        self._held = text[cut:]
        return text[:cut]


def n_open(text: str, stop: str) -> int:
    """Length of the longest end of the text that is a proper prefix of the stop string."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
