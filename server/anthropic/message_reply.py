"""The reply to `/v1/messages`: a message, whole or as the events that build it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import orjson

from slipstream.engine.api import Delta, Done, Echo, EventStream, ModelInfo
from slipstream.server.anthropic.error_shape import error_of
from slipstream.server.anthropic.written_blocks import Event, WrittenBlocks
from slipstream.server.http.error_table import Refused
from slipstream.server.http.sse import named_event
from slipstream.server.openai import figures
from slipstream.server.openai.job import Happened, Job, delta_of

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageReply:
    """A `Reply` of one choice."""

    closing = b""

    def __init__(
        self, job: Job, info: ModelInfo, streams: Sequence[EventStream], *, hides_thinking: bool
    ) -> None:
        (stream,) = streams
        self._request_id = job.request_id
        self._text = job.wanted.text(stream.prompt_tail)
        self._written = WrittenBlocks(hides_thinking=hides_thinking)
        self._n_prompt = len(stream.prompt_ids)
        self._head = {"id": job.id, "type": "message", "role": "assistant", "model": info.name}

    def is_ended(self, index: int) -> bool:
        return self._text.is_ended

    def opening(self) -> Iterator[bytes]:
        """How much of the prompt was cached is not known yet: until the last event all of it counts as read."""
        usage = usage_of(self._n_prompt, 0, 0)
        ends = {"stop_reason": None, "stop_sequence": None}
        yield named_event(
            {"type": "message_start", "message": {**self._head, "content": [], **ends, "usage": usage}}
        )

    def piece(self, index: int, happened: Happened) -> Iterable[bytes]:
        return [named_event(one) for one in self._add(happened)]

    def keep(self, index: int, happened: Echo | Delta) -> None:
        self._add(happened)

    def end(self, index: int, ends: Mapping[int, Done]) -> Iterator[bytes]:
        for one in self._finish():
            yield named_event(one)
        done = ends[index]
        yield named_event(
            {
                "type": "message_delta",
                "delta": self._reason(done),
                "usage": self._usage(done),
                **figures.extras([done], 1),
            }
        )
        yield named_event({"type": "message_stop"})

    def whole(self, ends: Sequence[Done]) -> bytes:
        (done,) = ends
        self._finish()
        body = {
            **self._head,
            "content": self._written.blocks,
            **self._reason(done),
            "usage": self._usage(done),
        }
        return orjson.dumps({**body, **figures.extras(ends, 1)})

    def failed(self, problem: Refused) -> bytes:
        return named_event(error_of(problem.status, problem.content()["error"], self._request_id))

    def _add(self, happened: Happened) -> list[Event]:
        return self._written.add(self._text.feed(delta_of(happened)))

    def _finish(self) -> list[Event]:
        return [*self._written.add(self._text.finish()), *self._written.close()]

    def _reason(self, done: Done) -> dict[str, Any]:
        """Why the message ended. Call it after `_finish`."""
        reason = self._text.reason(done)
        if reason == "stop" and done.stop_string is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": done.stop_string}
        return {"stop_reason": REASONS[reason], "stop_sequence": None}

    def _usage(self, done: Done) -> dict[str, Any]:
        told = usage_of(done.usage.n_prompt, done.usage.n_cached, done.usage.n_completion)
        if self._text.n_reasoning is not None:
            told["output_tokens_details"] = {"thinking_tokens": self._text.n_reasoning}
        return told


def usage_of(n_prompt: int, n_cached: int, n_completion: int) -> dict[str, Any]:
    """Token counts; tokens of the prompt that were cached are not among `input_tokens`."""
    return {
        "input_tokens": n_prompt - n_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": n_cached,
        "output_tokens": n_completion,
    }
