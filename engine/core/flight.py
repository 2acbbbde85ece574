"""A pass under way: launched and unread. What it runs, where it leaves its slots, how the next is launched behind it.

The device need not wait for the host if the next pass is launched before this pass is read. The next pass is then
planned as if this pass kept all its drafts; its tokens, and how far back its spans really begin, are worked out on the
device (`engine.speculate.tails`). Once this pass has been read, the next is like any other: the host judges the same
picks by the same rule. A span for which host and device come to different ends is discarded and runs anew; the work of
a request that has ended in between is discarded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from slipstream.engine.batch import Batch, Download, upload
from slipstream.engine.core.plan import Place, Work
from slipstream.engine.frames import Frame
from slipstream.engine.layers.decoder import Taps
from slipstream.engine.sample.logprobs import Judged
from slipstream.engine.sample.pick import Row, row_params
from slipstream.engine.slot import Slot
from slipstream.engine.speculate.decide.value import Pass
from slipstream.engine.speculate.drafter import NO_DRAFTS, Draft, Drafts
from slipstream.engine.speculate.tails import Tails
from slipstream.engine.speculate.verify import Picks
from slipstream.kernels.choose.op import RowParams


@dataclass(slots=True)
class Flight:
    """A pass that was launched and is unread."""

    works: list[Work | None]  # None: discarded, the request is over or has started over
    coming: Pass = field(default_factory=lambda: Pass(1, 1))  # what it was weighed as when it was drafted for
    drafts: Drafts = NO_DRAFTS
    behind: Tails | None = None  # the ends of the pass before, if it was unread when this pass was launched
    started: float = 0.0  # on the engine's clock
    planned: Sequence[Work] = field(init=False)  # the works as launched
    # Of `behind`: drafts that its slots did not keep; None: it had none, so the works are where they were planned.
    lost: Download | None = field(init=False)
    picks: Picks | None = field(init=False, default=None)  # None: the pass could not be launched
    token_ids: Tensor | None = field(init=False, default=None)  # [n_rows of all] int64
    taps: Taps | None = field(init=False, default=None)
    was_recorded: bool = field(init=False, default=False)  # so that what it took says nothing of the next
    # Per work, what its rows say of its prompt, and the tokens that this is about.
    prompts: Sequence[tuple[Judged, Sequence[int]] | None] = field(init=False, default=())

    def __post_init__(self) -> None:
        self.planned = [one for one in self.works if one is not None]
        if self.behind is not None and not any(one.slot.id in self.behind.slot_ids for one in self.planned):
            self.behind = None  # no span goes on from there
        self.lost = None
        if self.behind is not None and self.behind.may_lose:
            self.lost = Download(self.behind.n_lost)

    @property
    def n_rows(self) -> int:
        return sum(one.n_rows for one in self.planned)

    @property
    def firsts(self) -> Sequence[int]:
        """The first row of each work."""
        return list(accumulate((one.n_rows for one in self.planned), initial=0))[:-1]

    @property
    def is_certain(self) -> bool:
        """Whether it has no drafts, so that the host can say how long its sequences will be."""
        return all(one.n_picks <= 1 for one in self.planned)

    def places(self, slots: Sequence[Slot]) -> list[Place]:
        """Where the slots will be behind it, as far as they may then still have something to do."""
        behind = {one.slot.id: one.behind for one in self.works if one is not None}
        places = [behind[slot.id] if slot.id in behind else Place.of(slot) for slot in slots]
        return [place for place in places if place.n_total < place.slot.n_limit]

    def tails(self) -> Tails | None:
        """Where it ends; None if no sequence goes on from its picks."""
        assert self.picks is not None
        assert self.token_ids is not None
        names = [-1 - i if work is None else work.slot.id for i, work in enumerate(self.works)]
        ends = accumulate(one.n_rows for one in self.planned)
        picked = zip(names, ends, (one.n_picks for one in self.planned), strict=True)
        rows = {name: range(end - n, end) for name, end, n in picked if n}
        if not any(name >= 0 for name in rows):
            return None
        return Tails(rows, self.token_ids, self.picks.token_ids, self.drafts.token_ids, self.taps)

    def keep_streams(self) -> None:
        """Copy what a replay of the captured pass would overwrite."""
        if self.taps is not None:
            self.taps = self.taps.copy()

    def fill(self, batch: Batch, page_size: int) -> None:
        """Put into the batch what the host left open: tokens that are unread, and where the spans really begin."""
        self.was_recorded = isinstance(batch.frame, Frame) and batch.frame.is_new
        if self.behind is None:
            return
        lengths = [len(span.token_ids) for span in batch.spans]
        following, tails = self._following()
        firsts = np.cumsum([0, *lengths])[following]
        rows, values = [firsts], [tails.last[:, 1]]
        if self.drafts.token_ids is not None:
            starts = zip(following, firsts, strict=True)
            rows += [first + 1 + np.arange(batch.spans[i].n_drafts) for i, first in starts]
            values.append(self.drafts.token_ids.clamp_min(0))  # a row with NaN guesses no token
        (index,) = upload((np.concatenate(rows),), batch.token_ids.device)
        batch.token_ids.index_copy_(0, index, torch.cat(values))
        if self.behind.may_lose:
            batch.move_back(self._lost(), page_size)

    def params(self, rows: Sequence[Sequence[Row]], device: torch.device) -> RowParams | None:
        """How the picks' rows are scored, work by work, where the device has to say at which position; else None."""
        if self.behind is None or not self.behind.may_lose:
            return None
        params = row_params([row for own in rows for row in own], device)
        owners = np.repeat(np.arange(len(rows)), [len(own) for own in rows])
        (index,) = upload((owners,), device)
        return replace(params, position=params.position - self._lost()[index])

    def discard(self) -> None:
        """Mark all works as not to be run."""
        self.works = [None] * len(self.works)

    def start_over(self) -> None:
        """Move the works to where they really began, once the pass before has been read and settled.

        A span that began elsewhere than its slot is now is discarded: device and host have to agree on every token.
        """
        if self.behind is None or self.lost is None:
            return
        lost = dict(zip(self.behind.slot_ids, self.lost.read().tolist(), strict=True))
        for i, one in enumerate(self.works):
            if one is not None:
                now = Work.of(Place.of(one.slot), one.n_certain, one.draft)
                self.works[i] = now if one.start - lost.get(one.slot.id, 0) == now.start else None

    def read_drafts(self) -> list[Draft]:
        """The drafts of the works as launched; waits for them."""
        known = {} if self.drafts.read is None else self.drafts.read()
        return [known.get(one.slot.id, one.draft) for one in self.planned]

    def _following(self) -> tuple[list[int], Tails]:
        """Which works go on from the pass before, and from where."""
        assert self.behind is not None
        slot_ids = [one.slot.id for one in self.planned]
        following = [i for i, slot_id in enumerate(slot_ids) if slot_id in self.behind.slot_ids]
        return following, self.behind.of_slots([slot_ids[i] for i in following])

    def _lost(self) -> Tensor:  # [n_works] int64
        following, tails = self._following()
        (index,) = upload((np.asarray(following),), tails.n_lost.device)
        return tails.n_lost.new_zeros(len(self.planned)).index_copy_(0, index, tails.n_lost)
