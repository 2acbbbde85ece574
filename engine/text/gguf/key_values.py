"""A GGUF file's key-values with their types held to: every fault names the file, the key and the value."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from slipstream.engine.errors import LoadError

_MOST_SHOWN = 60  # characters of a value in an error
_SURROGATE = re.compile("[\ud800-\udfff]")


class KeyValues:
    """Typed reads of a GGUF's metadata. Each raises `LoadError` for a value of another type."""

    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        """where: the file's name, for errors."""
        self.metadata = metadata
        self.where = where

    def refused(self, key: str, value: Any, reason: str) -> LoadError:
        """The error for a value that cannot be used."""
        shown = repr(value[:_MOST_SHOWN] if isinstance(value, str | list) else value)
        return LoadError(f"{self.where}: {key} = {shown[: 2 * _MOST_SHOWN]}: {reason}")

    def string(self, key: str) -> str | None:
        """A text, or None if the key is absent."""
        value = self.metadata.get(key)
        if value is not None and not isinstance(value, str):
            raise self.refused(key, value, "must be a string")
        return value

    def flag(self, key: str) -> bool | None:
        """A truth value, or None if the key is absent."""
        value = self.metadata.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.refused(key, value, "must be true or false")
        return value

    def token_id(self, key: str, n_tokens: int) -> int | None:
        """An id below `n_tokens`, or None if the key is absent."""
        value = self.metadata.get(key)
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < n_tokens:
            raise self.refused(key, value, f"must be a token id from 0 to {n_tokens - 1}")
        return value

    def strings(self, key: str) -> list[str]:
        """A list of texts, which must be there."""
        value = self._listed(key)
        for i, one in enumerate(value):
            if not isinstance(one, str):
                raise self.refused(f"{key}[{i}]", one, "must be a string")
            if not one.isascii() and _SURROGATE.search(one):
                raise self.refused(f"{key}[{i}]", one, "must be valid Unicode")
        return value

    def integers(self, key: str, length: int) -> list[int]:
        """A list of so many integers, which must be there."""
        value = self._listed(key, length)
        for i, one in enumerate(value):
            if type(one) is not int:
                raise self.refused(f"{key}[{i}]", one, "must be an integer")
        return value

    def numbers(self, key: str, length: int) -> list[float]:
        """A list of so many finite numbers, which must be there."""
        value = self._listed(key, length)
        for i, one in enumerate(value):
            if type(one) not in (int, float) or not abs(one) < math.inf:
                raise self.refused(f"{key}[{i}]", one, "must be a finite number")
        return value

    def _listed(self, key: str, length: int | None = None) -> list[Any]:
        value = self.metadata.get(key)
        if value is None:
            raise LoadError(f"{self.where}: {key} is missing")
        if not isinstance(value, list):
            raise self.refused(key, value, "must be a list")
        if length is not None and len(value) != length:
            raise LoadError(f"{self.where}: {key} has {len(value)} entries, the vocabulary {length} tokens")
        return value
