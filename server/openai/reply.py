"""Replies with `choices`, as OpenAI's chat and plain completions have them: chunks of a stream, or a whole body.

Fields beyond OpenAI's stand on the root of a chunk, never in `delta`, whose values clients sum and concatenate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import orjson

from slipstream.engine.api import Delta, Done, Echo, EventStream, ModelInfo, Progress
from slipstream.engine.drafting import Step
from slipstream.server.http.error_table import Refused
from slipstream.server.http.sse import event
from slipstream.server.openai import figures
from slipstream.server.openai.job import Happened, Job, Wanted
from slipstream.server.openai.progress import TimingsSoFar


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

    def nothing(self) -> dict[str, Any]:
        """The entry in a chunk that says something else."""

    def piece(self, happened: Echo | Delta) -> dict[str, Any]:
        """The entry in the chunk of a step."""

    def ending(self, done: Done) -> list[dict[str, Any]]:
        """The entries in the choice's last chunks: text that was held back, if any, and the end."""

    def keep(self, happened: Echo | Delta) -> None: ...

    def whole(self, done: Done) -> dict[str, Any]: ...

    def root(self) -> dict[str, Any]:
        """Fields that this choice, if it is the first, adds to the root of the body, or of the first chunk."""


class ChoicesReply:
    """A reply of one of the two endpoints: a `Reply`."""

    closing = b"data: [DONE]\n\n"

    def __init__(
        self,
        job: Job,
        info: ModelInfo,
        streams: Sequence[EventStream],
        *,
        objects: tuple[str, str],
        choice: Callable[[int, Wanted, EventStream], Choice],
    ) -> None:
        """objects: what `object` says in a whole reply and in a chunk. choice: makes the endpoint's choices."""
        self.job = job
        self._whole_object, self._chunk_object = objects
        self._choices = [choice(index, job.wanted, stream) for index, stream in enumerate(streams)]
        self._n_prompt = sum(len(stream.prompt_ids) for stream in streams[:: job.n])
        self._n_completion = 0
        self._details: list[list[Delta]] = [[] for _ in job.requests]
        self._timings = [TimingsSoFar(job) for _ in job.requests]
        self._head = {
            "id": job.id,
            "created": int(time.time()),
            "model": info.name,
            "system_fingerprint": info.fingerprint,
            **({"service_tier": "default"} if job.service_tier else {}),
        }
        self._root = self._choices[0].root()  # emptied once it was sent
        self._openings = [opening for one in self._choices if (opening := one.opening())]  # likewise

    def is_ended(self, index: int) -> bool:
        """Whether no further text of the choice would be sent."""
        return self._choices[index].is_ended

    def opening(self) -> Iterable[bytes]:
        """Nothing yet: clients that time the first token take the first chunk for it, so roles wait for an event."""
        return ()

    def piece(self, index: int, happened: Happened) -> Iterable[bytes]:
        """The chunk of a step, even if none of the step's text can be sent yet."""
        choice, timings, more = self._choices[index], self._timings[index], {}
        if isinstance(happened, Progress):
            told = timings.prompt(happened)
            return () if told is None else (*self._roles(), self._chunk([choice.nothing()], **told))
        roles = self._roles()
        if isinstance(happened, Delta):
            self._n_completion += len(happened.token_ids)
            if self.job.detail:
                more["spec"] = _detail(happened)
            more |= timings.after(happened)
        return (*roles, self._chunk([choice.piece(happened)], **more))

    def end(self, index: int, ends: Mapping[int, Done]) -> Iterator[bytes]:
        """The choice's last chunks; those of the last choice carry the figures of all choices."""
        yield from self._roles()
        *held, choice = self._choices[index].ending(ends[index])
        for one in held:
            yield self._chunk([one])
        if len(ends) < len(self.job.requests):
            yield self._chunk([choice])
            return
        ordered = [ends[one] for one in range(len(ends))]
        if self.job.include_usage:
            yield self._chunk([choice])
            yield self._chunk([], **{**figures.extras(ordered, self.job.n), "usage": self._usage(ordered)})
        else:
            yield self._chunk([choice], **figures.extras(ordered, self.job.n))

    def failed(self, problem: Refused) -> bytes:
        return event(problem.content())

    def keep(self, index: int, happened: Echo | Delta) -> None:
        self._choices[index].keep(happened)
        if self.job.detail and isinstance(happened, Delta):
            self._details[index].append(happened)

    def whole(self, ends: Sequence[Done]) -> bytes:
        choices = [choice.whole(end) for choice, end in zip(self._choices, ends, strict=True)]
        usage = self._usage(ends)
        body = {**self._head, "object": self._whole_object, "choices": choices, "usage": usage}
        if self.job.detail:
            body["spec"] = [[_detail(delta) for delta in deltas] for deltas in self._details]
        return orjson.dumps({**body, **self._choices[0].root(), **figures.extras(ends, self.job.n)})

    def _roles(self) -> list[bytes]:
        """The role chunks, before all others: one per choice, in order."""
        openings, self._openings = self._openings, []
        return [self._chunk([opening]) for opening in openings]

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        body = {**self._head, "object": self._chunk_object, "choices": choices}
        if self.job.continuous_usage:
            body["usage"] = figures.usage_of(self._n_prompt, self._n_completion, 0)
        elif self.job.include_usage:
            body["usage"] = None
        root, self._root = self._root, {}
        return event({**body, **root, **more})

    def _usage(self, ends: Sequence[Done]) -> dict[str, Any]:
        looked = [one.n_reasoning for one in self._choices if one.n_reasoning is not None]
        n_reasoning = sum(looked) if looked else None
        return figures.usage(ends, self.job.n, predicted=self.job.predicted, n_reasoning=n_reasoning)


def _detail(delta: Delta) -> dict[str, Any]:
    """Which drafter guessed each token; `pieces` is each token's share of the text, where known."""
    told: dict[str, Any] = {"sources": delta.sources, "token_ids": delta.token_ids}
    if delta.pieces:
        told["pieces"] = delta.pieces
    return told | {"steps": [_step(one) for one in delta.steps]}


def _step(step: Step) -> dict[str, Any]:
    return {
        "index": step.index,
        "drafter": step.drafter,
        "drafted": step.token_ids,
        "drafted_pieces": step.pieces,
        "n_accepted": step.n_accepted,
        "why_not": step.why_not,
    }
