"""The reply to `/v1/responses`: a response object, whole or as the events that build it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import orjson

from slipstream.engine.api import Delta, Done, Echo, EventStream, ModelInfo, Progress
from slipstream.server.http.error_table import Refused
from slipstream.server.http.sse import named_event
from slipstream.server.openai import figures
from slipstream.server.openai import wire_logprobs as logprobs
from slipstream.server.openai.job import Happened, Job, delta_of
from slipstream.server.openai.progress import TimingsSoFar
from slipstream.server.openai.tools import ToolChoice
from slipstream.server.responses.input_items import AnyItem, shown
from slipstream.server.responses.judged_text import Judged, JudgedText
from slipstream.server.responses.offered import Offered
from slipstream.server.responses.output import Event, Output
from slipstream.server.responses.wire import SEALED_THINKING, ResponsesRequest

PREFIX = "resp_"
# An event may have only these codes; the error's own code is in the log and the metrics.
ERROR_CODES = {429: "rate_limit_exceeded", 400: "invalid_prompt"}

# Called with a response that has ended, and with its input.
Keep = Callable[[dict[str, Any], Sequence[dict[str, Any]]], None]


class ResponseReply:
    """A `Reply` of one choice. `response` is the object as far as it is known."""

    closing = b""

    def __init__(
        self,
        job: Job,
        info: ModelInfo,
        streams: Sequence[EventStream],
        *,
        wire: ResponsesRequest,
        items: Sequence[AnyItem],
        keep: Keep | None,
    ) -> None:
        """items: the request's own input, references replaced by what they stand for. keep: None: it is not kept."""
        (stream,) = streams
        self._job = job
        self._items = items
        self._keep = keep
        self._text = job.wanted.text(stream.prompt_tail)
        self._judged = JudgedText(self._text)
        asked = wire.reasoning
        self._output = Output(
            job.id.removeprefix(PREFIX),
            wire.offered.called,
            summarises=bool(asked and asked.summarises),
            seals=SEALED_THINKING in (wire.include or ()),
        )
        self._n_events = 0
        self._timings = TimingsSoFar(job)
        self.response = {**begun(wire, job.id, info), "store": keep is not None}

    @property
    def input(self) -> list[dict[str, Any]]:
        """The request's items as they are listed; those without an id get one that says whose they are."""
        key = self._job.id.removeprefix(PREFIX)
        return [shown(one, f"in_{key}{index:04x}") for index, one in enumerate(self._items)]

    def is_ended(self, index: int) -> bool:
        return self._text.is_ended

    def opening(self) -> Iterator[bytes]:
        for name in ("response.created", "response.in_progress"):
            yield self._sent({"type": name, "response": self.response})

    def piece(self, index: int, happened: Happened) -> Iterable[bytes]:
        if isinstance(happened, Progress):
            told = self._timings.prompt(happened)
            so_far = {"type": "response.in_progress", "response": self.response}
            return () if told is None else (self._sent(so_far | told),)
        events = self._add(happened)
        timed = self._timings.after(delta_of(happened))
        return [self._sent(one | timed if "delta" in one else one) for one in events]

    def keep(self, index: int, happened: Echo | Delta) -> None:
        self._add(happened)

    def end(self, index: int, ends: Mapping[int, Done]) -> Iterator[bytes]:
        for one in self._finish([ends[index]]):
            yield self._sent(one)
        timed = {"timings": self.response["timings"]} if self._job.timings else {}
        yield self._sent({"type": f"response.{self.response['status']}", "response": self.response, **timed})

    def whole(self, ends: Sequence[Done]) -> bytes:
        self._finish(ends)
        return orjson.dumps(self.response)

    def failed(self, problem: Refused) -> bytes:
        self.fail(problem)
        return self._sent({"type": "response.failed", "response": self.response})

    def fail(self, problem: Refused) -> None:
        """End the response with an error."""
        code = ERROR_CODES.get(problem.status, "server_error")
        self._output.close("incomplete")
        self._end(status="failed", error={"code": code, "message": problem.message})

    def cancel(self) -> None:
        """End the response as its client asked for."""
        self._output.close("incomplete")
        self._end(status="cancelled")

    def _add(self, happened: Happened) -> list[Event]:
        return self._written(self._judged.read(delta_of(happened)))

    def _written(self, pieces: Iterable[Judged]) -> list[Event]:
        tables = ((piece, logprobs.of_chat(tokens)) for piece, tokens in pieces)
        return self._output.add((piece, table["content"] if table else ()) for piece, table in tables)

    def _finish(self, ends: Sequence[Done]) -> list[Event]:
        """The last events of the output; the response is complete then."""
        (end,) = ends
        events = self._written(self._judged.finish())
        if not self._output.items:
            events += self._output.empty()
        is_cut = end.reason == "length"
        events += self._output.close("incomplete" if is_cut else "completed")
        details = {"reason": "max_output_tokens"} if is_cut else None
        self._end(
            status="incomplete" if is_cut else "completed",
            incomplete_details=details,
            usage=usage(figures.usage(ends, 1, predicted=False, n_reasoning=self._text.n_reasoning)),
            **figures.extras(ends, 1),
        )
        return events

    def _end(self, **fields: Any) -> None:
        completed_at = int(time.time()) if fields["status"] == "completed" else None
        self.response = {
            **self.response,
            "output": self._output.items,
            "completed_at": completed_at,
            **fields,
        }
        if self._keep is not None:
            self._keep(self.response, self.input)

    def _sent(self, one: Event) -> bytes:
        numbered = {**one, "sequence_number": self._n_events}
        self._n_events += 1
        return named_event(numbered)


def usage(counts: Mapping[str, Any]) -> dict[str, Any]:
    """A chat's `usage` under the names that it has in a response."""
    thinking = counts.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {**counts["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": thinking},
        "total_tokens": counts["total_tokens"],
    }


def begun(wire: ResponsesRequest, response_id: str, info: ModelInfo) -> dict[str, Any]:
    """The response object before anything is generated."""
    reasoning, text, defaults = wire.reasoning, wire.text, info.sampling_defaults
    given = text and text.format and text.format.shown
    verbosity = {"verbosity": text.verbosity} if text and text.verbosity else {}
    summary = reasoning.summarises if reasoning else None
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": bool(wire.background),
        "error": None,
        "incomplete_details": None,
        "instructions": wire.instructions,
        "max_output_tokens": wire.max_output_tokens,
        "max_tool_calls": wire.max_tool_calls,
        "metadata": wire.metadata or {},
        "model": info.name,
        "output": [],
        "parallel_tool_calls": wire.parallel_tool_calls is not False,
        "previous_response_id": wire.previous_response_id,
        "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": summary},
        "service_tier": "default",
        "temperature": _number(wire.temperature, defaults.get("temperature")),
        "text": {"format": given or {"type": "text"}, **verbosity},
        "tool_choice": choice(wire.tool_choice, wire.offered),
        "tools": wire.offered.shown,
        "top_logprobs": wire.top_logprobs or 0,
        "top_p": _number(wire.top_p, defaults.get("top_p")),
        "truncation": wire.truncation or "disabled",
        "usage": None,
    }


def _number(given: float | None, default: float | None) -> float:
    return next((float(one) for one in (given, default) if one is not None), 1.0)


def choice(asked: ToolChoice | None, offered: Offered) -> Any:
    """A `tool_choice` as the response shows it."""
    if asked is None:
        return "auto"
    if asked.names is None:
        return asked.mode
    callees = [offered.called(name) for name in asked.names]
    named = [{"type": "custom" if one.is_custom else "function", **one.fields} for one in callees]
    if asked.mode == "required" and len(named) == 1:
        return named[0]
    return {"type": "allowed_tools", "mode": asked.mode, "tools": named}
