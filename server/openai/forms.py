"""OpenAI's two forms of a reply, chat and plain text, as far as they differ: the entries of `choices`.

A choice turns its engine events into entries of chunks, or into the entry of a whole reply. `reply.py` has what both
forms share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from slipstream.engine.api import Delta, Done, Echo, EventStream, TokenLogprob
from slipstream.server.openai import wire_logprobs as logprobs
from slipstream.server.openai.job import Form, Wanted, delta_of
from slipstream.server.openai.message import Message
from slipstream.server.openai.reply import ChoicesReply


def _choice(
    index: int,
    body: dict[str, Any],
    table: dict[str, Any] | None,
    done: Done | None = None,
    reason: str | None = None,
) -> dict[str, Any]:
    choice = {"index": index, **body, "logprobs": table, "finish_reason": reason}
    if done:
        choice["stop_reason"] = done.stop_token if done.stop_string is None else done.stop_string
    return choice


class _ChatChoice:
    def __init__(self, index: int, wanted: Wanted, stream: EventStream) -> None:
        self.index = index
        self.wanted = wanted
        self.text = wanted.text(stream.prompt_tail)
        self.message = Message(wanted.reasoning_fields)
        # Several choices have one prompt, so that its ids and log-probabilities stand at the root, once.
        self._root = {"prompt_token_ids": list(stream.prompt_ids)} if wanted.token_ids else {}
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    @property
    def is_ended(self) -> bool:
        return self.text.is_ended

    @property
    def n_reasoning(self) -> int | None:
        return self.text.n_reasoning

    def opening(self) -> dict[str, Any]:
        content = "" if self.wanted.has_content else None
        return _choice(self.index, {"delta": {"role": "assistant", "content": content}}, None)

    def nothing(self) -> dict[str, Any]:
        return _choice(self.index, {"delta": {}}, None)

    def piece(self, happened: Echo | Delta) -> dict[str, Any]:
        pieces, delta = self.text.read(delta_of(happened))
        body = {"delta": self.message.add(pieces)}
        return _choice(self.index, body | self._given(delta.token_ids), self._table(delta.logprobs))

    def ending(self, done: Done) -> list[dict[str, Any]]:
        held = self.message.add(self.text.finish())
        last = _choice(self.index, {"delta": {}}, None, done, self.text.reason(done))
        return [_choice(self.index, {"delta": held}, None), last] if held else [last]

    def keep(self, happened: Echo | Delta) -> None:
        if isinstance(happened, Echo):
            self._root |= _of_prompt(happened, self.wanted)
            return
        pieces, delta = self.text.read(delta_of(happened))
        self.message.add(pieces)
        self._ids += delta.token_ids
        self._logprobs += delta.logprobs

    def whole(self, done: Done) -> dict[str, Any]:
        self.message.add(self.text.finish())
        body = {"message": {"role": "assistant", **self.message.whole()}}
        table = self._table(self._logprobs)
        return _choice(self.index, body | self._given(self._ids), table, done, self.text.reason(done))

    def root(self) -> dict[str, Any]:
        return self._root

    def _given(self, ids: Sequence[int]) -> dict[str, Any]:
        return {"token_ids": list(ids)} if self.wanted.token_ids else {}

    def _table(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self.wanted.logprobs is None:
            return None
        return logprobs.of_chat(
            [one for one in tokens if one.data.decode(errors="replace") not in self.wanted.silent]
        )


class _TextChoice:
    is_ended = False
    n_reasoning: int | None = None

    def __init__(self, index: int, wanted: Wanted, stream: EventStream) -> None:
        self.index = index
        self.wanted = wanted
        # As there may be several prompts, each choice has the ids of its own, once.
        self._first = {"prompt_token_ids": list(stream.prompt_ids)} if wanted.token_ids else {}
        self._n_echoed = 0  # characters of the prompt in the choice's text
        self._kept: list[Echo | Delta] = []

    def opening(self) -> None:
        return None

    def nothing(self) -> dict[str, Any]:
        return _choice(self.index, {"text": ""}, None)

    def piece(self, happened: Echo | Delta) -> dict[str, Any]:
        return self._entry([happened])

    def ending(self, done: Done) -> list[dict[str, Any]]:
        return [_choice(self.index, {"text": "", **self._first}, None, done, done.reason)]

    def keep(self, happened: Echo | Delta) -> None:
        self._kept.append(happened)

    def whole(self, done: Done) -> dict[str, Any]:
        return self._entry(self._kept, done)

    def root(self) -> dict[str, Any]:
        return {}

    def _entry(self, events: Sequence[Echo | Delta], done: Done | None = None) -> dict[str, Any]:
        """The choice's entry for events that follow each other."""
        said = [one for one in events if self.wanted.echo or isinstance(one, Delta)]
        text = "".join(map(_text, said))
        body: dict[str, Any] = {"text": text, **self._first}
        if self.wanted.token_ids:
            body["token_ids"] = [i for one in events if isinstance(one, Delta) for i in one.token_ids]
        for one in events:
            body |= _of_prompt(one, self.wanted) if isinstance(one, Echo) else {}
        table = None if self.wanted.logprobs is None else self._table(said, self.wanted.logprobs)
        self._first = {}
        return _choice(self.index, body, table, done, done.reason if done else None)

    def _table(self, events: Sequence[Echo | Delta], n_top: int) -> dict[str, Any] | None:
        tokens: list[tuple[int, TokenLogprob | str]] = []
        for one in events:
            if isinstance(one, Delta):
                tokens += [(self._n_echoed + token.offset, token) for token in one.logprobs]
                continue
            self._n_echoed = len(_text(one))
            tokens += [
                (0, piece) if token is None else (token.offset, replace(token, top=token.top[:n_top]))
                for piece, token in zip(one.pieces, one.logprobs, strict=False)
            ]
        return logprobs.of_text(tokens)


def _text(happened: Echo | Delta) -> str:
    return "".join(happened.pieces) if isinstance(happened, Echo) else happened.text


def _of_prompt(echo: Echo, wanted: Wanted) -> dict[str, Any]:
    n_top = wanted.prompt_logprobs
    return {} if n_top is None else {"prompt_logprobs": logprobs.of_prompt(echo.logprobs, n_top)}


# A stream of `/v1/chat/completions` has the role once per choice, because clients concatenate strings.
CHAT = Form(
    "chatcmpl-",
    "messages",
    partial(ChoicesReply, objects=("chat.completion", "chat.completion.chunk"), choice=_ChatChoice),
)
# `/v1/completions`
TEXT = Form(
    "cmpl-",
    "prompt",
    partial(ChoicesReply, objects=("text_completion", "text_completion"), choice=_TextChoice),
)
