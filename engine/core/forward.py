"""One pass of the target over the planned work, and what happens when it fails.

A pass is provisional: nothing lasting has moved when it raises, so it can simply be run again. First without
drafts, then span by span; only a span that fails alone fails its request. When the device is out of memory,
the largest span's request ends and the others go on.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from engine.batch import Batch
from engine.cache.cache import Cache
from engine.core.plan import Work
from engine.errors import EngineError, StepFailed
from engine.models.network import Network
from engine.speculate.acceptance import Acceptance, coupled
from engine.speculate.verify import Verdict, verify

log = logging.getLogger(__name__)

STORE = "target"

Outcome = Verdict | EngineError


def run(
    target: Network, cache: Cache, works: Sequence[Work], acceptance: Acceptance = coupled
) -> list[tuple[Work, Outcome]]:
    """Run a pass; per piece of work that was run, its verdict, or the error that ends its request."""
    try:
        return _pass(target, cache, works, acceptance)
    except Exception:
        log.exception("pass failed spans=%d; trying again without drafts", len(works))
        return _again(target, cache, [one.without_draft() for one in works])


def _again(target: Network, cache: Cache, works: Sequence[Work]) -> list[tuple[Work, Outcome]]:
    """The second try, which isolates the spans that cannot be computed."""
    try:
        return _pass(target, cache, works)
    except (MemoryError, torch.OutOfMemoryError):
        largest = max(works, key=lambda one: one.n_certain)
        log.exception("out of memory in a pass; ending request=%s", largest.slot.request.id)
        return [(largest, StepFailed("out of memory in a pass; the largest request of the pass was ended"))]
    except Exception:
        log.exception("pass failed without drafts too spans=%d; trying each alone", len(works))
    outcomes: list[tuple[Work, Outcome]] = []
    for one in works:
        try:
            outcomes += _pass(target, cache, [one])
        except Exception:
            log.exception("pass failed for one span alone request=%s", one.slot.request.id)
            outcomes.append((one, StepFailed("the pass failed for this request, also when tried alone")))
    return outcomes


def _pass(
    target: Network, cache: Cache, works: Sequence[Work], acceptance: Acceptance = coupled
) -> list[tuple[Work, Outcome]]:
    tables = [cache.table(one.slot.id) for one in works]
    batch = Batch.build([one.span for one in works], tables, cache.page_size, target.device)
    logits = target.forward(batch, cache.stores[STORE])  # [n_logits, vocab] float32
    judged = [one for one in works if one.n_logits]
    spans = [(one.slot, one.draft) for one in judged]
    verdicts = verify(logits, spans, acceptance) if judged else []
    found = {id(one): verdict for one, verdict in zip(judged, verdicts, strict=True)}
    return [(one, found.get(id(one), Verdict((), 0))) for one in works]
