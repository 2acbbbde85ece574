"""Conversations -> text and token ids by the checkpoint's chat template.

Special tokens written by the template are control tokens; the same characters in a message, a tool or a
keyword are plain text (control.py says how).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from slipstream.engine.api import Chat
from slipstream.engine.errors import InvalidRequest, LoadError, Unsupported
from slipstream.engine.text.call_turns import call_turns
from slipstream.engine.text.control import Breaker, free_marks, strings
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.engine.text.tokenizer_source import TokenizerSource, folder_source

# Roles that a message may have: some templates build control tokens out of the role, so it may not be just any word.
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# The same field under the names that different templates read, the standard name first.
REASONING = ("reasoning_content", "thinking", "reasoning")
RESERVED = ("messages", "add_generation_prompt", "continue_final_message")
PROBE = "aSlotForText"
IMAGE = {"type": "image"}  # a part of a content


class ImageWriting(Protocol):
    """How images are written in a prompt."""

    marker: str  # what the template writes for an image, a control token
    written: str  # what takes its place


class ChatTemplate:
    """The chat templates of one checkpoint. Safe to use from several threads."""

    def __init__(self, sources: Mapping[str, str], tokenizer: Tokenizer, where: str) -> None:
        """sources: template by name; "default" is used, or "tool_use" if there are tools."""
        if "default" not in sources:
            raise LoadError(f"{where}: no chat template is named default, only {', '.join(sources)}")
        try:
            from slipstream.engine.text.template import compile_template, render
        except ImportError:
            raise LoadError(
                f"{where}: its chat template needs the package jinja2, which is not installed"
            ) from None
        self.source = sources["default"]
        self.tool_source = sources.get("tool_use")
        self._write = render
        self.tokenizer = tokenizer
        self._templates = {name: compile_template(source, where) for name, source in sources.items()}
        self._breaker = Breaker(tokenizer)
        as_text, as_parts = self._probe(PROBE), self._probe([{"type": "text", "text": PROBE}])
        self._takes_parts = as_parts is not None and (as_parts == as_text or as_text is None)
        self._takes_text = as_text is not None or not self._takes_parts
        name = "tool_use" if "tool_use" in self._templates else "default"
        self._call_turns = call_turns(partial(self._probed, name), self._content(PROBE, ""))

    def _probe(self, content: Any) -> str | None:
        """What the default template makes of a content, or None if the text in it does not come out."""
        text = self._probed("default", [{"role": "user", "content": content}], {})
        return text if text is not None and PROBE in text else None

    def _probed(self, name: str, messages: Sequence[Any], keywords: Mapping[str, Any]) -> str | None:
        """What a template makes of messages; None if it refuses them."""
        try:
            return self._write(self._templates[name], self._variables(messages, keywords))
        except InvalidRequest:
            return None

    def render(self, chat: Chat, n_ctx: int | None = None) -> str:
        """The conversation as the template writes it.

        Raises `InvalidRequest` if the template refuses, `TextTooLong` for more text than `n_ctx` tokens can write.
        """
        text, mark = self._render(chat, n_ctx)
        return text.replace(mark, "")

    def encode(self, chat: Chat, n_ctx: int | None = None, writing: ImageWriting | None = None) -> list[int]:
        """The conversation's token ids. Raises as `render` does, and if the template does not write all images.

        writing: how images are written; needed for conversations that have some.
        """
        text, mark = self._render(chat, n_ctx)
        if chat.images:
            assert writing is not None
            n_written = text.count(writing.marker)
            if n_written != len(chat.images):
                raise InvalidRequest(
                    "messages",
                    f"the chat template writes {n_written} of {len(chat.images)} images where they are",
                )
            text = text.replace(writing.marker, writing.written)
        return self._breaker.encode(text, mark)

    def _render(self, chat: Chat, n_ctx: int | None) -> tuple[str, str]:
        """The rendered text with breaks in it, and the character that is the break."""
        if n_ctx is not None:
            # Before rendering, which takes its time too; earlier turns' reasoning is what templates leave out.
            shown = [[value for name, value in one.items() if name not in REASONING] for one in chat.messages]
            self.tokenizer.check_size("messages", "".join(strings(shown)), n_ctx)
        for name in RESERVED:
            if name in chat.template_kwargs:
                raise InvalidRequest("chat_template_kwargs", f"{name} has a field of its own")
        try:
            mark, end = free_marks([list(chat.messages), chat.template_kwargs])
            messages = [self._message(one, i) for i, one in enumerate(chat.messages)]
            messages = self._breaker.guard(messages, mark)
            keywords = self._breaker.guard(dict(chat.template_kwargs), mark)
        except RecursionError:
            raise InvalidRequest("messages", "nested too deeply") from None
        if chat.continue_final_message:
            if chat.add_generation_prompt:
                raise InvalidRequest("continue_final_message", "excludes add_generation_prompt")
            tag_last(messages, end)
        name = "tool_use" if keywords.get("tools") and "tool_use" in self._templates else "default"
        variables = self._variables(messages, keywords)
        text = self._write(
            self._templates[name], {**variables, "add_generation_prompt": chat.add_generation_prompt}
        )
        text = cut_at(text, end) if chat.continue_final_message else text
        if n_ctx is not None:
            self.tokenizer.check_size("messages", text, n_ctx)
        return text, mark

    def _variables(self, messages: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
        """All that a template sees, but for `add_generation_prompt`."""
        fixed = {"tools": None, "documents": None, **self.tokenizer.special_tokens}
        return {**fixed, **keywords, "messages": messages}

    def _message(self, message: Mapping[str, Any], index: int) -> dict[str, Any]:
        """A message in the form the template takes."""
        where = f"messages[{index}]"
        role = message.get("role")
        if role not in ROLES:
            raise InvalidRequest(f"{where}.role", f"must be one of {', '.join(ROLES)}")
        made = dict(message)
        if role == "developer" and "developer" not in self.source:
            made["role"] = "system"
        if made.get("content") is not None:
            made["content"] = self._content(made["content"], f"{where}.content")
        elif "content" in made:
            made["content"] = self._call_turns.nothing if made.get("tool_calls") else ""
        if made.get("tool_calls"):
            made["tool_calls"] = [parse_arguments(one) for one in made["tool_calls"]]
        thoughts = next((made[name] for name in REASONING if made.get(name) is not None), None)
        return made if thoughts is None else self._call_turns.with_thoughts(made, thoughts)

    def _content(self, content: Any, where: str) -> Any:
        """A content as text or as parts, whichever the template takes."""
        if isinstance(content, str):
            return content if self._takes_text else [{"type": "text", "text": content}]
        if not isinstance(content, list | tuple):
            raise InvalidRequest(where, "must be a string or a list of parts")
        parts = [read_part(part, f"{where}[{i}]") for i, part in enumerate(content)]
        if self._takes_parts:
            return parts
        if IMAGE in parts:
            raise Unsupported(where, "the model's chat template has no place for images")
        return "\n".join(part["text"] for part in parts)


def read_part(part: Any, where: str) -> dict[str, str]:
    """A content part as templates know it. Raises `Unsupported` for a part that is neither text nor an image."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "image":
        return IMAGE
    if kind != "text":
        raise Unsupported(where, f"only parts of text and images are supported, not {kind}")
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{where}.text", "must be a string")
    return {"type": "text", "text": part["text"]}


def parse_arguments(call: Any) -> Any:
    """A tool call with its arguments as an object: clients send JSON text, templates index into it."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call  # it was cut short; a template that must look into it refuses it itself
    return {**call, "function": {**function, "arguments": arguments}}


def tag_last(messages: Sequence[Any], end: str) -> None:
    """Put the end character and a space behind the last message's text, in place."""
    content = messages[-1].get("content") if messages else None
    if isinstance(content, str):
        messages[-1]["content"] = f"{content}{end} "
    elif isinstance(content, list) and content and "text" in content[-1]:
        content[-1] = {**content[-1], "text": f"{content[-1]['text']}{end} "}
    else:
        raise InvalidRequest("continue_final_message", "the last message has no text to continue")


def cut_at(text: str, end: str) -> str:
    """The text up to the end character; without trailing space if the template trims its messages."""
    start = text.rfind(end)
    if start < 0:
        raise InvalidRequest("continue_final_message", "the chat template drops the end of the last message")
    return text[:start] if text[start + 1 : start + 2] == " " else text[:start].rstrip()


def load_chat_template(source: TokenizerSource | Path | str, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The chat templates of a checkpoint folder or another source, or None without any.

    Raises `LoadError` for a broken template.
    """
    source = source if isinstance(source, TokenizerSource) else folder_source(source)
    templates = source.read_templates()
    return ChatTemplate(templates, tokenizer, source.where) if templates else None
