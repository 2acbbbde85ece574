"""The output of a response while it is generated: items made of a reply's pieces, and an event for each change.

The order of events is that of OpenAI's API: an item is added, a part of it is added, its text grows, and both are done
before the next item is added.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from slipstream.server.openai.formats.format import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Piece,
    Reasoning,
)
from slipstream.server.openai.message import call_id
from slipstream.server.responses.offered import Callee, text_of

Event = dict[str, Any]
Called = Callable[[str], Callee]  # what a client knows a function by, by the model's name of it
Status = Literal["completed", "incomplete"]
SEALED = "slipstream.1."  # what `sealed` text begins with


@dataclass(frozen=True, slots=True)
class TextForm:
    """How text of a kind is shown: the item's type, the prefix of its id and its other fields; which field of it has
    the part; and the names of the part's type, of its events and of its index.
    """

    item_type: str
    prefix: str
    fields: Mapping[str, Any]
    place: str
    part_type: str
    text_event: str
    part_event: str
    index: str


MESSAGE = TextForm(
    *("message", "msg_", {"role": "assistant"}, "content"),
    *("output_text", "response.output_text", "response.content_part", "content_index"),
)
THINKING = TextForm(
    *("reasoning", "rs_", {"summary": []}, "content"),
    *("reasoning_text", "response.reasoning_text", "response.content_part", "content_index"),
)
# Where a client asks for summaries, these are all that it reads.
SUMMARY = TextForm(
    *("reasoning", "rs_", {"content": []}, "summary"),
    *("summary_text", "response.reasoning_summary_text", "response.reasoning_summary_part", "summary_index"),
)


def sealed(text: str) -> str:
    """Thinking as `encrypted_content`, by which clients that keep conversations themselves give it back.

    It is no secret here, and only put into a form that nobody takes for text.
    """
    return SEALED + base64.urlsafe_b64encode(text.encode()).decode()


def unsealed(value: str) -> str | None:
    """The text that `sealed` made the value of; None for a value of another server."""
    if not value.startswith(SEALED):
        return None
    try:
        return base64.b64decode(value.removeprefix(SEALED), b"-_", validate=True).decode()
    except ValueError:
        return None


class Output:
    """`items` is what is there so far; an item that is still written has no text yet."""

    def __init__(self, key: str, called: Called, *, summarises: bool = False, seals: bool = False) -> None:
        """`key`: what ids of items begin with, behind a prefix for their type. `summarises`: thinking is shown as its
        own summary. `seals`: it is given as `encrypted_content` too.
        """
        self._called = called
        self.items: list[dict[str, Any]] = []
        self._key = key
        self._forms = {Content: MESSAGE, Reasoning: SUMMARY if summarises else THINKING}
        self._seals = seals
        self._open: type[Piece] | None = None  # what the last item is made of, if it is still written
        self._texts: list[str] = []  # of the open item
        self._logprobs: list[dict[str, Any]] = []

    def add(self, pieces: Iterable[tuple[Piece, Sequence[dict[str, Any]]]]) -> list[Event]:
        """The events that pieces make, each with the log-probabilities of the tokens that wrote it."""
        events: list[Event] = []
        for piece, logprobs in pieces:
            if isinstance(piece, Content | Reasoning):
                if piece.text or logprobs:
                    events += self._write(piece, logprobs)
            elif isinstance(piece, CallStart):
                events += [*self.close(), *self._begin_call(piece.name)]
            elif isinstance(piece, CallArguments):
                self._texts.append(piece.text)
                if "arguments" in self.items[-1]:
                    events.append(self._event("response.function_call_arguments.delta", delta=piece.text))
            elif isinstance(piece, CallEnd):
                events += self.close()
        return events

    def close(self, status: Status = "completed") -> list[Event]:
        """The events that end the open item, if there is one."""
        if self._open is None:
            return []
        kind, self._open = self._open, None
        item, text = self.items[-1], "".join(self._texts)
        item["status"] = status
        if kind is CallStart:
            ends = self._end_call(item, text)
        else:
            form = self._forms[kind]
            ends = self._end_part(form, item[form.place][0], text)
            if self._seals and kind is Reasoning:
                item["encrypted_content"] = sealed(text)
        return [*ends, self._about_item("response.output_item.done")]

    def empty(self) -> list[Event]:
        """The events of a message without text: clients expect a message where there is nothing else."""
        return self._begin_text(Content)

    def _write(self, piece: Content | Reasoning, logprobs: Sequence[dict[str, Any]]) -> list[Event]:
        kind = type(piece)
        begun = [] if self._open is kind else [*self.close(), *self._begin_text(kind)]
        self._texts.append(piece.text)
        self._logprobs += logprobs
        more = {"logprobs": list(logprobs)} if kind is Content else {}
        form = self._forms[kind]
        return [*begun, self._event(f"{form.text_event}.delta", **{form.index: 0}, delta=piece.text, **more)]

    def _begin_text(self, kind: type[Content | Reasoning]) -> list[Event]:
        form = self._forms[kind]
        head = {"id": self._id(form.prefix), "type": form.item_type}
        added = self._begin(kind, {**head, **form.fields, form.place: []})
        notes: dict[str, Any] = {"annotations": [], "logprobs": []} if kind is Content else {}
        part = {"type": form.part_type, "text": "", **notes}
        self.items[-1][form.place] = [part]
        return [added, self._event(f"{form.part_event}.added", **{form.index: 0}, part=dict(part))]

    def _begin_call(self, name: str) -> list[Event]:
        callee = self._called(name)
        prefix, kind = ("ctc_", "custom_tool_call") if callee.is_custom else ("fc_", "function_call")
        fields = {
            "call_id": f"call_{call_id()}",
            **callee.fields,
            "input" if callee.is_custom else "arguments": "",
        }
        return [self._begin(CallStart, {"id": self._id(prefix), "type": kind, **fields})]

    def _end_call(self, item: dict[str, Any], arguments: str) -> list[Event]:
        """The text of a custom tool comes in one piece: what the model writes of it is JSON."""
        if "arguments" in item:
            item["arguments"] = arguments
            return [
                self._event("response.function_call_arguments.done", name=item["name"], arguments=arguments)
            ]
        item["input"] = text = text_of(arguments)
        name = "response.custom_tool_call_input"
        return [self._event(f"{name}.delta", delta=text), self._event(f"{name}.done", input=text)]

    def _begin(self, kind: type[Piece], item: dict[str, Any]) -> Event:
        self._open, self._texts, self._logprobs = kind, [], []
        self.items.append({**item, "status": "in_progress"})
        return self._about_item("response.output_item.added")

    def _end_part(self, form: TextForm, part: dict[str, Any], text: str) -> list[Event]:
        part["text"] = text
        more = {}
        if "logprobs" in part:
            more["logprobs"] = part["logprobs"] = self._logprobs
        return [
            self._event(f"{form.text_event}.done", **{form.index: 0}, text=text, **more),
            self._event(f"{form.part_event}.done", **{form.index: 0}, part=dict(part)),
        ]

    def _id(self, prefix: str) -> str:
        return f"{prefix}{self._key}{len(self.items):04x}"

    def _event(self, event_type: str, /, **fields: Any) -> Event:
        """An event about the last item."""
        return {
            "type": event_type,
            "item_id": self.items[-1]["id"],
            "output_index": len(self.items) - 1,
            **fields,
        }

    def _about_item(self, name: str) -> Event:
        return {"type": name, "output_index": len(self.items) - 1, "item": dict(self.items[-1])}
