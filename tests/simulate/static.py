"""A planner that never learns: the same drafters and the same length for every slot, as other servers are set up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from slipstream.engine.slot import Slot
from slipstream.engine.speculate.drafter import DeviceDrafter, Draft, Drafter, Guess, Kept, TextDrafter
from tests.simulate.planner import Pass, Verified, Want, measured


class Static:
    """Asks all drafters of `types` in their order; for each slot the first that has a guess wins.

    That is the chain with `by_value=False` and lengths that are not adaptive, in a fifth of its time.
    """

    def __init__(self, drafters: Sequence[Drafter], types: Sequence[str], n_max: int) -> None:
        """n_max: tokens of a draft."""
        self._drafters = [one for one in drafters if one.name in types]
        self._networks = [one for one in self._drafters if isinstance(one, DeviceDrafter)]
        self.types = tuple(types)
        self.n_max = n_max

    def warm_up(self, seconds_of: Callable[[int], float], most: int) -> None:
        measured(seconds_of, most)

    def begin(self, slot: Slot) -> None:
        for network in self._networks:
            network.begin(slot)

    def draft(self, wants: Sequence[Want], coming: Pass) -> Mapping[int, Draft]:
        found: dict[int, Draft] = {}
        for drafter in self._drafters:
            asked = [want for want in wants if want.slot.id not in found]
            if not asked:
                break
            for want, one in zip(asked, _guesses(drafter, asked), strict=True):
                if one:
                    found[want.slot.id] = Draft(tuple(one.token_ids), (drafter.name,) * len(one))
        return found

    def measured(self, n_rows: int, seconds: float) -> None:
        pass

    def settle(self, verified: Sequence[Verified], coming: Pass) -> None:
        if self._networks:
            kept = [Kept(work.slot, work.draft, n_accepted, work.start) for work, n_accepted in verified]
            for network in self._networks:
                network.accept(kept)

    def end(self, slot: Slot) -> None:
        pass


def _guesses(drafter: Drafter, wants: Sequence[Want]) -> Sequence[Guess]:
    if isinstance(drafter, TextDrafter):
        return drafter.draft(wants)
    assert isinstance(drafter, DeviceDrafter)
    made = drafter.draft(wants)
    assert made is not None
    return made.read()
