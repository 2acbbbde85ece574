"""The log line `busy`, every ten seconds while the engine works: requests, tokens per second, accepted drafts."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from slipstream.engine.api import AsyncEngine
from slipstream.engine.stats import EngineStats
from slipstream.server.report.logs import logger
from slipstream.server.report.tally import ratio

log = logger(__name__)
EVERY_S = 10.0


async def pulse(engine: AsyncEngine, every_s: float = EVERY_S) -> None:
    """Logs until cancelled. There is no line for an interval in which nothing was computed and no request waited."""
    before, then = engine.stats(), time.monotonic()
    while True:
        await asyncio.sleep(every_s)
        stats, now = engine.stats(), time.monotonic()
        if stats.n_steps != before.n_steps or stats.n_waiting:
            log.info("busy", **figures(before, stats, now - then))
        before, then = stats, now


def figures(before: EngineStats, stats: EngineStats, seconds: float) -> dict[str, Any]:
    """What happened in the `seconds` between two readings of the engine's counters."""
    n_pages = stats.n_pages_free + stats.n_pages_cached + stats.n_pages_held
    n_drafted = _total(stats, "n_drafted") - _total(before, "n_drafted")
    n_accepted = _total(stats, "n_accepted") - _total(before, "n_accepted")
    return {
        "running": sum(slot.busy for slot in stats.slots),
        "waiting": stats.n_waiting,
        "prompt_tps": round(ratio(stats.n_prompt_tokens - before.n_prompt_tokens, seconds), 1),
        "generation_tps": round(ratio(stats.n_completion_tokens - before.n_completion_tokens, seconds), 1),
        "cache_percent": round(100 * ratio(stats.n_pages_held, n_pages), 1),
        "acceptance_percent": round(100 * ratio(n_accepted, n_drafted), 1) if n_drafted else None,
        "preempted": stats.n_preempted - before.n_preempted or None,
    }


def _total(stats: EngineStats, name: str) -> int:
    return sum(getattr(count, name) for count in stats.drafters.values())
