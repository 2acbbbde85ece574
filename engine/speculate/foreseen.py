"""What is drafted behind a pass that nobody has read: chosen by what is known before it, guessed on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from torch import Tensor

from slipstream.engine.batch import Download
from slipstream.engine.speculate.drafter import UNREAD, Draft, Want
from slipstream.engine.speculate.tails import Tails


@dataclass(frozen=True, slots=True)
class UnreadDrafts:
    """Drafts that only the device knows."""

    token_ids: Tensor  # [n_drafts] int64, slot after slot; -1 where a row had NaN
    arriving: Download  # the same
    learn: Callable[[], None]  # tells the drafter; to be called before the sequences grow

    def drafts(self, planned: Sequence[Draft]) -> list[Draft]:
        """The planned drafts, slot after slot, with their tokens; waits for these."""
        left, known = iter(self.arriving.read().tolist()), []
        for draft in planned:
            token_ids = list(islice(left, len(draft)))
            n = token_ids.index(-1) if -1 in token_ids else len(token_ids)
            known.append(Draft(token_ids[:n], draft.sources[:n]))
        return known


@dataclass(frozen=True, slots=True)
class Foreseen:
    """Which slots draft, how deep, and who guesses."""

    wants: Sequence[Want] = ()
    name: str = ""  # of the drafter
    # tails: one row per want; None: the drafter has to be asked by the host
    launch: Callable[[Tails], UnreadDrafts | None] = lambda tails: None

    @property
    def drafts(self) -> dict[int, Draft]:
        """By slot id: drafts of the lengths that will be, of tokens that nobody knows."""
        n_drafts = {want.slot.id: want.n_max for want in self.wants}
        return {slot_id: Draft((UNREAD,) * n, (self.name,) * n) for slot_id, n in n_drafts.items()}
