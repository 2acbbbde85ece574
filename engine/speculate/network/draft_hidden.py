"""Drafters that read the target's hidden states and then their own: EAGLE-3 and MTP heads.

A head is a chain of modules, most often a single one. With tokens x and the target's state at position p for s⁰_p,
module k (counted from 0) has a row per position,

    s^{k+1}_p = module k (s^k_p, x_{p+1+k}; its own rows before p), which predicts x_{p+2+k}

(the pairing rule of EAGLE, Li et al. 2503.01840, and of DeepSeek-V3, arXiv 2412.19437, 2.2). The last module is looped:
past the position where it makes its guess it takes its own state of the row before for s^k. In heads that are no chain
all modules read s⁰ where those of a chain read s^k (MiMo-V2).

**What is known.** When tokens up to x_n are known (the target has computed n of them, `slot.n_past`), module k has its
tokens for the positions before n - k. So every pass brings each module the same tokens, at positions shifted back by k:

    tokens                       x_1 x_2 x_3 x_4 | x_5 x_6      two feeds, n = 4 and n = 6
    positions of module 0         0   1   2   3  |  4   5
    positions of module 1             0   1   2  |  3   4       the state of row 3 waits for x_5
    positions of module 2                 0   1  |  2   3

Nothing runs until a guess is asked for; the target's states are kept until then (`backlog.py`). All modules are fed
from the first row that the last module lacks: the others run a row or two again, and nothing but rows lasts between two
guesses. The tokens are known by then, so module 0 lacks nothing in the end, and its last row yields the first guess.

**What is guessed.** Guess j, from 0, is module j's at position n - 1. The rows which that module lacks, n - j … n - 1,
are run with guesses for tokens; they are scratch past the module's length, and run again when the tokens are there.

**What is adopted.** A prefix from the cache has all its rows in all modules (the store's length is that of the last
module): all modules start at its end. Its last rows, k + 1 in module k, have read tokens behind it, of the sequence
that made it; they cost a guess if the text goes on differently.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from slipstream.engine.speculate.drafter import UNREAD, DeviceDrafter, Guesses, Kept, Want
from slipstream.engine.speculate.network.backlog import Backlog
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

    @property
    def is_chained(self) -> bool:
        """Whether a module reads the states of the module before; else all read those of the target."""

    def fuse(self, taps: Sequence[Tensor]) -> Tensor:
        """[n_rows, d_target] each -> [n_rows, d_model]."""


# What feeding leaves of a slot, per module as far as modules have rows: what the next module reads at its last row,
# [1, d_model]; of a head of one module its own state.
_Ends = Sequence[Tensor]


class _Climb:
    """The provisional rows of a draft: those of the module that makes the next guess, up to the row that makes it."""

    def __init__(
        self,
        wants: Sequence[Want],
        states: Tensor,
        head: Head,
        ends: Sequence[_Ends] = (),
        n_lost: Tensor | None = None,
    ) -> None:
        """states: [n_able, d_model], of the rows that made the first guesses.

        ends: of the slots that are able, where there are several modules; n_lost: as for `Unrolled`.
        """
        self.spans: list[Span] = []
        self.token_ids = torch.empty(0, dtype=torch.int64, device=states.device)  # [n_rows]
        self.states = states  # [n_rows, d_model]
        self.n_lost = n_lost  # [n_going] int64
        self._wants = wants
        self._ends = list(ends)  # of the slots that go on, like all below
        self._last = len(head.modules) - 1
        self._is_chained = head.is_chained
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
        if not self._is_chained:  # of the last k rows, or of as many as there are, in their order
            states = [torch.cat([*reversed(ends[:k])]) for ends in self._ends]
        else:
            # Of the last row that the module before was fed, [1 or 0, d_model] each.
            states = [ends[k - 1] if k <= len(ends) else ends[0][:0] for ends in self._ends]
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


class DraftHidden(DeviceDrafter):
    """Drafts with a head. Its store has the drafter's name and is fed when a draft is asked for."""

    def __init__(self, name: str, head: Head, cache: Cache, n_context: int) -> None:
        """n_context: as for `Backlog`."""
        self.name = name
        self.taps = head.taps
        self._head = head
        self._backlog = Backlog(name, head.taps, cache, n_context, len(head.modules) - 1)
        self._fed: dict[int, int] = {}  # slot id -> start of an unread pass whose rows a draft has fed
        self._captured: Sequence[CapturedPass] = ()  # of the modules, where passes are captured
        self._lanes: Lanes | None = None  # of the last module

    def capture(self, capturing: Capturing) -> None:
        hidden = self._head.fuse([capturing.stream] * len(self.taps))  # [1, d_model]
        store, last = self._backlog.store, self._head.modules[-1]

        def of(module: Module) -> tuple[Pass, Sequence[Tensor]]:
            return lambda batch, inputs: module.run(batch, inputs[0], store), (hidden,)

        def looped(batch: Batch, states: Sequence[Tensor]) -> Sequence[Tensor]:
            said, state = last.run(batch, states[0], store)
            return last.logits(said), state

        self._captured = capturing.passes(store, *map(of, self._head.modules))
        if store.is_positional and capturing.captures_loops:
            self._lanes = Lanes(looped, store, capturing.capture, (hidden,))

    def begin(self, slot: Slot) -> None:
        self._backlog.forget(slot)
        self._fed.pop(slot.id, None)

    def accept(self, kept: Sequence[Kept]) -> None:
        self._backlog.note([one for one in kept if not self._was_fed(one)])

    def _was_fed(self, one: Kept) -> bool:
        """Whether a draft behind the pass has fed its rows."""
        if self._fed.pop(one.slot.id, None) != one.start:
            return False
        self._backlog.commit(one.slot)
        return True

    def n_unfed(self, slot: Slot) -> int:
        return self._backlog.n_unfed(slot)

    def draft(self, wants: Sequence[Want], tails: Tails | None = None) -> Guesses | None:
        if tails is not None:
            return self._behind(wants, tails)
        able, fed = [], []
        for i, want in enumerate(wants):
            rows = self._backlog.unfed(want.slot)
            if rows is not None and not rows:
                rows = self._backlog.last(want.slot)
            if rows and self._backlog.reserve(want.slot, rows, want.n_max):
                able.append(i)
                fed.append((want.slot, rows))
        if not able:
            return Unrolled(wants)
        said, ends = self._feed(fed)
        climb = _Climb(wants, torch.cat([one[0] for one in ends]), self._head, ends)
        return self._unrolled(Unrolled(wants), able, said, climb)

    def _feed(self, fed: Sequence[tuple[Slot, range]]) -> tuple[Tensor, Sequence[_Ends]]:
        """Run the modules over these rows of slots, up to each slot's last.

        Returns what module 0 says of each last row, [n_slots, d_model], and what is left of each slot. A module of a
        chain needs the states of all rows of the module before.
        """
        last, hidden = len(self._head.modules) - 1, self._head.fuse(self._backlog.states(fed))
        first_said, left = hidden, [list[Tensor]() for _ in fed]
        for k in range(last + 1):
            having = [i for i, (_, rows) in enumerate(fed) if len(rows) > k]
            spans = [_span(*fed[i], k, whole=k < last) for i in having]
            if not spans:
                break
            said, states = self._run(k, self._backlog.batch(spans), hidden)  # [n_logits of all, d_model] each
            if k == last > 0:
                break
            if k < last and not self._head.is_chained:
                states = hidden  # all rows are wanted of a module that is not the last
            ends = np.cumsum([span.n_logits for span in spans])
            (index,) = upload((ends - 1,), states.device)
            first_said = said[index] if k == 0 else first_said
            for i, one in zip(having, states[index][:, None], strict=True):
                left[i].append(one)
            if k < last:
                hidden = torch.cat(
                    [states[end - span.n_logits : end - 1] for end, span in zip(ends, spans, strict=True)]
                )
        for slot, _ in fed:
            self._backlog.commit(slot)
        return first_said, left

    def _behind(self, wants: Sequence[Want], tails: Tails) -> Guesses | None:
        """Guesses behind an unread pass, for heads of one module.

        It is fed all rows of that pass; those of drafts that were lost are scratch.
        """
        is_simple = len(self._head.modules) == 1 and self._backlog.store.is_positional
        n_lost = tails.n_lost
        if not is_simple or not self._catch_up(wants):
            return None
        rows = [tails.rows[want.slot.id] for want in wants]
        spans = [
            Span(want.slot.id, (UNREAD,) * len(own), want.n_tokens - 1 - len(own), 0, len(own))
            for want, own in zip(wants, rows, strict=True)
        ]
        assert tails.streams is not None
        (index,) = upload((np.concatenate([np.asarray(own, np.int64) for own in rows]),), tails.device)
        hidden = self._head.fuse([one.index_select(0, index) for one in tails.streams.of(self.taps)])
        successors = torch.cat([tails.picks_of(want.slot.id) for want in wants])
        said, states = self._run(0, self._backlog.batch(spans, successors), hidden)  # [n_rows, d_model] each
        self._fed |= {span.slot: span.n_past for span in spans}
        (last,) = upload((np.cumsum([len(own) for own in rows]) - 1,), tails.device)
        last = last - n_lost  # [n_wants]: the row of each slot's last kept token
        climb = _Climb(wants, states[last], self._head, n_lost=n_lost)
        return self._unrolled(Unrolled(wants, n_lost), range(len(wants)), said[last], climb)

    def _catch_up(self, wants: Sequence[Want]) -> bool:
        """Feed all rows before the unread pass; whether they are there then, and room for those after."""
        fed = []
        for want in wants:
            slot = want.slot
            rows = self._backlog.unfed(slot)
            if rows is None or slot.n_past != len(slot.tokens) - 1:
                return False
            if not self._backlog.reserve(slot, rows, len(want.after) + want.n_max):
                return False
            fed += [(slot, rows)] if rows else []
        if fed:
            self._feed(fed)
        return True

    def _unrolled(self, unrolled: Unrolled, able: Sequence[int], said: Tensor, climb: _Climb) -> Unrolled:
        """Guess on from what module 0 says, [n_able, d_model]."""
        modules = self._head.modules

        def batch() -> Batch:
            made = self._backlog.batch(climb.spans, climb.token_ids)
            if climb.n_lost is not None:
                made.move_back(climb.n_lost, self._backlog.page_size)
            return made

        def step(going: Going) -> Rows:
            k = climb.rise(going)
            said, states = self._run(k, batch(), climb.states)
            return modules[k].logits(climb.take(said, states)), None

        def loop(going: Going, params: RowParams, limits: Sequence[int]) -> tuple[Tensor, Tensor] | None:
            if self._lanes is None or going.n_made < len(modules) or not self._lanes.takes(len(limits)):
                return None
            climb.rise(going)
            return self._lanes(batch(), params, limits, (climb.states,))

        first = modules[0].logits(said)  # [n_able, vocab] float32
        return unrolled.launch(able, (first, None), step, loop)

    def _run(self, k: int, batch: Batch, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[n_logits, d_model] each: what module k says, and its states."""
        if batch.frame is None:
            return self._head.modules[k].run(batch, hidden, self._backlog.store)
        said, states = self._captured[k](batch, (hidden,))
        return wanted(batch, said), wanted(batch, states)


def _span(slot: Slot, rows: range, k: int, *, whole: bool) -> Span:
    """Module k over those of the rows that it has; they read tokens k + 1 further on. whole: all states are wanted."""
    token_ids = slot.tokens[rows.start + 1 + k : rows.stop + 1]
    return Span(slot.id, token_ids, rows.start, 0, len(token_ids) if whole else 1)
