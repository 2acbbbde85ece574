"""The interface of drafters, which propose tokens for the target to verify: `begin`, `draft`, `accept`, `end`.

A drafter changes how soon tokens come, never which. There are two kinds. A text drafter reads a slot's tokens and
answers at once. A device drafter, nearly always a network, guesses on a device, so its answer may be unread: the tokens
lie where the next pass can take them, and `read` waits for them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from slipstream.engine.drafting import WhyNot
from slipstream.engine.layers.decoder import Taps
from slipstream.engine.models.captured import Capturing
from slipstream.engine.slot import Slot
from slipstream.engine.speculate.tails import Tails

UNREAD = 0  # stands for a token that is only on the device


@dataclass(frozen=True, slots=True)
class Want:
    """A slot that may carry drafts in the coming pass.

    `after` is what follows the slot's tokens before the guess: a draft that a text drafter is to continue; or, behind
    an unread pass, what that adds if it keeps all its drafts, with `UNREAD` for tokens that are only on the device.
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


class Guesses(Protocol):
    """A device drafter's guesses, one per want, that may be unread."""

    @property
    def token_ids(self) -> Tensor:
        """[n_guesses of all wants] int64 on the device, want after want, as many as each wants; -1 where NaN."""

    def read(self) -> list[Guess]:
        """Wait for them. To be called once, when the host has the sequences up to where the guesses begin."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens for the target to verify in one slot. `sources[i]` is the drafter that guessed `token_ids[i]`."""

    token_ids: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    # Probability that a token is accepted together with all before it; never increasing. Empty: unknown.
    survival: NDArray[np.float64] = field(default_factory=lambda: np.empty(0), compare=False)  # [n_tokens]
    why_not: WhyNot | None = field(default=None, compare=False)  # of no tokens, if the request asks

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def author(self) -> str | None:
        """The drafter of most of its tokens, of equal shares the first; None: it has no tokens."""
        return max(dict.fromkeys(self.sources), key=self.sources.count, default=None)

    def first(self, n: int) -> Draft:
        """Its first n tokens."""
        return Draft(self.token_ids[:n], self.sources[:n], self.survival[:n])

    def followed_by(self, other: Draft) -> Draft:
        """This draft and, if all of it is accepted, the other."""
        if not self or not other:
            return self
        survival = np.concatenate((self.survival, self.survival[-1] * other.survival))
        return Draft(self.token_ids + other.token_ids, self.sources + other.sources, survival)


NO_DRAFT = Draft()


@dataclass(frozen=True, slots=True)
class Call:
    """What was asked of a drafter at once, for all slots together."""

    name: str
    n_positions: int  # guessed one after another: of the longest draft
    n_fed: int  # rows that it was fed before


@dataclass(frozen=True, slots=True)
class Drafts:
    """The drafts of a pass, that may be unread."""

    by_slot: Mapping[int, Draft]  # by slot id; unread: of the lengths that will be, with `UNREAD` for tokens
    token_ids: Tensor | None = None  # [n_drafted of all slots] int64 on the device; None: they are read
    # The same once they are read, and the drafters' own records brought up to date; called once, as `Guesses.read`.
    read: Callable[[], Mapping[int, Draft]] | None = None
    call: Call | None = None  # that made them, if they are unread


NO_DRAFTS = Drafts({})


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

    A single instance serves all slots. State kept per slot is a cache of `slot.tokens` and must survive `begin`.
    """

    name: str

    def begin(self, slot: Slot) -> None:  # noqa: B027  most drafters keep nothing between rounds
        """A new sequence in this slot, or the same sequence starting over from its tokens."""

    def accept(self, kept: Sequence[Kept]) -> None:  # noqa: B027
        """What target passes added to slots. A text drafter is handed only those that verified its tokens."""

    def end(self, slot: Slot) -> None:  # noqa: B027
        """The slot's request is over."""

    def close(self) -> None:  # noqa: B027
        """The server shuts down: what is to outlive the process is written now."""


class TextDrafter(Drafter):
    """A drafter that only reads text.

    A guess costs so little that it is made wherever it may pay (`decide/trials.py`), used or not. The drafter reads all
    it needs off the slot when it is asked.
    """

    def draft(self, wants: Sequence[Want]) -> list[Guess]:
        """One guess per want."""
        return [self.guess(want) for want in wants]

    @abstractmethod
    def guess(self, want: Want) -> Guess:
        """At most `n_max` tokens, empty if there is no guess."""


class DeviceDrafter(Drafter):
    """A drafter that guesses on a device, asked only where it promises more than other drafts."""

    longest: int = 64  # tokens a guess can have
    # Residual streams of the target that the drafter reads (`engine.layers.decoder.Taps`). They exist only while the
    # target computes a token, so it follows every pass of the slots that use it. It runs only when it is asked.
    taps: tuple[int, ...] = ()
    # Whether it runs no network and guesses from a slot's tokens alone. It then promises nothing where text drafters
    # have been asked, and takes their part behind an unread pass, whose tokens they do not see.
    reads_text: bool = False

    def capture(self, capturing: Capturing) -> None:
        """Capture the drafter's passes, so that they can be replayed. Called once, before the first sequence."""

    def end(self, slot: Slot) -> None:
        """The slot's request is over; what is kept of it goes, as before another sequence."""
        self.begin(slot)

    def follows(self, slot: Slot) -> bool:
        """Whether it needs to be handed what a pass has added to the slot (`accept`)."""
        return True

    def n_unfed(self, slot: Slot) -> int:
        """Tokens of the slot that have to be fed before it can guess, were it asked now."""
        return 0

    @abstractmethod
    def draft(self, wants: Sequence[Want], tails: Tails | None = None) -> Guesses | None:
        """Guesses of at most `n_max` tokens for each want.

        tails: where an unread pass ends, a row per want, for guesses behind that pass. None is returned where the host
        has to read that pass first.
        """
