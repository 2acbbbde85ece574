"""One request on its way: its tokens, how far they are computed, and what its rows need.

`tokens` is the only thing a sequence *is*; everything cached can be rebuilt from it. States are read off, not
stored: a slot is prefilling while `n_past < len(tokens) - 1` and ready to decode when they are equal.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.api import DrafterCount, Request
from engine.sample.params import SamplingParams
from engine.sample.pick import Row
from engine.text.stream import TextStream


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculateParams:
    """Speculation in force for a request."""

    types: tuple[str, ...]
    n_max: int
    n_min: int
    p_min: float


@dataclass(slots=True)
class SlotStats:
    """What a request did, for its timings and counters. Times are `time.perf_counter` seconds."""

    admitted_s: float = field(default_factory=time.perf_counter)
    started_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    n_cached: int = 0
    histogram: list[int] = field(default_factory=list)  # steps by number of accepted drafts
    drafters: dict[str, DrafterCount] = field(default_factory=dict)

    def count(self, source: str, n_drafted: int, n_accepted: int) -> None:
        """Credit one round to the drafter that made the draft."""
        old = self.drafters.get(source, DrafterCount())
        self.drafters[source] = DrafterCount(old.n_drafted + n_drafted, old.n_accepted + n_accepted)


@dataclass(slots=True, eq=False)
class Slot:
    """One lane of the engine with the request it serves."""

    id: int
    request: Request
    tokens: list[int]
    n_prompt: int
    n_limit: int  # the sequence may grow to this many tokens: context or max_tokens, whichever is less
    sampling: SamplingParams
    speculate: SpeculateParams
    text: TextStream
    n_past: int = 0  # tokens whose target state is committed
    counts: Counter[int] = field(default_factory=Counter)  # of output tokens, if a penalty needs them
    stats: SlotStats = field(default_factory=SlotStats)
    silenced: set[str] = field(default_factory=set)  # drafters that failed on this request

    @property
    def n_decoded(self) -> int:
        return len(self.tokens) - self.n_prompt

    @property
    def n_gap(self) -> int:
        """Certain tokens that have not been through the target yet; 1 when the slot is ready to decode."""
        return len(self.tokens) - self.n_past

    @property
    def n_room(self) -> int:
        """Most drafts worth verifying: the pass itself adds one token."""
        return self.n_limit - len(self.tokens) - 1

    def append(self, token_id: int) -> None:
        """Add a kept token to the sequence."""
        self.tokens.append(token_id)
        if self.sampling.counts_output:
            self.counts[token_id] += 1

    def row(self, drafts: Sequence[int] = ()) -> Row:
        """The logits row that follows `tokens + drafts`."""
        return Row(self.sampling, self.tokens, self.n_prompt, self.counts, drafts)
