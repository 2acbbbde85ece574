"""Replies as a server tells them that also says what every step drafted: chunks written out, for tests of the page that
count tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Told:
    """A step: who drafted, the texts drafted, how many of them were kept, and the target's own token behind."""

    drafter: str | None
    drafted: tuple[str, ...]
    n_accepted: int
    own: str
    why_not: str | None = None

    @property
    def kept(self) -> tuple[str, ...]:
        return (*self.drafted[: self.n_accepted], self.own)


STEPS = (
    Told(None, (), 0, "def"),
    Told("draft-model", (" first", "(", "items"), 2, "values"),
    Told("suffix", ("):", "\n", "    return", " items"), 4, "["),
    Told(None, (), 0, "0", "no_guess"),
    Told("suffix", ("1", "]", "\n"), 0, "]"),
)


def chunk(steps: Sequence[Told], first: int) -> dict[str, Any]:
    """A chunk that brings these steps, the first of which has this index."""
    pieces = [piece for step in steps for piece in step.kept]
    sources = [one for step in steps for one in [step.drafter] * step.n_accepted + [None]]
    told = [
        {
            "index": first + i,
            "drafter": step.drafter,
            "drafted": list(range(len(step.drafted))),
            "drafted_pieces": step.drafted,
            "n_accepted": step.n_accepted,
            "why_not": step.why_not,
        }
        for i, step in enumerate(steps)
    ]
    return {
        "choices": [{"index": 0, "delta": {"content": "".join(pieces)}, "finish_reason": None}],
        "spec": {"sources": sources, "pieces": pieces, "token_ids": list(range(len(pieces))), "steps": told},
    }


def figures(steps: Sequence[Told], generation_ms: float = 100.0) -> dict[str, Any]:
    """The last chunk."""
    n = sum(len(step.kept) for step in steps)
    n_drafted, n_accepted = sum(len(step.drafted) for step in steps), sum(step.n_accepted for step in steps)
    names = sorted({step.drafter for step in steps if step.drafter})
    return {
        "choices": [],
        "seed": 7,
        "usage": {"prompt_tokens": 5, "completion_tokens": n},
        "speculative": {"types": names, "n_max": 16 if names else 0},
        "timings": {
            "cache_n": 2,
            "prompt_n": 3,
            "prompt_ms": 10.0,
            "prompt_per_second": 300.0,
            "predicted_n": n,
            "predicted_ms": generation_ms,
            "predicted_per_second": 1000 * (n - 1) / generation_ms,
            "predicted_parts_ms": {
                "draft": 0.2 * generation_ms,
                "verify": 0.7 * generation_ms,
                "host": 0.1 * generation_ms,
            },
            "draft_n": n_drafted,
            "draft_n_accepted": n_accepted,
            "drafters": {name: _drafter([step for step in steps if step.drafter == name]) for name in names},
        },
        "metrics": {
            "speculative_decoding": {
                "mean_acceptance_length": n / len(steps),
                "draft_acceptance_rate": n_accepted / max(1, n_drafted),
                "acceptance_histogram": [],
                "num_spec_steps": len(steps),
                "num_accepted_draft_tokens": n_accepted,
                "num_draft_tokens": n_drafted,
            }
        },
    }


def _drafter(steps: Sequence[Told]) -> dict[str, Any]:
    longest = max(len(step.drafted) for step in steps)
    drafted = [sum(len(step.drafted) > i for step in steps) for i in range(longest)]
    accepted = [sum(step.n_accepted > i for step in steps) for i in range(longest)]
    return {
        "draft_n": sum(drafted),
        "draft_n_accepted": sum(accepted),
        "n_drafts": len(steps),
        "n_drafts_accepted": accepted[0],
        "draft_n_per_position": drafted,
        "draft_n_accepted_per_position": accepted,
        "acceptance_rate_per_position": [n / len(steps) for n in accepted],
        "calls": {"begin": 1, "draft": len(steps), "accept": len(steps)},
        "ms": {"begin": 0.1, "draft": 2.0, "accept": 0.1},
    }


def stream(chunks: Sequence[dict[str, Any]]) -> str:
    """Chunks as server-sent events."""
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    *parts, end = chunks
    return "".join(f"data: {json.dumps(one)}\n\n" for one in [*parts, last, end]) + "data: [DONE]\n\n"


def told(page: Any, steps: Sequence[Told] = STEPS, *, n_merged: int = 1, **figured: float) -> None:
    """Have chats of the page answered with these steps, so many in a chunk."""
    chunks = [chunk(steps[i : i + n_merged], i) for i in range(0, len(steps), n_merged)]
    body = stream([*chunks, figures(steps, **figured)])
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=200, content_type="text/event-stream", body=body),
    )
