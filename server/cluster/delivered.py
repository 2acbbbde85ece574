"""What the client of a request has been given, over all runs of it: from this the next run goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from slipstream.engine.api import Delta, Done, Echo, Event, Progress, Request, Timings


class Delivered:
    """The events of a request so far, as far as they matter. Times are those of the caller's clock, in seconds."""

    def __init__(self, asked_s: float) -> None:
        """asked_s: when the request came."""
        self.token_ids: list[int] = []
        self._asked_s = asked_s
        self._run_s: float | None = None  # when the latest run began, if it is not the first
        self._first_s: float | None = None  # when the first token came, and the last
        self._last_s = asked_s
        self._is_echoed = False
        self._n_processed = -1  # prompt tokens that were reported to be there
        self._n_steps = 0

    def going_on(self, request: Request, prompt_ids: Sequence[int], now_s: float) -> Request:
        """The request for the run that goes on; prompt_ids: the prompt's as the first run had it, if it got so far.

        A template may write the date, so a prompt is not rendered twice. A slot was one of the first run's replica.
        """
        self._run_s = now_s
        prompt = tuple(prompt_ids) if prompt_ids else request.prompt
        return replace(request, prompt=prompt, slot=None, emitted=tuple(self.token_ids))

    def new(self, event: Event, now_s: float) -> Event | None:
        """The event as the client gets it; None: it has had that from an earlier run."""
        if isinstance(event, Echo):
            is_new, self._is_echoed = not self._is_echoed, True
            return event if is_new else None
        if isinstance(event, Progress):
            is_new = event.n_processed > self._n_processed
            self._n_processed = max(event.n_processed, self._n_processed)
            return event if is_new else None
        if isinstance(event, Delta):
            return self._added(event, now_s)
        return self._timed(event) if isinstance(event, Done) else event

    def _added(self, delta: Delta, now_s: float) -> Delta:
        if delta.token_ids:
            self._first_s = now_s if self._first_s is None else self._first_s
            self._last_s = now_s
        self.token_ids += delta.token_ids
        steps = tuple(replace(one, index=self._n_steps + i) for i, one in enumerate(delta.steps))
        self._n_steps += len(steps)
        return replace(delta, steps=steps) if steps else delta

    def _timed(self, done: Done) -> Done:
        """With the times of all runs. What lost runs spent on what is not known: they have reported nothing.

        If the first token came from the last run, what went before that run counts as queueing. If it came from a lost
        run, all before that token counts as the prompt's, and all pauses as generation; the seconds of drafting and
        verifying are the last run's.
        """
        times = done.timings
        if self._run_s is None:
            return done
        if self._first_s is None or self._first_s >= self._run_s:
            queue_s = times.queue_s + self._run_s - self._asked_s
            return replace(done, timings=replace(times, queue_s=queue_s))
        prompt_s, generation_s = self._first_s - self._asked_s, self._last_s - self._first_s
        return replace(done, timings=Timings(0.0, prompt_s, generation_s, times.draft_s, times.verify_s))
