"""The drafter: four verbs. Whatever a drafter does, it changes how soon tokens come, never which."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from engine.slot import Slot


@dataclass(frozen=True, slots=True)
class Want:
    """A slot that may carry drafts in the coming pass."""

    slot: Slot
    n_max: int  # at least 1


@dataclass(frozen=True, slots=True)
class Draft:
    """Guessed continuation of one slot's tokens."""

    token_ids: Sequence[int] = ()
    source: str = ""  # the drafter that guessed; set by the chain

    def __len__(self) -> int:
        return len(self.token_ids)


NO_DRAFT = Draft()


@dataclass(frozen=True, slots=True)
class Kept:
    """What one target pass added to one slot; `slot.tokens` already holds it."""

    slot: Slot
    draft: Draft
    n_accepted: int


class Drafter(ABC):
    """Proposes tokens the target may accept.

    One instance serves all slots. State kept per slot is a cache of `slot.tokens` and must survive `begin`.
    """

    name: str

    def begin(self, slot: Slot) -> None:  # noqa: B027  most drafters keep nothing between rounds
        """A new sequence in this slot, or the same one starting over from its tokens."""

    @abstractmethod
    def draft(self, wants: Sequence[Want]) -> list[Draft]:
        """One draft per want, at most `n_max` tokens, empty where there is nothing to say."""

    def accept(self, kept: Sequence[Kept]) -> None:  # noqa: B027
        """Told after every target pass, for prompt chunks and verified drafts alike, whoever drafted."""

    def end(self, slot: Slot) -> None:  # noqa: B027
        """The slot's request is over or was preempted."""
