"""The drafter: five verbs. Whatever a drafter does, it changes how soon tokens come, never which."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from slipstream.engine.layers.decoder import Taps
from slipstream.engine.models.captured import Capturing
from slipstream.engine.slot import Slot
from slipstream.engine.speculate.tails import Tails

UNREAD = 0  # stands for a token that only the device knows


@dataclass(frozen=True, slots=True)
class Want:
    """A slot that may carry drafts in the coming pass.

    `after` is a draft it has so far, which the drafter is to continue; only free drafters are asked to. For `ahead` it
    is what a running pass adds if it keeps all drafts: these, if the host knows them, and a token that nobody has read.
    """

    slot: Slot
    n_max: int  # at least 1; counts what is to be added
    after: Sequence[int] = ()

    @property
    def n_tokens(self) -> int:
        """Tokens before the guess, `after` included."""
        return len(self.slot.tokens) + len(self.after)

    def context(self, n: int) -> NDArray[np.int32]:
        """The last tokens to be continued, `after` included: [at most n] int32."""
        history = self.slot.history
        if not self.after:
            return history[max(0, len(history) - n) :]
        tail = np.asarray(self.after, dtype=np.int32)
        n_history = max(0, n - len(tail))
        context: NDArray[np.int32] = np.concatenate((history[max(0, len(history) - n_history) :], tail))
        return context[-n:]


@dataclass(frozen=True, slots=True)
class Guess:
    """A drafter's continuation of one slot's tokens."""

    token_ids: Sequence[int] = ()
    # The drafter's own estimate, per token, that it is accepted if those before it are; empty: it has none.
    survival: Sequence[float] = ()

    def __len__(self) -> int:
        return len(self.token_ids)


NO_GUESS = Guess()


@dataclass(frozen=True, slots=True)
class Unread:
    """Guesses that only the device knows."""

    token_ids: Tensor  # [n_guesses of all wants] int64, want after want, as many as each wants
    # Waits for them. Called once, when the sequences are known up to where they begin.
    read: Callable[[], list[Guess]]


@dataclass(frozen=True, slots=True)
class Draft:
    """What the target is to verify for one slot. `sources[i]` is the drafter that guessed `token_ids[i]`."""

    token_ids: Sequence[int] = ()
    sources: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.token_ids)


NO_DRAFT = Draft()


@dataclass(frozen=True, slots=True)
class Streams:
    """The target's residual streams of a pass, and which of their rows are a span's."""

    taps: Taps
    first: int  # row of the span's first token


@dataclass(frozen=True, slots=True)
class Kept:
    """What one target pass added to one slot; `slot.tokens` already holds it.

    Tokens `start` … `slot.n_past` - 1 were computed and kept, and each has its successor in `slot.tokens`.
    """

    slot: Slot
    draft: Draft
    n_accepted: int
    start: int = 0
    streams: Streams | None = None  # of those tokens, row by row; None if no drafter reads any


class Drafter(ABC):
    """Proposes tokens the target may accept.

    One instance serves all slots. State kept per slot is a cache of `slot.tokens` and must survive `begin`.
    """

    name: str
    # Whether a drafter only reads text. A draft then costs so little that one is made wherever it may pay
    # (`allowance.py`), used or not, and all that the drafter must know it reads off the slot when it is asked.
    is_free: bool = True
    longest: int = 64  # tokens a guess can have; a network is never asked for more
    # Residual streams of the target that the drafter reads (`engine.layers.decoder.Taps`). They exist only while the
    # target computes a token, so a drafter with taps is told of every pass of every slot, drafting or not.
    taps: tuple[int, ...] = ()

    def capture(self, capturing: Capturing) -> None:  # noqa: B027  most drafters have no passes
        """Capture the drafter's passes, so that they can be replayed. Called once, before the first sequence."""

    def begin(self, slot: Slot) -> None:  # noqa: B027  most drafters keep nothing between rounds
        """A new sequence in this slot, or the same one starting over from its tokens."""

    @abstractmethod
    def draft(self, wants: Sequence[Want]) -> list[Guess]:
        """One guess per want, at most `n_max` tokens, empty where there is nothing to say."""

    def ahead(self, wants: Sequence[Want], tails: Tails) -> Unread | None:
        """Guesses behind a pass that is still running, made without the host; None where the host has to look first.

        tails: where that pass ends, one row per want. `n_max` of every want is at least 1.
        """
        return None

    def accept(self, kept: Sequence[Kept]) -> None:  # noqa: B027
        """Told after every target pass, for prompt chunks and verified drafts alike, whoever drafted.

        A free drafter is told of passes only in which tokens of its own were verified.
        """

    def rollback(self, slot: Slot) -> None:
        """`slot.tokens` has become shorter, cut from outside."""
        self.begin(slot)

    def end(self, slot: Slot) -> None:  # noqa: B027
        """The slot's request is over."""

    def close(self) -> None:  # noqa: B027
        """The server shuts down: what is to outlive it is written now."""
