"""Turns engine events into the chunks of a stream or the body of a whole reply; `choices.py` and `routes.py` send them.

Fields beyond OpenAI's stand on the root of a chunk, never in `delta`, whose values clients sum and concatenate.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from slipstream.engine.api import Delta, Done, Echo, EventStream, ModelInfo
from slipstream.engine.errors import EngineFault
from slipstream.server.openai import figures
from slipstream.server.openai.convert import Job
from slipstream.server.report.meter import record

DONE = b"data: [DONE]\n\n"


def event(content: dict[str, Any]) -> bytes:
    """A server-sent event, without an id: after an id, a keep-alive comment breaks OpenAI's client."""
    return b"data: " + orjson.dumps(content) + b"\n\n"


class Reply:
    """A job's reply while it is generated: `opening`, `piece` and `end` for a stream, or `keep` and `whole`."""

    def __init__(self, job: Job, info: ModelInfo, streams: Sequence[EventStream]) -> None:
        self.job = job
        self._streams = streams
        self._choices = [job.form.choice(index, job.told, stream) for index, stream in enumerate(streams)]
        self._n_prompt = sum(len(stream.prompt_ids) for stream in streams[:: job.n])
        self._n_completion = 0
        self._details: list[list[Delta]] = [[] for _ in job.requests]
        self._ends: dict[int, Done] = {}
        self._head = {
            "id": job.id,
            "created": int(time.time()),
            "model": info.name,
            "system_fingerprint": info.fingerprint,
            **({"service_tier": "default"} if job.service_tier else {}),
        }
        self._root = job.form.root(job.told, streams)  # emptied once it was sent
        record().begin(info.name, job.id, len(job.requests), job.n)

    @property
    def complete(self) -> bool:
        return len(self._ends) == len(self.job.requests)

    def is_ended(self, index: int) -> bool:
        """Whether no further text of the choice would be sent."""
        return self._choices[index].is_ended

    def opening(self) -> Iterator[bytes]:
        """The role chunks: one per choice, in order, before any text."""
        openings = (choice.opening() for choice in self._choices)
        return (self._chunk([opening]) for opening in openings if opening)

    def piece(self, index: int, happened: Echo | Delta) -> bytes:
        """The chunk of a step, even if none of the step's text can be sent yet."""
        more = {}
        if isinstance(happened, Delta):
            self._n_completion += len(happened.token_ids)
            if self.job.detail:
                more = {"spec": _detail(happened)}
        return self._chunk([self._choices[index].piece(happened)], **more)

    def end(self, index: int, done: Done) -> Iterator[bytes]:
        """The choice's last chunks; those of the last choice carry the figures of all choices."""
        self._ends[index] = done
        *held, choice = self._choices[index].ending(done)
        for one in held:
            yield self._chunk([one])
        if not self.complete:
            yield self._chunk([choice])
            return
        record().ends = self._ordered()
        extras = self._extras()
        if self.job.include_usage:
            yield self._chunk([choice])
            yield self._chunk([], **{**extras, "usage": self._usage()})
        else:
            yield self._chunk([choice], **extras)

    def keep(self, index: int, happened: Echo | Delta | Done) -> None:
        """Collect an event for `whole`."""
        if isinstance(happened, Done):
            self._ends[index] = happened
            return
        self._choices[index].keep(happened)
        if self.job.detail and isinstance(happened, Delta):
            self._details[index].append(happened)

    def whole(self) -> bytes:
        self.check()
        record().ends = self._ordered()
        choices = [choice.whole(self._ends[index]) for index, choice in enumerate(self._choices)]
        form = self.job.form
        body = {**self._head, "object": form.whole_object, "choices": choices, "usage": self._usage()}
        if self.job.detail:
            body["spec"] = [[_detail(delta) for delta in deltas] for deltas in self._details]
        return orjson.dumps({**body, **self._root, **self._extras()})

    def check(self) -> None:
        """Raises `EngineFault` unless every choice has ended: a stream that just stops must not pass for a success."""
        if not self.complete:
            raise EngineFault("an event stream ended without Done or Failed")

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        body = {**self._head, "object": self.job.form.chunk_object, "choices": choices}
        if self.job.continuous_usage:
            body["usage"] = figures.usage_of(self._n_prompt, self._n_completion, 0)
        elif self.job.include_usage:
            body["usage"] = None
        root, self._root = self._root, {}
        return event({**body, **root, **more})

    def _ordered(self) -> list[Done]:
        return [self._ends[index] for index in range(len(self.job.requests))]

    def _usage(self) -> dict[str, Any]:
        looked = [one.n_reasoning for one in self._choices if one.n_reasoning is not None]
        n_reasoning = sum(looked) if looked else None
        return figures.usage(
            self._ordered(), self.job.n, predicted=self.job.predicted, n_reasoning=n_reasoning
        )

    def _extras(self) -> dict[str, Any]:
        ends = self._ordered()
        # Text in which drafts were accepted at random must not be taken for the model's.
        synthetic = {"synthetic": True} if any(end.speculation.synthetic for end in ends) else {}
        return {
            **synthetic,
            "timings": figures.timings(ends, self.job.n),
            "metrics": figures.metrics(ends),
            "speculative": figures.resolved(ends[0].speculation),
            "seed": ends[0].seed,
        }


def _detail(delta: Delta) -> dict[str, Any]:
    """Which drafter guessed each token; `pieces` is each token's share of the text, where known."""
    told: dict[str, Any] = {"sources": delta.sources, "token_ids": delta.token_ids}
    if delta.pieces:
        told["pieces"] = delta.pieces
    return told
