"""The two shapes of a reply: chat and plain text. Everything else about a reply is the same."""

from __future__ import annotations

from typing import Any, Protocol

from engine.api import Done


class Form(Protocol):
    """How a choice looks, in a chunk and whole."""

    id_prefix: str
    whole_object: str
    chunk_object: str
    prompt_field: str

    def opening(self, index: int) -> dict[str, Any] | None:
        """The first chunk's choice, before any text."""

    def piece(self, index: int, text: str) -> dict[str, Any]: ...

    def ending(self, index: int, done: Done) -> dict[str, Any]: ...

    def whole(self, index: int, text: str, done: Done) -> dict[str, Any]: ...


def _choice(index: int, body: dict[str, Any], done: Done | None) -> dict[str, Any]:
    choice = {"index": index, **body, "logprobs": None, "finish_reason": done.reason if done else None}
    if done and done.stop_string is not None:
        choice["stop_reason"] = done.stop_string
    return choice


class ChatForm:
    """`/v1/chat/completions`. The role is told once per choice: clients concatenate what they get."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    prompt_field = "messages"

    def opening(self, index: int) -> dict[str, Any] | None:
        return _choice(index, {"delta": {"role": "assistant", "content": ""}}, None)

    def piece(self, index: int, text: str) -> dict[str, Any]:
        return _choice(index, {"delta": {"content": text}}, None)

    def ending(self, index: int, done: Done) -> dict[str, Any]:
        return _choice(index, {"delta": {}}, done)

    def whole(self, index: int, text: str, done: Done) -> dict[str, Any]:
        return _choice(index, {"message": {"role": "assistant", "content": text}}, done)


class TextForm:
    """`/v1/completions`."""

    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"
    prompt_field = "prompt"

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def piece(self, index: int, text: str) -> dict[str, Any]:
        return _choice(index, {"text": text}, None)

    def ending(self, index: int, done: Done) -> dict[str, Any]:
        return _choice(index, {"text": ""}, done)

    def whole(self, index: int, text: str, done: Done) -> dict[str, Any]:
        return _choice(index, {"text": text}, done)


CHAT: Form = ChatForm()
TEXT: Form = TextForm()
