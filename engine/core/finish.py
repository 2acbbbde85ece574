"""What a slot keeps of a verdict, and how its request ends.

Tokens are kept one at a time, so that an end token, a stop string or the length limit inside an accepted run
cuts text, ids and counts at the same place.
"""

from __future__ import annotations

import time
from collections.abc import Set
from enum import Enum

from engine.api import Delta, Done, Speculation, Timings, Usage
from engine.slot import Slot
from engine.speculate.drafter import Draft
from engine.speculate.verify import Verdict


class Ending(Enum):
    """Why a request is over."""

    END_TOKEN = "end token"
    STOP_STRING = "stop string"
    LIMIT = "limit"
    BROKEN = "broken"  # NaN in the row


def keep(slot: Slot, draft: Draft, verdict: Verdict, eos_ids: Set[int]) -> tuple[Delta, Ending | None]:
    """Append the verdict's tokens to the slot until one ends the request; return what the client sees of them."""
    token_ids: list[int] = []
    pieces: list[str] = []
    ending = None
    for token_id in verdict.token_ids:
        if token_id < 0:
            ending = Ending.BROKEN
            break
        slot.append(token_id)
        token_ids.append(token_id)
        pieces.append("" if token_id in eos_ids else slot.text.push(token_id))
        ending = _ending(slot, token_id, eos_ids)
        if ending is not None:
            break
    if token_ids:
        now = time.perf_counter()
        slot.stats.first_token_s = slot.stats.first_token_s or now
        slot.stats.last_token_s = now
    if ending is not None and pieces:
        pieces[-1] += slot.text.flush()
    sources = tuple(draft.sources[i] if i < verdict.n_accepted else None for i in range(len(token_ids)))
    return Delta("".join(pieces), tuple(token_ids), sources, tuple(pieces)), ending


def _ending(slot: Slot, token_id: int, eos_ids: Set[int]) -> Ending | None:
    if token_id in eos_ids:
        return Ending.END_TOKEN
    if slot.text.stopped is not None:
        return Ending.STOP_STRING
    if len(slot.tokens) >= slot.n_limit:
        return Ending.LIMIT
    return None


def done(slot: Slot, ending: Ending, *, synthetic: bool = False) -> Done:
    """The last event of a finished request."""
    stats, speculate = slot.stats, slot.speculate
    return Done(
        reason="length" if ending is Ending.LIMIT else "stop",
        stop_string=slot.text.stopped if ending is Ending.STOP_STRING else None,
        usage=Usage(slot.n_prompt, stats.n_cached, slot.n_decoded),
        timings=Timings(
            queue_s=stats.started_s - stats.admitted_s,
            prompt_s=stats.first_token_s - stats.started_s,
            generation_s=stats.last_token_s - stats.first_token_s,
        ),
        speculation=Speculation(
            types=speculate.types,
            n_max=speculate.n_max,
            n_min=speculate.n_min,
            p_min=speculate.p_min,
            n_steps=sum(stats.histogram),
            histogram=tuple(stats.histogram),
            drafters={name: tally.count() for name, tally in stats.drafters.items()},
            ngram_size_n=speculate.ngram_size_n,
            ngram_size_m=speculate.ngram_size_m,
            ngram_min_hits=speculate.ngram_min_hits,
            synthetic=synthetic,
        ),
        seed=slot.sampling.seed,
    )
