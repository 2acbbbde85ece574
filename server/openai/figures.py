"""Counts and times of finished choices as parts of a reply: OpenAI's `usage`, llama-server's `timings`, vLLM's
`metrics`. Every number is finite.

Counts add up over choices; times are those of the slowest choice, because choices run side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from slipstream.engine.api import Done, Speculation, Timings
from slipstream.engine.stats import DrafterCount
from slipstream.server.report import tally
from slipstream.server.report.tally import ms, ratio

PREDICTION = "prediction"  # the drafter whose tokens OpenAI's usage counts


def usage(ends: Sequence[Done], n: int, *, predicted: bool, n_reasoning: int | None = None) -> dict[str, Any]:
    """OpenAI's `usage`. `ends` holds n choices per prompt; a prompt counts once.

    `predicted`: the request has a prediction, so the tokens of it that were accepted and rejected are added; tokens of
    other drafters do not count there. `n_reasoning`: completion tokens that were thinking; None if not counted.
    """
    prompts = [end.usage for end in ends[::n]]
    told = usage_of(
        sum(one.n_prompt for one in prompts),
        sum(end.usage.n_completion for end in ends),
        sum(one.n_cached for one in prompts),
        sum(one.n_image for one in prompts),
    )
    details = {} if n_reasoning is None else {"reasoning_tokens": n_reasoning}
    if predicted:
        count = drafters(ends).get(PREDICTION, DrafterCount())
        details["accepted_prediction_tokens"] = count.n_accepted
        details["rejected_prediction_tokens"] = count.n_drafted - count.n_accepted
    if details:
        told["completion_tokens_details"] = details
    return told


def usage_of(n_prompt: int, n_completion: int, n_cached: int, n_image: int = 0) -> dict[str, Any]:
    images = {"image_tokens": n_image} if n_image else {}
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_completion,
        "total_tokens": n_prompt + n_completion,
        "prompt_tokens_details": {"cached_tokens": n_cached, **images},
    }


def timings(ends: Sequence[Done], n: int) -> dict[str, Any]:
    """llama-server's `timings`. A choice's first token comes out of the prompt pass, so rates do not count it."""
    prompts = [end.usage for end in ends[::n]]
    n_cached = sum(one.n_cached for one in prompts)
    n_prompt = sum(one.n_prompt for one in prompts) - n_cached
    n_predicted = sum(end.usage.n_completion for end in ends)
    n_later = sum(max(0, end.usage.n_completion - 1) for end in ends)
    told = {
        **prompt_timings(n_cached, n_prompt, max(end.timings.prompt_s for end in ends)),
        **reply_timings(n_predicted, n_later, max(end.timings.generation_s for end in ends)),
    }
    n_drafted = sum(end.speculation.n_drafted for end in ends)
    slowest = max((end.timings for end in ends), key=lambda one: one.generation_s)
    told["predicted_parts_ms"] = _parts(slowest)
    if n_drafted:
        told["draft_n"] = n_drafted
        told["draft_n_accepted"] = sum(end.speculation.n_accepted for end in ends)
    if counts := drafters(ends):
        told["drafters"] = tally.shown(counts)
    return told


def _parts(times: Timings) -> dict[str, float]:
    """What the engine did in the time of a reply."""
    host_s = times.generation_s - times.draft_s - times.verify_s
    return {"draft": ms(times.draft_s), "verify": ms(times.verify_s), "host": ms(host_s)}


def prompt_timings(n_cached: int, n_computed: int, seconds: float) -> dict[str, Any]:
    """The part of `timings` about prompts."""
    return {
        "cache_n": n_cached,
        "prompt_n": n_computed,
        "prompt_ms": ms(seconds),
        "prompt_per_token_ms": ms(ratio(seconds, n_computed)),
        "prompt_per_second": ratio(n_computed, seconds),
    }


def reply_timings(n_tokens: int, n_later: int, seconds: float) -> dict[str, Any]:
    """The part of `timings` about replies. n_later: tokens but the first of each."""
    return {
        "predicted_n": n_tokens,
        "predicted_ms": ms(seconds),
        "predicted_per_token_ms": ms(ratio(seconds, n_later)),
        "predicted_per_second": ratio(n_later, seconds),
    }


def drafters(ends: Sequence[Done]) -> dict[str, DrafterCount]:
    """The counts of each drafter over all choices, even of a drafter that drafted nothing: its calls took time."""
    return tally.added(end.speculation.drafters for end in ends)


def metrics(ends: Sequence[Done]) -> dict[str, Any]:
    """vLLM's per-request `metrics`; the speculation part only where something could be drafted."""
    slowest = max(ends, key=lambda end: end.timings.generation_s)
    n_later = max(0, slowest.usage.n_completion - 1)
    told: dict[str, Any] = {
        "time_to_first_token_ms": ms(max(end.timings.queue_s + end.timings.prompt_s for end in ends)),
        "generation_time_ms": ms(slowest.timings.generation_s),
        "queue_time_ms": ms(max(end.timings.queue_s for end in ends)),
        "mean_itl_ms": ms(ratio(slowest.timings.generation_s, n_later)),
        "tokens_per_second": ratio(n_later, slowest.timings.generation_s),
    }
    speculated = [end.speculation for end in ends if end.speculation.types and end.speculation.n_max]
    if speculated:
        told["speculative_decoding"] = _speculative_decoding(speculated)
    return told


def _speculative_decoding(runs: Sequence[Speculation]) -> dict[str, Any]:
    histogram = [sum(counts) for counts in zip_longest(*(run.histogram for run in runs), fillvalue=0)]
    n_steps = sum(run.n_steps for run in runs)
    n_drafted = sum(run.n_drafted for run in runs)
    n_accepted = sum(run.n_accepted for run in runs)
    drafted_at, accepted_at = tally.by_position(one for run in runs for one in run.drafters.values())
    return {
        "mean_acceptance_length": 1.0 + ratio(sum(i * n for i, n in enumerate(histogram)), n_steps),
        "draft_acceptance_rate": ratio(n_accepted, n_drafted),
        "acceptance_histogram": histogram,
        "num_spec_steps": n_steps,
        "num_accepted_draft_tokens": n_accepted,
        "num_draft_tokens": n_drafted,
        "num_accepted_tokens_per_pos": accepted_at,
        "num_draft_tokens_per_pos": drafted_at,
        "num_spec_tokens": max(run.n_max for run in runs),
    }


def extras(ends: Sequence[Done], n: int) -> dict[str, Any]:
    """What the root of a reply holds beside the fields of its dialect."""
    # Text in which drafts were accepted at random must not be taken for the model's.
    synthetic = {"synthetic": True} if any(end.speculation.synthetic for end in ends) else {}
    return {
        **synthetic,
        "timings": timings(ends, n),
        "metrics": metrics(ends),
        "speculative": resolved(ends[0].speculation),
        "seed": ends[0].seed,
    }


def resolved(run: Speculation) -> dict[str, Any]:
    """The settings of speculation that were in force, after the server's limits, for the reply."""
    told = {"types": list(run.types), "n_max": run.n_max, "n_min": run.n_min, "p_min": run.p_min}
    own = {name: getattr(run, name) for name in ("ngram_size_n", "ngram_size_m", "ngram_min_hits")}
    return told | {name: value for name, value in own.items() if value is not None}
