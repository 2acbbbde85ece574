"""How far a choice is, for clients that watch: llama-server's `return_progress` and `timings_per_token`."""

from __future__ import annotations

import time
from typing import Any

from slipstream.engine.api import Delta, Progress
from slipstream.server.openai import figures
from slipstream.server.openai.job import Job
from slipstream.server.report.tally import ms

# Fields of requests.
FIELDS = ("return_progress", "timings_per_token")


class TimingsSoFar:
    """What each chunk of a choice says of times. Drafts are counted in the last chunk only, by the engine."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._prompt: dict[str, Any] = {}
        self._n_tokens = 0
        self._since_s = 0.0  # when the first token came

    def prompt(self, far: Progress) -> dict[str, Any] | None:
        """Fields of a chunk, now that the prompt is so far; None if the request wants no such chunks."""
        self._prompt = figures.prompt_timings(far.n_cached, far.n_processed - far.n_cached, far.seconds)
        if not self._job.progress:
            return None
        so_far = {
            "total": far.n_prompt,
            "cache": far.n_cached,
            "processed": far.n_processed,
            "time_ms": ms(far.seconds),
        }
        timed = {"timings": self._prompt | figures.reply_timings(0, 0, 0.0)} if self._job.timings else {}
        return {"prompt_progress": so_far, **timed}

    def after(self, delta: Delta) -> dict[str, Any]:
        """Fields of the chunk that a step makes; none if the request does not want them."""
        if not self._job.timings:
            return {}
        now = time.perf_counter()
        self._since_s = self._since_s or now
        self._n_tokens += len(delta.token_ids)
        n_later = max(0, self._n_tokens - 1)
        return {"timings": self._prompt | figures.reply_timings(self._n_tokens, n_later, now - self._since_s)}
