"""A running request: its tokens, how far they are computed, and what its rows need.

A sequence is its `tokens` and nothing else; everything cached can be rebuilt from them. A slot's phase is derived, not
stored: it is prefilling while `n_past < len(tokens) - 1` and ready to decode when they are equal.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from slipstream.engine.api import Request
from slipstream.engine.drafting import WhyNot
from slipstream.engine.images import NO_IMAGES, PlacedImage
from slipstream.engine.sample.logprobs import Logprob
from slipstream.engine.sample.params import SamplingParams
from slipstream.engine.sample.pick import Row
from slipstream.engine.stats import DrafterCount, SlotState
from slipstream.engine.text.grammar.constraint import Constraint
from slipstream.engine.text.text_stream import TextStream
from slipstream.engine.text.thinking import CutThinking

_MOST_UNREAD = 130  # tokens of two passes, each with a certain one and 64 drafts
N_RECENT = 64  # steps of a slot that `/slots` shows


class Ending(Enum):
    """Why a request is over."""

    END_TOKEN = "end token"
    STOP_STRING = "stop string"
    COMPLETE = "complete"  # the grammar allows nothing more
    ENOUGH = "enough"  # the client wants no more
    LIMIT = "limit"
    BROKEN = "broken"  # NaN in the row


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculateParams:
    """Speculation in force for a request."""

    types: tuple[str, ...]
    n_max: int
    n_min: int
    p_min: float
    ngram_size_n: int | None = None  # None: each drafter's own setting
    ngram_size_m: int | None = None
    ngram_min_hits: int | None = None
    why_not: WhyNot | None = None  # why nothing is ever drafted for the request; None: it may be


@dataclass(slots=True)
class DrafterTally:
    """A `DrafterCount` in the making."""

    n_drafts: int = 0
    n_drafts_accepted: int = 0
    n_drafted: int = 0
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    n_calls: Counter[str] = field(default_factory=Counter)  # by method
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def call(self, verb: str, seconds: float) -> None:
        """One call of a method (`begin`, `draft` or `accept`), or the reading of a draft that was made earlier."""
        self.n_calls[verb] += 1
        self.seconds[verb] += seconds

    def credit(self, positions: Sequence[int], n_accepted: int) -> None:
        """One verified draft: the places of this drafter's tokens in it, and how many drafts were accepted in all."""
        accepted = [position for position in positions if position < n_accepted]
        self.n_drafts += 1
        self.n_drafts_accepted += bool(accepted)
        self.n_drafted += len(positions)
        _count(self.drafted_by_position, positions)
        _count(self.accepted_by_position, accepted)

    def count(self) -> DrafterCount:
        """The tally as the caller gets it."""
        return DrafterCount(
            n_drafts=self.n_drafts,
            n_drafts_accepted=self.n_drafts_accepted,
            n_drafted=self.n_drafted,
            n_accepted=sum(self.accepted_by_position),
            drafted_by_position=tuple(self.drafted_by_position),
            accepted_by_position=tuple(self.accepted_by_position),
            n_begin_calls=self.n_calls["begin"],
            n_draft_calls=self.n_calls["draft"],
            n_accept_calls=self.n_calls["accept"],
            begin_s=self.seconds["begin"],
            draft_s=self.seconds["draft"] + self.seconds["read"],
            accept_s=self.seconds["accept"],
        )


def _count(counts: list[int], positions: Sequence[int]) -> None:
    """One more at each of the positions."""
    for position in positions:
        while len(counts) <= position:
            counts.append(0)
        counts[position] += 1


@dataclass(slots=True)
class SlotStats:
    """What a request did, for its timings and counters. Times are those of the engine's clock."""

    admitted_s: float = 0.0
    queued_s: float = 0.0
    started_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    n_cached: int = 0
    # The engine's seconds of drafting and of verifying at the first token.
    rounds_s: tuple[float, float] = (0.0, 0.0)
    n_steps: int = 0  # that gave tokens
    histogram: list[int] = field(default_factory=list)  # steps by number of accepted drafts
    recent: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=N_RECENT))
    drafter: str | None = None  # who made most of the last draft
    drafters: defaultdict[str, DrafterTally] = field(default_factory=lambda: defaultdict(DrafterTally))

    def step(self, n_drafted: int, n_accepted: int, drafter: str | None) -> None:
        """A step that gave tokens."""
        self.n_steps += 1
        self.recent.append((n_drafted, n_accepted))
        self.drafter = drafter or self.drafter


@dataclass(slots=True, eq=False)
class Slot:
    """One lane of the engine with the request it serves."""

    id: int  # -1: the request waits for a free one
    request: Request
    tokens: list[int]
    n_prompt: int
    n_limit: int  # the sequence may grow to this many tokens: context or max_tokens, whichever is less
    sampling: SamplingParams
    speculate: SpeculateParams
    text: TextStream
    n_past: int = 0  # tokens whose target state is committed
    is_behind_stored: bool = False  # it went on from stored pages, which another request may have made
    counts: Counter[int] = field(default_factory=Counter)  # of output tokens, if a penalty needs them
    stats: SlotStats = field(default_factory=SlotStats)
    drafters: set[str] = field(init=False)  # that serve it: those it asks for that have not failed on it
    images: Sequence[PlacedImage] = NO_IMAGES  # of the prompt, as the target sees them
    draft_images: Sequence[PlacedImage] = NO_IMAGES  # as a draft model does, if it sees any
    prediction: tuple[int, ...] = ()  # tokens of the text the caller expects
    # What the reply may be; it has seen the reply's tokens.
    constraint: Constraint | CutThinking | None = None
    # Of the prompt's tokens from the second on, as far as computed; None if not requested, or once they are sent.
    prompt_logprobs: list[Logprob] | None = None
    judged: dict[int, Logprob] = field(default_factory=dict)  # of the reply's tokens by number, if asked for
    echoes: bool = False  # whether the prompt is still to be sent back
    n_reported: int = -1  # prompt tokens that the client knows to be there; -1: it knows nothing
    ended: Ending | None = None  # how the reply was over before it got a slot: with an earlier run's tokens
    _mirror: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32), repr=False)
    _n_mirrored: int = 0

    def __post_init__(self) -> None:
        self.drafters = set(self.speculate.types) if self.speculate.n_max else set()

    @property
    def n_decoded(self) -> int:
        return len(self.tokens) - self.n_prompt

    @property
    def n_emitted(self) -> int:
        """Tokens of the reply that the client has from an earlier run of the request."""
        return len(self.request.emitted)

    @property
    def salt(self) -> str:
        """The cached prompts that the request may use: its tenant's; none if all rows of its prompt are wanted."""
        return self.request.tenant if self.prompt_logprobs is None else self.request.id

    @property
    def reads_drafts(self) -> bool:
        """Whether a row of this pass, or of one behind it, is picked by the tokens drafted before it."""
        rules = self.constraint
        return self.sampling.counts_drafts or (rules is not None and rules.may_rule(_MOST_UNREAD))

    @property
    def history(self) -> NDArray[np.int32]:
        """`tokens` as an array, [len(tokens)] int32, not to be written; costs what was appended since the last look."""
        n, n_old = len(self.tokens), self._n_mirrored
        if n > len(self._mirror):
            grown = np.empty(max(1024, 2 * n), np.int32)
            grown[:n_old] = self._mirror[:n_old]
            self._mirror = grown
        if n > n_old:
            self._mirror[n_old:n] = self.tokens[n_old:]
            self._n_mirrored = n
        return self._mirror[:n]

    def truncate(self, n_tokens: int) -> None:
        """Cut the sequence back to its first tokens; at least the prompt stays."""
        n_tokens = max(n_tokens, self.n_prompt)
        for token_id in self.tokens[n_tokens:]:
            if self.sampling.counts_output:
                self.counts[token_id] -= 1
        if self.constraint is not None:
            self.constraint.pop(len(self.tokens) - n_tokens)
        del self.tokens[n_tokens:]
        self.text = self.text.restarted(
            self.tokens[: self.n_prompt], self.tokens[self.n_prompt :], self.request.min_tokens
        )
        self._n_mirrored = min(self._n_mirrored, n_tokens)

    def append(self, token_id: int) -> None:
        """Add a kept token to the sequence."""
        self.tokens.append(token_id)
        if self.constraint is not None:
            self.constraint.push(token_id)
        if self.sampling.counts_output:
            self.counts[token_id] += 1

    def row(self, drafts: Sequence[int] = ()) -> Row:
        """The logits row that follows `tokens + drafts`."""
        allowed = None if self.constraint is None else self.constraint.mask(drafts)
        return Row(self.sampling, self.tokens, self.n_prompt, self.counts, drafts, allowed)

    def rows(self, drafts: Sequence[int]) -> list[Row]:
        """The logits rows that follow `tokens` and 0, 1, … of the drafts."""
        prefixes = [drafts[:j] for j in range(len(drafts) + 1)]
        masks = [None] * len(prefixes) if self.constraint is None else self.constraint.masks(drafts)
        return [
            Row(self.sampling, self.tokens, self.n_prompt, self.counts, one, allowed)
            for one, allowed in zip(prefixes, masks, strict=True)
        ]


def state_of(slot_id: int, slot: Slot | None) -> SlotState:
    """What `/slots` shows of a slot; None: it is idle."""
    if slot is None:
        return SlotState(
            slot_id,
            busy=False,
            request_id=None,
            n_prompt=0,
            n_past=0,
            n_cached=0,
            n_decoded=0,
            n_remaining=-1,
        )
    return SlotState(
        slot_id,
        busy=True,
        request_id=slot.request.id,
        n_prompt=slot.n_prompt,
        n_past=slot.n_past,
        n_cached=slot.stats.n_cached,
        n_decoded=slot.n_decoded,
        n_remaining=slot.n_limit - len(slot.tokens),
        drafters={name: tally.count() for name, tally in slot.stats.drafters.items()},
        tenant=slot.request.tenant,
        n_max=0 if slot.speculate.why_not else slot.speculate.n_max,
        drafter=slot.stats.drafter,
        recent=tuple(slot.stats.recent),
    )
