"""Engine events to reply bodies and chunks. Knows the order of things; `stream.py` and `routes.py` send them.

Extension fields stand on the root of a chunk, never in `delta`: clients sum and concatenate what is in there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import orjson

from engine.api import Delta, Done, ModelInfo
from engine.errors import EngineFault
from server import tally
from server.logs import pairs
from server.openai import figures
from server.openai.convert import Job

log = logging.getLogger(__name__)
DONE = b"data: [DONE]\n\n"


def event(content: dict[str, Any]) -> bytes:
    """One server-sent event. It has no id: after one, a keep-alive comment breaks OpenAI's client."""
    return b"data: " + orjson.dumps(content) + b"\n\n"


class Reply:
    """One job's answer while it is being made."""

    def __init__(self, job: Job, info: ModelInfo, n_prompt: list[int]) -> None:
        self.job = job
        self._n_prompt = sum(n_prompt[:: job.n])
        self._n_completion = 0
        self._texts: list[list[str]] = [[] for _ in job.requests]
        self._details: list[list[Delta]] = [[] for _ in job.requests]
        self._ends: dict[int, Done] = {}
        self._head = {
            "id": job.id,
            "created": int(time.time()),
            "model": info.name,
            "system_fingerprint": info.fingerprint,
        }

    @property
    def complete(self) -> bool:
        return len(self._ends) == len(self.job.requests)

    def opening(self) -> Iterator[bytes]:
        """The role chunks: one per choice, in order, before any text."""
        choices = (self.job.form.opening(index) for index in range(len(self.job.requests)))
        return (self._chunk([choice]) for choice in choices if choice)

    def delta(self, index: int, delta: Delta) -> bytes:
        self._n_completion += len(delta.token_ids)
        more = {"spec": _detail(delta)} if self.job.detail else {}
        return self._chunk([self.job.form.piece(index, delta.text)], **more)

    def end(self, index: int, done: Done) -> Iterator[bytes]:
        """The choice's last chunk, after the last choice with the figures of them all."""
        self._ends[index] = done
        choice = self.job.form.ending(index, done)
        if not self.complete:
            yield self._chunk([choice])
            return
        self._log()
        extras = self._extras()
        if self.job.include_usage:
            yield self._chunk([choice])
            yield self._chunk([], **{**extras, "usage": self._usage()})
        else:
            yield self._chunk([choice], **extras)

    def keep(self, index: int, happened: Delta | Done) -> None:
        """Collect for a reply in one piece."""
        if isinstance(happened, Done):
            self._ends[index] = happened
            return
        self._texts[index].append(happened.text)
        if self.job.detail:
            self._details[index].append(happened)

    def whole(self) -> bytes:
        self.check()
        self._log()
        form = self.job.form
        choices = [
            form.whole(index, "".join(texts), self._ends[index]) for index, texts in enumerate(self._texts)
        ]
        body = {**self._head, "object": form.whole_object, "choices": choices, "usage": self._usage()}
        if self.job.detail:
            body["spec"] = [[_detail(delta) for delta in deltas] for deltas in self._details]
        return orjson.dumps({**body, **self._extras()})

    def check(self) -> None:
        """Raises unless every choice ended; a stream that just stops must not pass for a success."""
        if not self.complete:
            raise EngineFault("an event stream ended without Done or Failed")

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        body = {**self._head, "object": self.job.form.chunk_object, "choices": choices}
        if self.job.continuous_usage:
            body["usage"] = figures.usage_of(self._n_prompt, self._n_completion, 0)
        elif self.job.include_usage:
            body["usage"] = None
        return event({**body, **more})

    def _ordered(self) -> list[Done]:
        return [self._ends[index] for index in range(len(self.job.requests))]

    def _usage(self) -> dict[str, Any]:
        return figures.usage(self._ordered(), self.job.n, predicted=self.job.predicted)

    def _extras(self) -> dict[str, Any]:
        ends = self._ordered()
        # Text of drafts accepted at random must not be taken for a model's.
        synthetic = {"synthetic": True} if any(end.speculation.synthetic for end in ends) else {}
        return {
            **synthetic,
            "timings": figures.timings(ends, self.job.n),
            "metrics": figures.metrics(ends),
            "speculative": figures.resolved(ends[0].speculation),
            "seed": ends[0].seed,
        }

    def _log(self) -> None:
        ends = self._ordered()
        usage, metrics = self._usage(), figures.metrics(ends)
        speculation = metrics.get("speculative_decoding", {})
        log.info(
            "%s",
            pairs(
                event="completion",
                request_id=self.job.request_id,
                id=self.job.id,
                n_prompt=usage["prompt_tokens"],
                n_cached=usage["prompt_tokens_details"]["cached_tokens"],
                n_completion=usage["completion_tokens"],
                ttft_ms=metrics["time_to_first_token_ms"],
                itl_ms=metrics["mean_itl_ms"],
                acceptance_length=speculation.get("mean_acceptance_length"),
                acceptance_rate=speculation.get("draft_acceptance_rate"),
                drafters=tally.in_short(figures.drafters(ends)),
                reason=",".join(end.reason for end in ends[:8]),
            ),
        )


def _detail(delta: Delta) -> dict[str, Any]:
    """Which drafter guessed each token; `pieces` is each token's share of the text, where known."""
    told: dict[str, Any] = {"sources": delta.sources, "token_ids": delta.token_ids}
    if delta.pieces:
        told["pieces"] = delta.pieces
    return told
