"""A weight in the layout of one implementation."""

from __future__ import annotations

from typing import Protocol


class Packed(Protocol):
    """A weight in the layout of one implementation; only that implementation's `linear` takes it."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...
