"""Replies of which every step is known: scripts of the fake engine, for tests of the page that count tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from slipstream.engine.api import Delta, Request, Timings
from slipstream.engine.drafting import Step, WhyNot
from slipstream.engine.stats import DrafterCount
from tests.http.fake import Script, done
from tests.http.fake import Step as Scripted


@dataclass(frozen=True)
class Told:
    """A step: who drafted, the texts drafted, how many of them were kept, and the target's own token behind."""

    drafter: str | None
    drafted: tuple[str, ...]
    n_accepted: int
    own: str
    why_not: WhyNot | None = None

    @property
    def kept(self) -> tuple[str, ...]:
        return (*self.drafted[: self.n_accepted], self.own)

    @property
    def sources(self) -> tuple[str | None, ...]:
        return (*[self.drafter] * self.n_accepted, None)

    def step(self, index: int) -> Step:
        ids = tuple(range(len(self.drafted)))
        return Step(index, self.drafter, ids, self.drafted, self.n_accepted, self.why_not)


STEPS = (
    Told(None, (), 0, "def"),
    Told("draft-model", (" first", "(", "items"), 2, "values"),
    Told("suffix", ("):", "\n", "    return", " items"), 4, "["),
    Told(None, (), 0, "0", "no_guess"),
    Told("suffix", ("1", "]", "\n"), 0, "]"),
)


def told(steps: Sequence[Told] = STEPS, *, n_merged: int = 1, generation_s: float = 0.1) -> Script:
    """A reply of these steps, so many in a chunk; a fifth of its time goes into drafts, a tenth into the host."""

    def script(request: Request) -> Iterator[Scripted]:
        for i in range(0, len(steps), n_merged):
            yield _joined(steps[i : i + n_merged], i)
        n_tokens = sum(len(step.kept) for step in steps)
        end = done(request, n_tokens, timings=_timings(generation_s))
        yield replace(end, speculation=replace(end.speculation, **_speculation(steps)))

    return script


def _joined(steps: Sequence[Told], first: int) -> Delta:
    pieces = tuple(piece for step in steps for piece in step.kept)
    sources = tuple(source for step in steps for source in step.sources)
    drafted = tuple(step.step(first + i) for i, step in enumerate(steps))
    return Delta("".join(pieces), tuple(range(len(pieces))), sources, pieces, steps=drafted)


def _timings(generation_s: float) -> Timings:
    return Timings(0.001, 0.01, generation_s, draft_s=0.2 * generation_s, verify_s=0.7 * generation_s)


def _speculation(steps: Sequence[Told]) -> dict[str, object]:
    names = sorted({step.drafter for step in steps if step.drafter})
    longest = max(len(step.drafted) for step in steps)
    return {
        "n_max": 16 if names else 0,
        "n_steps": len(steps),
        "histogram": tuple(sum(step.n_accepted == n for step in steps) for n in range(longest + 1)),
        "drafters": {name: _count([step for step in steps if step.drafter == name]) for name in names},
    }


def _count(steps: Sequence[Told]) -> DrafterCount:
    longest = max(len(step.drafted) for step in steps)
    accepted = [sum(step.n_accepted > i for step in steps) for i in range(longest)]
    return DrafterCount(
        n_drafts=len(steps),
        n_drafts_accepted=accepted[0],
        n_drafted=sum(len(step.drafted) for step in steps),
        n_accepted=sum(accepted),
        drafted_by_position=tuple(sum(len(step.drafted) > i for step in steps) for i in range(longest)),
        accepted_by_position=tuple(accepted),
        n_begin_calls=1,
        n_draft_calls=len(steps),
        n_accept_calls=len(steps),
        begin_s=0.0001,
        draft_s=0.002,
        accept_s=0.0001,
    )
