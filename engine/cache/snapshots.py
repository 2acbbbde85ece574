"""Copies of recurrent states at page borders, in host memory: what a prefix of a hybrid can be resumed from."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor

Key = tuple[str, bytes]  # (store, prefix key of the page that ends where the snapshot was taken)


class Snapshots:
    """All snapshots of a cache. When the room is full, the least recently used go first."""

    def __init__(self, n_bytes: int) -> None:
        """n_bytes: most host memory for all of them; 0 keeps none."""
        self._most = n_bytes
        self._held: OrderedDict[Key, list[Tensor]] = OrderedDict()
        self.n_bytes = 0

    @property
    def has_room(self) -> bool:
        """Whether any are to be kept."""
        return self._most > 0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: Key) -> bool:
        return key in self._held

    def find(self, key: Key) -> list[Tensor] | None:
        """The states stored under a key, which counts as a use."""
        if key not in self._held:
            return None
        self._held.move_to_end(key)
        return self._held[key]

    def put(self, key: Key, states: Sequence[Tensor]) -> None:
        """Store states; those that were not used for longest make room."""
        size = sum(state.nbytes for state in states)
        if size > self._most or key in self._held:
            return
        while self.n_bytes + size > self._most:
            _, oldest = self._held.popitem(last=False)
            self.n_bytes -= sum(state.nbytes for state in oldest)
        self._held[key] = list(states)
        self.n_bytes += size

    def discard(self, key: Key) -> None:
        """Forget the states stored under a key, if there are any."""
        states = self._held.pop(key, ())
        self.n_bytes -= sum(state.nbytes for state in states)
