"""What waits for something that is short: each owner's items in order of arrival, the owners in turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

T = TypeVar("T")

_NOTHING: Mapping[str, int] = {}


class FairQueue(Generic[T]):
    """However many items an owner has waiting, they cost another owner's next one no more than a turn.

    Not safe to use from several threads. An owner that was served once is remembered: there have to be few of them.
    """

    def __init__(self) -> None:
        # By owner, each item with the number of its arrival; none empty.
        self._items: dict[str, deque[tuple[int, T]]] = {}
        self._served: dict[str, int] = {}  # by owner, the number of the turn it had last
        self._n_added = self._n_turns = 0

    def __len__(self) -> int:
        return sum(map(len, self._items.values()))

    def add(self, owner: str, item: T) -> None:
        self._n_added += 1
        self._items.setdefault(owner, deque()).append((self._n_added, item))

    def pop(self, held: Mapping[str, int] = _NOTHING, may: Callable[[T], bool] = lambda item: True) -> T:
        """The next item leaves: of the owner that holds least, of several the one whose last turn is longest ago.

        held: what each owner has now of that which is short; 0 where it is not named. may: whether an item can be
        served now; others keep their places. Raises ValueError if there is none.
        """
        firsts = {
            owner: next((i for i, (_, item) in enumerate(items) if may(item)), None)
            for owner, items in self._items.items()
        }
        ready = {owner: i for owner, i in firsts.items() if i is not None}
        owner = min(
            ready,
            key=lambda one: (held.get(one, 0), self._served.get(one, 0), self._items[one][ready[one]][0]),
        )
        self._n_turns += 1
        self._served[owner] = self._n_turns
        one = self._items[owner][ready[owner]]
        self._remove(owner, one)
        return one[1]

    def drop(self, is_unwanted: Callable[[T], bool]) -> list[T]:
        """Some items leave, and it was no turn."""
        unwanted = [
            (owner, one) for owner, items in self._items.items() for one in items if is_unwanted(one[1])
        ]
        for owner, one in unwanted:
            self._remove(owner, one)
        return [item for _, (_, item) in unwanted]

    def _remove(self, owner: str, one: tuple[int, T]) -> None:
        self._items[owner].remove(one)
        if not self._items[owner]:
            del self._items[owner]
