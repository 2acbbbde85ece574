"""Drafters that read the target's hidden states and then their own: EAGLE-3 and MTP heads.

A head is a chain of modules, most often a single one. With tokens x and the target's state at position p for s⁰_p,
module k (counted from 0) has a row per position,

    s^{k+1}_p = module k (s^k_p, x_{p+1+k}; its own rows before p), which predicts x_{p+2+k}

(the pairing rule of EAGLE, Li et al. 2503.01840, and of DeepSeek-V3, arXiv 2412.19437, 2.2). The last module is looped:
past the position where it makes its guess it takes its own state of the row before for s^k.

**What is known.** When tokens up to x_n are known (the target has computed n of them, `slot.n_past`), module k has its
tokens for the positions before n - k. So every pass brings each module the same tokens, at positions shifted back by k:

    tokens                       x_1 x_2 x_3 x_4 | x_5 x_6      two accepts, n = 4 and n = 6
    positions of module 0         0   1   2   3  |  4   5
    positions of module 1             0   1   2  |  3   4       the state of row 3 waits for x_5
    positions of module 2                 0   1  |  2   3

The state s^k of the first row that module k still lacks is *carried* to the next accept: one row per module but the
first. `accept` comes after sampling, so module 0 lacks nothing, and its last row yields the first guess.

**What is guessed.** Guess j, from 0, is module j's at position n - 1. The rows which that module lacks, n - j … n - 1,
are run with guesses for tokens; they are scratch past the module's length, and run again when the tokens are there.

**What is adopted.** A prefix from the cache has all its rows in all modules (the store's length is that of the last
module), and no states: all modules start at its end, with nothing carried. Its last rows, k + 1 in module k, have read
tokens behind it, of the sequence that made it; they cost a guess if the text goes on differently. A sequence that is
cut back by fewer tokens than there are modules behind the first lacks rows, and drafts no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from slipstream.engine.batch import Batch, Span, upload
from slipstream.engine.cache.cache import Cache
from slipstream.engine.cache.store import Store
from slipstream.engine.frames import wanted
from slipstream.engine.models.captured import CapturedPass, Capturing, Pass
from slipstream.engine.slot import Slot
from slipstream.engine.speculate.drafter import UNREAD, Guesses, Kept, NetworkDrafter, Want
from slipstream.engine.speculate.network.follower import Follower
from slipstream.engine.speculate.network.lanes import Lanes
from slipstream.engine.speculate.network.unroll import Going, Rows, Unrolled
from slipstream.engine.speculate.tails import Tails
from slipstream.kernels.choose.op import RowParams


class Module(Protocol):
    """A network that reads states beside tokens, in the layers of the head's store that are its own."""

    def run(self, batch: Batch, hidden: Tensor, store: Store) -> tuple[Tensor, Tensor]:
        """hidden: [n_rows, d_model] -> what `logits` reads and own states of wanted rows, [n_logits, d_model] each."""

    def logits(self, said: Tensor) -> Tensor:
        """[n_rows, d_model] -> [n_rows, vocab] float32."""


class Head(Protocol):
    """Modules over fused streams of the target."""

    @property
    def taps(self) -> tuple[int, ...]: ...

    @property
    def modules(self) -> Sequence[Module]:
        """At least one: the first makes the first guess, the second the second; the last is looped."""

    def fuse(self, taps: Sequence[Tensor]) -> Tensor:
        """[n_rows, d_target] each -> [n_rows, d_model]."""


@dataclass(frozen=True, slots=True)
class _End:
    """What is left of an accept: where the next accept or a draft goes on."""

    n_past: int
    said: Tensor | None  # [d_model], of module 0's last row: its logits are computed if a draft is asked for
    # [1, d_model] each: states of the modules' last rows, as far as modules have rows.
    carried: Sequence[Tensor]

    def behind(self, k: int) -> Tensor:
        """The state of module k's last row, [1, d_model], or [0, d_model] if it has no row yet."""
        return self.carried[k] if k < len(self.carried) else self.carried[0][:0]


@dataclass(slots=True)
class _Lane:
    """A sequence on its way through the modules: its rows in the current module."""

    slot: Slot
    token_ids: Sequence[int]  # of an accept; the current module reads the last of them
    first: int  # position of the first row
    n_rows: int
    end: _End | None  # of the accept before; None: this is the first
    drafts: bool  # whether a draft may be asked for before the next accept
    said: Tensor | None = None
    carries: list[Tensor] = field(default_factory=list)

    def span(self, n_logits: int) -> Span:
        return Span(
            self.slot.id, self.token_ids[len(self.token_ids) - self.n_rows :], self.first, 0, n_logits
        )

    def rise(self, k: int, states: Tensor) -> Tensor:
        """On to module k, which starts with the row that it lacked and lacks the last row.

        states: [n_rows, d_model], of the module before -> what module k reads, [n_rows, d_model].
        """
        before = states[:0] if self.end is None else self.end.behind(k - 1)
        self.first -= len(before)
        self.n_rows += len(before) - 1
        return torch.cat((before, states[:-1]))


class _Climb:
    """The provisional rows of a draft: those of the module that makes the next guess, up to the row that makes it."""

    def __init__(
        self,
        wants: Sequence[Want],
        states: Tensor,
        last: int,
        ends: Sequence[_End] = (),
        n_lost: Tensor | None = None,
    ) -> None:
        """states: [n_able, d_model], of the rows that made the first guesses; last: the last module.

        ends: of the slots that are able, where there are several modules; n_lost: as for `Unrolled`.
        """
        self.spans: list[Span] = []
        self.token_ids = torch.empty(0, dtype=torch.int64, device=states.device)  # [n_rows]
        self.states = states  # [n_rows, d_model]
        self.n_lost = n_lost  # [n_going] int64
        self._wants = wants
        self._ends = list(ends)  # of the slots that go on, like all below
        self._last = last
        self._guesses = self.token_ids.new_empty((len(states), 0))  # [n_going, n_made], while modules change

    def rise(self, going: Going) -> int:
        """Set up the rows of the next guess; returns its module."""
        if going.n_made > self._last:
            self._go_on(going)
        else:
            self._climb(going)
        return min(going.n_made, self._last)

    def _go_on(self, going: Going) -> None:
        """The last module once more, one position on, with its own state."""
        n_ahead = going.n_made - self._last - 2
        wants = [self._wants[i] for i in going.wants]
        self.spans = [Span(want.slot.id, (UNREAD,), want.n_tokens + n_ahead, 1, 1) for want in wants]
        self.states, self.token_ids = going.of(self.states), going.token_ids
        self.n_lost = None if self.n_lost is None else going.of(self.n_lost)

    def _climb(self, going: Going) -> None:
        """The next module, from the first row that it lacks to position n_past - 1."""
        k = going.n_made
        self._ends = [self._ends[row] for row in going.rows]
        self._guesses = torch.cat((going.of(self._guesses), going.token_ids[:, None]), 1)
        states = [end.behind(k - 1) for end in self._ends]  # [1 or 0, d_model] each
        if k > 1:  # and the rows of the module before, which had no tokens either
            rows = self.states.split_with_sizes([span.n_logits for span in self.spans])
            states = [torch.cat((one, rows[row])) for one, row in zip(states, going.rows, strict=True)]
        counts = [len(one) for one in states]
        self.spans = [
            Span(slot.id, (UNREAD,) * n, slot.n_past - n, n, n if k < self._last else 1)
            for slot, n in zip([self._wants[i].slot for i in going.wants], counts, strict=True)
        ]
        self.token_ids = torch.cat([self._guesses[row, k - n :] for row, n in enumerate(counts)])
        self.states = torch.cat(states)

    def take(self, said: Tensor, states: Tensor) -> Tensor:
        """[n_logits, d_model] each, of the module's rows. Returns what the guesses come from, [n_going, d_model]."""
        counts = [span.n_logits for span in self.spans]
        self.states = states
        return (
            said
            if len(said) == len(counts)
            else torch.stack([one[-1] for one in said.split_with_sizes(counts)])
        )


class DraftHidden(NetworkDrafter):
    """Drafts with a head. Its store has the drafter's name and is fed on every pass of the target."""

    def __init__(self, name: str, head: Head, cache: Cache) -> None:
        self.name = name
        self.taps = head.taps
        self._head = head
        self._follower = Follower(name, head.taps, cache, len(head.modules) - 1)
        self._ends: dict[int, _End] = {}  # by slot id
        self._fed: dict[int, int] = {}  # slot id -> start of an unread pass whose rows a draft has fed
        self._captured: Sequence[CapturedPass] = ()  # of the modules, where passes are captured
        self._lanes: Lanes | None = None  # of the last module

    def capture(self, capturing: Capturing) -> None:
        hidden = self._head.fuse([capturing.stream] * len(self.taps))  # [1, d_model]
        store, last = self._follower.store, self._head.modules[-1]

        def of(module: Module) -> tuple[Pass, Sequence[Tensor]]:
            return lambda batch, inputs: module.run(batch, inputs[0], store), (hidden,)

        def looped(batch: Batch, states: Sequence[Tensor]) -> Sequence[Tensor]:
            said, state = last.run(batch, states[0], store)
            return last.logits(said), state

        self._captured = capturing.passes(store, *map(of, self._head.modules))
        if store.is_positional:
            self._lanes = Lanes(looped, store, capturing.capture, (hidden,))

    def begin(self, slot: Slot) -> None:
        self._ends.pop(slot.id, None)
        self._fed.pop(slot.id, None)

    def end(self, slot: Slot) -> None:
        self.begin(slot)

    def accept(self, kept: Sequence[Kept]) -> None:
        kept = [one for one in kept if not self._was_fed(one)]
        ends = {one.slot.id: self._ends.pop(one.slot.id, None) for one in kept}
        fed = self._follower.take([one for one in kept if self._goes_on(one, ends[one.slot.id])])
        if fed is None:
            return
        lanes = []
        for one in fed.kept:
            slot = one.slot
            successors, n_rows = slot.tokens[one.start + 1 : slot.n_past + 1], slot.n_past - one.start
            lanes.append(_Lane(slot, successors, one.start, n_rows, ends[slot.id], self._may_draft(slot)))
        self._feed(lanes, self._head.fuse(fed.streams))
        for lane in lanes:
            self._ends[lane.slot.id] = _End(lane.slot.n_past, lane.said, lane.carries)
        for one in fed.kept:
            self._follower.commit(one.slot)

    def _was_fed(self, one: Kept) -> bool:
        """Whether a draft behind the pass has fed its rows: then the next draft is made, and nothing is kept for it."""
        if self._fed.pop(one.slot.id, None) != one.start:
            return False
        self._ends[one.slot.id] = _End(one.slot.n_past, None, ())
        self._follower.commit(one.slot)
        return True

    def _goes_on(self, one: Kept, end: _End | None) -> bool:
        """Whether no row is missing between what was fed and what was kept."""
        return one.start == (self._follower.length(one.slot) if end is None else end.n_past)

    def _feed(self, lanes: Sequence[_Lane], hidden: Tensor) -> None:
        """Run the modules over the lanes. hidden: [rows of all lanes, d_model], of the target.

        A module needs the states of all rows of the module before, whether a draft is wanted or not.
        """
        last = len(self._head.modules) - 1
        for k in range(last + 1):
            counts = [lane.n_rows if k < last else int(k == 0 and lane.drafts) for lane in lanes]
            spans = [lane.span(n) for lane, n in zip(lanes, counts, strict=True)]
            said, states = self._run(k, spans, hidden)
            if not any(counts):
                return
            rows = states.split_with_sizes(counts)
            for lane, words, own in zip(lanes, said.split_with_sizes(counts), rows, strict=True):
                lane.said = words[-1].clone() if k == 0 and lane.drafts else lane.said
                lane.carries.append(own[-1:].clone())  # a view would keep all rows alive
            if k < last:
                risen = [lane.rise(k + 1, own) for lane, own in zip(lanes, rows, strict=True)]
                lanes, hidden = [lane for lane in lanes if lane.n_rows], torch.cat(risen)
            if not lanes:
                return

    def draft(self, wants: Sequence[Want], tails: Tails | None = None) -> Guesses | None:
        if tails is not None:
            return self._behind(wants, tails)
        able, ends, said = [], [], []
        for i, want in enumerate(wants):
            end = self._ends.get(want.slot.id)
            if end is None or end.said is None or end.n_past != want.slot.n_past:
                continue
            if self._follower.has_room(want.slot, want.n_max):
                able.append(i)
                ends.append(end)
                said.append(end.said)
        if not able:
            return Unrolled(wants)
        states = torch.cat([end.behind(0) for end in ends])  # [n_able, d_model]
        climb = _Climb(wants, states, len(self._head.modules) - 1, ends)
        return self._unrolled(Unrolled(wants), able, torch.stack(said), climb)

    def _behind(self, wants: Sequence[Want], tails: Tails) -> Guesses | None:
        """Guesses behind an unread pass, for heads of one module.

        It is fed all rows of that pass; those of drafts that were lost are scratch.
        """
        is_simple = len(self._head.modules) == 1 and self._follower.store.is_positional
        if not is_simple or not all(self._keeps_up(want) for want in wants):
            return None
        n_lost, rows = tails.n_lost, [tails.rows[want.slot.id] for want in wants]
        spans = [
            Span(want.slot.id, (UNREAD,) * len(own), want.n_tokens - 1 - len(own), 0, len(own))
            for want, own in zip(wants, rows, strict=True)
        ]
        assert tails.streams is not None
        (index,) = upload((np.concatenate([np.asarray(own, np.int64) for own in rows]),), tails.device)
        hidden = self._head.fuse([one.index_select(0, index) for one in tails.streams.of(self.taps)])
        successors = torch.cat([tails.picks_of(want.slot.id) for want in wants])
        said, states = self._run(0, spans, hidden, successors)  # [n_rows, d_model] each
        self._fed |= {span.slot: span.n_past for span in spans}
        (last,) = upload((np.cumsum([len(own) for own in rows]) - 1,), tails.device)
        last = last - n_lost  # [n_wants]: the row of each slot's last kept token
        climb = _Climb(wants, states[last], 0, n_lost=n_lost)
        return self._unrolled(Unrolled(wants, n_lost), range(len(wants)), said[last], climb)

    def _keeps_up(self, want: Want) -> bool:
        """Whether all rows before the unread pass are fed, and there is room for those after."""
        slot = want.slot
        end = self._ends.get(slot.id)
        fed = end is not None and end.n_past == slot.n_past == len(slot.tokens) - 1
        return fed and self._follower.has_room(slot, len(want.after) + want.n_max)

    def _unrolled(self, unrolled: Unrolled, able: Sequence[int], said: Tensor, climb: _Climb) -> Unrolled:
        """Guess on from what module 0 says, [n_able, d_model]."""
        modules = self._head.modules

        def batch() -> Batch:
            made = self._follower.batch(climb.spans, climb.token_ids)
            if climb.n_lost is not None:
                made.move_back(climb.n_lost, self._follower.page_size)
            return made

        def step(going: Going) -> Rows:
            k = climb.rise(going)
            said, states = self._ran(k, batch(), climb.states)
            return modules[k].logits(climb.take(said, states)), None

        def loop(going: Going, params: RowParams, limits: Sequence[int]) -> tuple[Tensor, Tensor] | None:
            if self._lanes is None or going.n_made < len(modules) or not self._lanes.takes(len(limits)):
                return None
            climb.rise(going)
            return self._lanes(batch(), params, limits, (climb.states,))

        first = modules[0].logits(said)  # [n_able, vocab] float32
        return unrolled.launch(able, (first, None), step, loop)

    def _may_draft(self, slot: Slot) -> bool:
        """Whether a draft may be asked of the head for this slot before its next pass."""
        return slot.n_gap == 1 and slot.speculate.n_max > 0 and self.name in slot.speculate.types

    def _run(
        self, k: int, spans: Sequence[Span], hidden: Tensor, token_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return self._ran(k, self._follower.batch(spans, token_ids), hidden)

    def _ran(self, k: int, batch: Batch, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[n_logits, d_model] each: what module k says, and its states."""
        if batch.frame is None:
            return self._head.modules[k].run(batch, hidden, self._follower.store)
        said, states = self._captured[k](batch, (hidden,))
        return wanted(batch, said), wanted(batch, states)
