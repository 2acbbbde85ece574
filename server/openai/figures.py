"""Counts and times of finished choices as clients read them: OpenAI's usage, llama-server's timings, vLLM's
speculation metrics. Every number is finite. Counts add up over choices; times are those of the slowest one,
because choices run side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from engine.api import Done, Speculation


def usage(ends: Sequence[Done], n: int) -> dict[str, Any]:
    """`ends` holds n choices per prompt; a prompt counts once."""
    prompts = [end.usage for end in ends[::n]]
    return usage_of(
        sum(one.n_prompt for one in prompts),
        sum(end.usage.n_completion for end in ends),
        sum(one.n_cached for one in prompts),
    )


def usage_of(n_prompt: int, n_completion: int, n_cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_completion,
        "total_tokens": n_prompt + n_completion,
        "prompt_tokens_details": {"cached_tokens": n_cached},
    }


def timings(ends: Sequence[Done], n: int) -> dict[str, Any]:
    """llama-server's `timings`. The first token comes out of the prompt pass, so rates count one less."""
    prompts = [end.usage for end in ends[::n]]
    n_cached = sum(one.n_cached for one in prompts)
    n_prompt = sum(one.n_prompt for one in prompts) - n_cached
    n_predicted = sum(end.usage.n_completion for end in ends)
    n_later = sum(max(0, end.usage.n_completion - 1) for end in ends)
    prompt_s = max(end.timings.prompt_s for end in ends)
    predicted_s = max(end.timings.generation_s for end in ends)
    told: dict[str, Any] = {
        "cache_n": n_cached,
        "prompt_n": n_prompt,
        "prompt_ms": _ms(prompt_s),
        "prompt_per_token_ms": _ms(_ratio(prompt_s, n_prompt)),
        "prompt_per_second": _ratio(n_prompt, prompt_s),
        "predicted_n": n_predicted,
        "predicted_ms": _ms(predicted_s),
        "predicted_per_token_ms": _ms(_ratio(predicted_s, n_later)),
        "predicted_per_second": _ratio(n_later, predicted_s),
    }
    drafters = _drafters(ends)
    if any(one["draft_n"] for one in drafters.values()):
        told["draft_n"] = sum(one["draft_n"] for one in drafters.values())
        told["draft_n_accepted"] = sum(one["draft_n_accepted"] for one in drafters.values())
        told["drafters"] = drafters
    return told


def _drafters(ends: Sequence[Done]) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {}
    for end in ends:
        for name, one in end.speculation.drafters.items():
            count = counts.setdefault(name, {"draft_n": 0, "draft_n_accepted": 0})
            count["draft_n"] += one.n_drafted
            count["draft_n_accepted"] += one.n_accepted
    return counts


def metrics(ends: Sequence[Done]) -> dict[str, Any]:
    """vLLM's per-request `metrics`; the speculation part only where something could be drafted."""
    slowest = max(ends, key=lambda end: end.timings.generation_s)
    n_later = max(0, slowest.usage.n_completion - 1)
    told: dict[str, Any] = {
        "time_to_first_token_ms": _ms(max(end.timings.queue_s + end.timings.prompt_s for end in ends)),
        "generation_time_ms": _ms(slowest.timings.generation_s),
        "queue_time_ms": _ms(max(end.timings.queue_s for end in ends)),
        "mean_itl_ms": _ms(_ratio(slowest.timings.generation_s, n_later)),
        "tokens_per_second": _ratio(n_later, slowest.timings.generation_s),
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
    return {
        "mean_acceptance_length": 1.0 + _ratio(n_accepted, n_steps),
        "draft_acceptance_rate": _ratio(n_accepted, n_drafted),
        "acceptance_histogram": histogram,
        "num_spec_steps": n_steps,
        "num_accepted_draft_tokens": n_accepted,
        "num_draft_tokens": n_drafted,
        "num_spec_tokens": max(run.n_max for run in runs),
    }


def resolved(run: Speculation) -> dict[str, Any]:
    """The speculation settings that were in force, after the server's limits."""
    return {"types": list(run.types), "n_max": run.n_max, "n_min": run.n_min, "p_min": run.p_min}


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _ratio(part: float, whole: float) -> float:
    return round(part / whole, 6) if whole > 0 else 0.0
