"""Token ids -> visible text, token by token: never half a character, never the beginning of a stop string.

A token's text can appear later than the token: bytes of one character may be spread over several tokens, and
text that could still become a stop string is held back until it cannot.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from tokenizers.decoders import DecodeStream

from slipstream.engine.text.panics import without_panics
from slipstream.engine.text.token_places import Place, TokenPlaces
from slipstream.engine.text.tokenizer import Tokenizer

# Prompt tokens that give the first reply token its context: only a text's start drops a leading space.
N_CONTEXT = 8
# Tokens that may wait for their character to be complete. A character has at most 4 bytes; beyond this the
# bytes are no text, and each further token would cost a decode of all that wait.
N_PENDING_MAX = 32
# Tokens in which a character may have begun that the next token completes.
N_CHARACTER = 3


class TextStream:
    """The text of one reply. Used by one thread."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        stop: tuple[str, ...] = (),
        *,
        skip_special: bool = True,
        with_places: bool = False,
        includes_stop: bool = False,
    ) -> None:
        """skip_special: leave control tokens out of the text; with_places: note where each token begins in it.

        includes_stop: the stop string that ends the text is its end, and not left out.
        """
        self.stopped: str | None = None  # the stop string that ended the text
        self._tokenizer = tokenizer
        self._stop = tuple(one for one in stop if one)
        self._includes_stop = includes_stop
        self._held = ""  # decoded text that is a proper prefix of a stop string
        self._shown: list[int] = []  # the tokens whose text was decoded last
        self._pending: list[int] = []  # tokens after them without text so far
        self._n_pushed = 0
        self.n_visible = 0  # characters of the text so far
        self._is_over = False
        self._skips = skip_special
        self._places = TokenPlaces(tokenizer, skip_special=skip_special) if with_places else None
        self._decoder = DecodeStream(skip_special_tokens=skip_special)
        for one in prompt_ids[-N_CONTEXT:]:
            self._step(one)  # their text belongs to the prompt
        self._shown, self._pending = list(prompt_ids[-N_CONTEXT:]), []

    def restarted(self, prompt_ids: Sequence[int], token_ids: Sequence[int], n_min: int = 0) -> TextStream:
        """The stream of the same reply after other tokens, the first n_min of which no stop string may end."""
        stream = TextStream(
            self._tokenizer,
            prompt_ids,
            self._stop,
            skip_special=self._skips,
            with_places=self._places is not None,
            includes_stop=self._includes_stop,
        )
        for i, token_id in enumerate(token_ids):
            stream.push(token_id, may_stop=i >= n_min)
        stream.begun()
        return stream

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token, if nothing came before and nothing may stop it."""
        stream = TextStream(self._tokenizer, (), skip_special=self._skips)
        found = [stream.push(token_id) for token_id in token_ids]
        if found:
            found[-1] += stream.flush()
        return found

    def guessed(self, before: Sequence[int], token_ids: Sequence[int]) -> tuple[str, ...]:
        """The text that each token would add behind others, control tokens as their names; the stream stays as it is.

        before: the last `N_CHARACTER` of the others. A character that is spread over tokens goes to the last of them.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        written = self._tokenizer.token_bytes
        for one in before:
            decoder.decode(written(one))
        return tuple(decoder.decode(written(one)) for one in token_ids)

    @property
    def token_bytes(self) -> Callable[[int], bytes]:
        """What a single token writes."""
        return self._tokenizer.token_bytes

    @property
    def has_all_begun(self) -> bool:
        """Whether `begun` has given every token so far; true without `with_places`."""
        return self._places is None or not (self._pending or self._places.n_waiting)

    def begun(self) -> list[Place]:
        """The tokens that begin in the text so far, from where the last call left off; none without `with_places`.

        A token whose text is held back waits with it; one behind a stop string never comes.
        """
        if self._places is None:
            return []
        return self._places.take(self.n_visible, is_complete=self._is_over and self.stopped is None)

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """The text that becomes visible with one more token; empty once a stop string was complete.

        may_stop: whether a stop string in the text so far may end it.
        """
        if self.stopped is not None:
            return ""
        self._n_pushed += 1
        text = self._decode(token_id)
        if text is None:
            return ""
        if may_stop and self._stop:
            text = self._release(text)
        else:
            text, self._held = self._held + text, ""
        self.n_visible += len(text)
        return text

    def flush(self, *, n_left_out: int = 0) -> str:
        """What is left at the end: held text, and an incomplete character as U+FFFD.

        n_left_out: tokens behind those pushed that ended the text and are no part of it.
        """
        if self.stopped is not None:
            return ""
        text = self._decode_pending()
        self._locate(self._pending, text)
        for number in range(self._n_pushed, self._n_pushed + n_left_out):
            if self._places is not None:
                self._places.pass_over(number)
        text = self._release(text) if self._stop else text
        text += self._held
        self._pending, self._held = [], ""
        self.n_visible += len(text)
        self._is_over = True
        return text

    def _decode(self, token_id: int) -> str | None:
        """The text of one more token and those before it without text; None while its characters are incomplete."""
        self._pending.append(token_id)
        text = self._step(token_id)
        if text is not None:
            self._locate(self._pending, text)
            self._shown, self._pending = self._pending, []
        elif len(self._pending) >= N_PENDING_MAX:
            text = self._decode_pending()
            self._locate(self._pending, text)
            self._restart()
        return text

    def _locate(self, token_ids: Sequence[int], text: str) -> None:
        if self._places is not None and token_ids:
            self._places.add(token_ids, text, self._n_pushed)

    @without_panics
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
        self._decoder = DecodeStream(skip_special_tokens=self._skips)
        self._shown, self._pending = [], []

    def _decode_pending(self) -> str:
        """The text of the pending tokens after those shown, incomplete characters included."""
        if not self._pending:
            return ""
        before = self._decoded(self._shown).rstrip("\ufffd")
        return self._decoded(self._shown + self._pending)[len(before) :]

    def _decoded(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special=self._skips)

    def _release(self, text: str) -> str:
        """The part of held and new text that no stop string can claim; sets `stopped` if a stop string is complete."""
        text = self._held + text
        found = [(start, one) for one in self._stop if (start := text.find(one)) >= 0]
        if found:
            start, self.stopped = min(found)
            self._held = ""
            return text[: start + len(self.stopped) if self._includes_stop else start]
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
