"""The two forms of a reply, chat and plain text, as far as they differ: the entries of `choices`.

A form makes `Choice` objects; a choice turns its engine events into entries of chunks, or into the entry of a whole
reply. `reply.py` has what both forms share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from slipstream.engine.api import Delta, Done, Echo, EventStream, TokenLogprob
from slipstream.server.openai import wire_logprobs as logprobs


class Parser(Protocol):
    """Reads a chat choice's text as it comes: what is content, reasoning or a tool call."""

    @property
    def n_reasoning(self) -> int | None:
        """Tokens that were thinking; None if not counted."""

    @property
    def is_ended(self) -> bool:
        """Whether no further text would be sent, so that the generation may end."""

    def feed(self, delta: Delta) -> dict[str, Any]:
        """The `delta` that more text makes; empty while it is not known yet what the text is."""

    def finish(self) -> dict[str, Any]:
        """The `delta` of the text that was held back, now that the text has ended."""

    def message(self) -> dict[str, Any]:
        """All text that was fed, as a `message` without its role. Call it after `finish`."""

    def reason(self, done: Done) -> str:
        """The choice's `finish_reason`."""


class PlainText:
    """Every character is content."""

    n_reasoning: int | None = None
    is_ended = False

    def __init__(self, prompt_tail: str) -> None:
        self._texts: list[str] = []

    def feed(self, delta: Delta) -> dict[str, Any]:
        self._texts.append(delta.text)
        return {"content": delta.text}

    def finish(self) -> dict[str, Any]:
        return {}

    def message(self) -> dict[str, Any]:
        return {"content": "".join(self._texts)}

    def reason(self, done: Done) -> str:
        return done.reason


@dataclass(frozen=True, slots=True)
class Told:
    """What a request wants in the entry of each choice, and how the choice's text is read."""

    logprobs: bool = False
    token_ids: bool = False
    parser: Callable[[str], Parser] = PlainText  # takes the end of the prompt; chat only
    silent: frozenset[str] = frozenset()  # tokens that the parser leaves out of the text


class Choice(Protocol):
    """A choice while it is generated.

    For a stream call `opening`, then `piece` per event, then `ending`; else `keep` per event, then `whole`.
    """

    @property
    def is_ended(self) -> bool:
        """Whether no further text would be sent."""

    @property
    def n_reasoning(self) -> int | None:
        """Tokens that were thinking so far; None if not counted."""

    def opening(self) -> dict[str, Any] | None:
        """The entry of the choice's first chunk, before any text; None if there is no such chunk."""

    def piece(self, happened: Echo | Delta) -> dict[str, Any]:
        """The entry in the chunk of a step."""

    def ending(self, done: Done) -> list[dict[str, Any]]:
        """The entries in the choice's last chunks: text that was held back, if any, and the end."""

    def keep(self, happened: Echo | Delta) -> None: ...

    def whole(self, done: Done) -> dict[str, Any]: ...


class Form(Protocol):
    """What differs between the replies of the two endpoints, in chunks and whole."""

    id_prefix: str
    whole_object: str
    chunk_object: str
    prompt_field: str

    def choice(self, index: int, told: Told, stream: EventStream) -> Choice: ...

    def root(self, told: Told, streams: Sequence[EventStream]) -> dict[str, Any]:
        """Fields for the root of the body, or of the first chunk."""


def _choice(
    index: int,
    body: dict[str, Any],
    table: dict[str, Any] | None,
    done: Done | None = None,
    reason: str | None = None,
) -> dict[str, Any]:
    choice = {"index": index, **body, "logprobs": table, "finish_reason": reason}
    if done and (done.stop_string is not None or done.stop_token is not None):
        choice["stop_reason"] = done.stop_token if done.stop_string is None else done.stop_string
    return choice


class _ChatChoice:
    def __init__(self, index: int, told: Told, stream: EventStream) -> None:
        self.index = index
        self.told = told
        self.parser = told.parser(stream.prompt_tail)
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    @property
    def is_ended(self) -> bool:
        return self.parser.is_ended

    @property
    def n_reasoning(self) -> int | None:
        return self.parser.n_reasoning

    def opening(self) -> dict[str, Any]:
        return _choice(self.index, {"delta": {"role": "assistant", "content": ""}}, None)

    def piece(self, happened: Echo | Delta) -> dict[str, Any]:
        if isinstance(happened, Echo):
            raise TypeError("a chat has no echo")
        body = {"delta": self.parser.feed(happened)}
        return _choice(self.index, body | self._given(happened.token_ids), self._table(happened.logprobs))

    def ending(self, done: Done) -> list[dict[str, Any]]:
        held = self.parser.finish()
        last = _choice(self.index, {"delta": {}}, None, done, self.parser.reason(done))
        return [_choice(self.index, {"delta": held}, None), last] if held else [last]

    def keep(self, happened: Echo | Delta) -> None:
        if isinstance(happened, Echo):
            raise TypeError("a chat has no echo")
        self.parser.feed(happened)
        self._ids += happened.token_ids
        self._logprobs += happened.logprobs

    def whole(self, done: Done) -> dict[str, Any]:
        self.parser.finish()
        body = {"message": {"role": "assistant", **self.parser.message()}}
        table = self._table(self._logprobs)
        return _choice(self.index, body | self._given(self._ids), table, done, self.parser.reason(done))

    def _given(self, ids: Sequence[int]) -> dict[str, Any]:
        return {"token_ids": list(ids)} if self.told.token_ids else {}

    def _table(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self.told.logprobs:
            return None
        return logprobs.of_chat(
            [one for one in tokens if one.data.decode(errors="replace") not in self.told.silent]
        )


class _TextChoice:
    is_ended = False
    n_reasoning: int | None = None

    def __init__(self, index: int, told: Told, stream: EventStream) -> None:
        self.index = index
        self.told = told
        # As there may be several prompts, each choice has the ids of its own, once.
        self._first = {"prompt_token_ids": list(stream.prompt_ids)} if told.token_ids else {}
        self._n_echoed = 0  # characters of the prompt in the choice's text
        self._kept: list[Echo | Delta] = []

    def opening(self) -> None:
        return None

    def piece(self, happened: Echo | Delta) -> dict[str, Any]:
        return self._told([happened])

    def ending(self, done: Done) -> list[dict[str, Any]]:
        return [_choice(self.index, {"text": "", **self._first}, None, done, done.reason)]

    def keep(self, happened: Echo | Delta) -> None:
        self._kept.append(happened)

    def whole(self, done: Done) -> dict[str, Any]:
        return self._told(self._kept, done)

    def _told(self, events: Sequence[Echo | Delta], done: Done | None = None) -> dict[str, Any]:
        """The choice's entry for events that follow each other."""
        text = "".join(_text(one) for one in events)
        body: dict[str, Any] = {"text": text, **self._first}
        if self.told.token_ids:
            body["token_ids"] = [i for one in events if isinstance(one, Delta) for i in one.token_ids]
        table = self._table(events) if self.told.logprobs else None
        self._first = {}
        return _choice(self.index, body, table, done, done.reason if done else None)

    def _table(self, events: Sequence[Echo | Delta]) -> dict[str, Any] | None:
        tokens: list[tuple[int, TokenLogprob | str]] = []
        for one in events:
            if isinstance(one, Delta):
                tokens += [(self._n_echoed + token.offset, token) for token in one.logprobs]
                continue
            self._n_echoed = len(_text(one))
            tokens += [
                (0, piece) if token is None else (token.offset, token)
                for piece, token in zip(one.pieces, one.logprobs, strict=False)
            ]
        return logprobs.of_text(tokens)


def _text(happened: Echo | Delta) -> str:
    return "".join(happened.pieces) if isinstance(happened, Echo) else happened.text


class ChatForm:
    """`/v1/chat/completions`. A stream has the role once per choice, because clients concatenate strings."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    prompt_field = "messages"

    def choice(self, index: int, told: Told, stream: EventStream) -> Choice:
        return _ChatChoice(index, told, stream)

    def root(self, told: Told, streams: Sequence[EventStream]) -> dict[str, Any]:
        return {"prompt_token_ids": list(streams[0].prompt_ids)} if told.token_ids else {}


class TextForm:
    """`/v1/completions`."""

    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"
    prompt_field = "prompt"

    def choice(self, index: int, told: Told, stream: EventStream) -> Choice:
        return _TextChoice(index, told, stream)

    def root(self, told: Told, streams: Sequence[EventStream]) -> dict[str, Any]:
        return {}


CHAT: Form = ChatForm()
TEXT: Form = TextForm()
