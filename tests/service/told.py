"""What a caller has been told of a reply, however it was cut into events: text, tokens, log-probabilities, its end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slipstream.engine.api import Delta, Done, Echo, Event, Failed, Progress, Request, TokenLogprob
from slipstream.engine.service.run.thread import ThreadEngine


@dataclass(frozen=True)
class Told:
    """The sum of a request's events. What may differ from run to run is left out: times, drafts, cached tokens."""

    text: str
    pieces: tuple[str, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    echoes: tuple[Echo, ...]
    progress: tuple[int, ...]  # prompt tokens that were there
    end: tuple[object, ...]


def told(events: Iterable[Event]) -> Told:
    """Adds up all events of a request; raises AssertionError unless exactly one of them, the last, ends it."""
    *before, last = events
    assert not [one for one in before if isinstance(one, Done | Failed)]
    deltas = [one for one in before if isinstance(one, Delta)]
    for one in deltas:
        assert "".join(one.pieces) == one.text
        assert len(one.pieces) == len(one.token_ids) == len(one.sources)
    return Told(
        text="".join(one.text for one in deltas),
        pieces=tuple(piece for one in deltas for piece in one.pieces),
        token_ids=tuple(token_id for one in deltas for token_id in one.token_ids),
        logprobs=tuple(entry for one in deltas for entry in one.logprobs),
        echoes=tuple(one for one in before if isinstance(one, Echo)),
        progress=tuple(one.n_processed for one in before if isinstance(one, Progress)),
        end=_end(last),
    )


def _end(last: Event) -> tuple[object, ...]:
    if isinstance(last, Failed):
        return (type(last.error), str(last.error))
    assert isinstance(last, Done)
    usage = last.usage
    return (
        last.reason,
        last.stop_string,
        last.stop_token,
        last.seed,
        usage.n_prompt,
        usage.n_completion,
    )


def emitted(events: Sequence[Event]) -> tuple[int, ...]:
    """All tokens of the events."""
    return tuple(token_id for one in events if isinstance(one, Delta) for token_id in one.token_ids)


async def events_of(engine: ThreadEngine, request: Request) -> list[Event]:
    return [event async for event in await engine.submit(request)]
