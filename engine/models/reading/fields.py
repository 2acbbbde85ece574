"""Typed reading of a JSON file's fields. A wrong kind of value is refused by name, never converted."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.engine.errors import LoadError, UnsupportedModel
from slipstream.engine.text.json_file import read_object

MOST_PARTS = 10_000  # layers or experts: each is an object, made before any tensor is looked for


class Fields:
    """One JSON object with the file and key that it came from, for messages. Null counts as absent."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    @classmethod
    def read(cls, path: Path) -> Fields:
        """The object in a JSON file. Raises `LoadError` if there is none."""
        if not path.exists():
            raise LoadError(f"{path}: no such file")
        return cls(read_object(path), str(path))

    def over(self, defaults: Mapping[str, Any]) -> Fields:
        """The same with other values for what is absent."""
        given = {key: value for key, value in self.values.items() if value is not None}
        return Fields({**self.values, **defaults, **given}, self.where)

    def refuse(self, key: str, reason: str) -> UnsupportedModel:
        """The error that names this file, the key and its value."""
        return UnsupportedModel(f"{self.where}: {key} = {json.dumps(self.values.get(key))}: {reason}")

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.values.get(key) is not None

    def count(self, key: str, default: int | None = None, least: int = 1, most: int = 2**31 - 1) -> int:
        """A whole number from `least` to `most`."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.refuse(key, f"must be a whole number of at least {least}")
        if value > most:
            raise self.refuse(key, f"is more than {most}, which no model has")
        return value

    def experts(self, of_all: str, of_a_token: str) -> tuple[int, int]:
        """How many experts there are, and how many of them a token goes through."""
        n_experts, top_k = self.count(of_all, most=MOST_PARTS), self.count(of_a_token)
        if top_k > n_experts:
            raise self.refuse(of_a_token, f"must be at most the number of experts, {n_experts}")
        return n_experts, top_k

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self._value(key, default)
        try:
            if not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value):
                return float(value)
        except OverflowError:  # a whole number beyond all floats
            pass
        raise self.refuse(key, "must be a finite number")

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.number(key, default)
        if value <= 0:
            raise self.refuse(key, "must be above 0")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        """True or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, "must be true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.refuse(key, "must be a string")
        return value

    def names(self, key: str, known: Sequence[str], n: int) -> list[str] | None:
        """A list of n strings, each of them known; None if the key is absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != n or any(one not in known for one in value):
            raise self.refuse(key, f"must name {' or '.join(known)} for {n} layers")
        return value

    def child(self, key: str) -> Fields:
        """The object under a key; an empty object if the key is absent."""
        value = self._value(key, {})
        if not isinstance(value, dict):
            raise self.refuse(key, "must be an object")
        return Fields(value, f"{self.where}: {key}")

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise UnsupportedModel(f"{self.where}: {key} is missing")
        return value
