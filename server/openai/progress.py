"""How far a choice is, for clients that watch: llama-server's `return_progress` and `timings_per_token`."""

from __future__ import annotations

import time
from typing import Any

from slipstream.engine.api import Delta, Progress
from slipstream.server.openai import figures
from slipstream.server.report.tally import ms

# Fields of requests.
FIELDS = ("return_progress", "timings_per_token")


def prompt_progress(far: Progress) -> dict[str, Any]:
    """`prompt_progress` of a chunk."""
    return {
        "total": far.n_prompt,
        "cache": far.n_cached,
        "processed": far.n_processed,
        "time_ms": ms(far.seconds),
    }


class TimingsSoFar:
    """`timings` of each chunk of a choice. Drafts are counted in the last chunk only, by the engine."""

    def __init__(self) -> None:
        self._prompt: dict[str, Any] = {}
        self._n_tokens = 0
        self._since_s = 0.0  # when the first token came

    def prompt(self, far: Progress) -> dict[str, Any]:
        """The timings now that the prompt is so far."""
        self._prompt = figures.prompt_timings(far.n_cached, far.n_processed - far.n_cached, far.seconds)
        return self._prompt | figures.reply_timings(0, 0, 0.0)

    def after(self, delta: Delta) -> dict[str, Any]:
        """The timings with what a step has added."""
        now = time.perf_counter()
        self._since_s = self._since_s or now
        self._n_tokens += len(delta.token_ids)
        n_later = max(0, self._n_tokens - 1)
        return self._prompt | figures.reply_timings(self._n_tokens, n_later, now - self._since_s)
