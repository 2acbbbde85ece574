"""Typed reading of a GGUF file's metadata. A wrong kind of value is refused by the file's own name for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.engine.checkpoint.gguf.header import Stored, shown
from slipstream.engine.errors import LoadError, UnsupportedModel

MOST = 2**31 - 1
MOST_LAYERS = 10_000


@dataclass(frozen=True, slots=True)
class Keys:
    """The metadata of one architecture, and the tensors beside it. `name` below is what follows the architecture's."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Stored]
    architecture: str
    heeded: set[str] = field(default_factory=set, compare=False)  # names of what was read so far

    def refuse(self, name: str, reason: str) -> UnsupportedModel:
        """The error that names file, key and value."""
        key = self.full(name)
        return UnsupportedModel(f"{self.path}: {key} = {shown(self.metadata.get(key))}: {reason}")

    def missing(self, name: str) -> LoadError:
        """The error for a key that the file must have."""
        return LoadError(f"{self.path}: {self.full(name)} is missing")

    def full(self, name: str) -> str:
        """The key as the file has it."""
        return f"{self.architecture}.{name}"

    def has(self, name: str) -> bool:
        return self.full(name) in self.metadata

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number. Where the file has one for each layer, they must be equal."""
        value = self._value(name, default)
        if isinstance(value, list):
            if not value or any(one != value[0] for one in value):
                raise self.refuse(name, "layers of different shapes are not supported")
            value = value[0]
        if type(value) is not int or not 0 <= value <= MOST:
            raise self.refuse(name, f"must be a whole number from 0 to {MOST}")
        return value

    def counts(self, name: str, n: int) -> list[int]:
        """A whole number for each of n layers; where the file has only one, it is all layers'."""
        value = self._value(name, None)
        if not isinstance(value, list):
            return [self.count(name)] * n
        if len(value) != n or not all(type(one) is int and 0 <= one <= MOST for one in value):
            raise self.refuse(name, f"must be a list of {n} whole numbers from 0 to {MOST}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number: the shortest decimal that is stored so, as 1e-6 of the float32 next to it."""
        value = self._value(name, default)
        if not _is_finite(value):
            raise self.refuse(name, "must be a finite number")
        return float(str(np.float32(value)))

    def numbers(self, name: str, n: int) -> list[float]:
        """A finite number for each of n layers, as `number`; where the file has only one, it is all layers'."""
        value = self._value(name, None)
        if not isinstance(value, list):
            return [self.number(name)] * n
        if len(value) != n or not all(_is_finite(one) for one in value):
            raise self.refuse(name, f"must be a list of {n} finite numbers")
        return [float(str(np.float32(one))) for one in value]

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._value(name, default)
        if type(value) is not bool:
            raise self.refuse(name, "must be true or false")
        return value

    def text(self, name: str, default: str) -> str:
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.refuse(name, "must be a string")
        return value

    def flags(self, name: str, n: int) -> list[bool] | None:
        """A truth value for each of n layers, None if the file has none."""
        self.heeded.add(name)
        value = self.metadata.get(self.full(name))
        if value is not None and (not isinstance(value, list) or len(value) < n):
            raise self.refuse(name, f"must be a list of {n} values")
        return None if value is None else [bool(one) for one in value[:n]]

    @property
    def n_layers(self) -> int:
        """Layers of the model, without those of multi-token prediction, which follow them in the file."""
        n_layers = self.count("block_count")
        if n_layers > MOST_LAYERS:
            raise self.refuse("block_count", f"is more than {MOST_LAYERS}, which no model has")
        return n_layers - self.count("nextn_predict_layers", 0)

    @property
    def n_kv_heads(self) -> int:
        return self.count("attention.head_count_kv", self.count("attention.head_count"))

    @property
    def d_head(self) -> int:
        """Width of a head's queries, keys and values; of latent attention of what is rotated."""
        if self.has("attention.kv_lora_rank"):
            return self.count("rope.dimension_count")
        d_head = self.d_key
        if self.count("attention.value_length", d_head) != d_head:
            raise self.refuse("attention.value_length", f"must be attention.key_length = {d_head}")
        return d_head

    @property
    def d_key(self) -> int:
        """Width of a head's queries and keys."""
        return self._head_width("attention.key_length")

    @property
    def d_value(self) -> int:
        """Width of a head's values."""
        return self._head_width("attention.value_length")

    def tensor(self, name: str) -> Stored:
        """A tensor that the config is read from. Raises `LoadError` if it is not there."""
        if name not in self.tensors:
            raise LoadError(f"{self.path}: tensor {name} is missing")
        return self.tensors[name]

    def _head_width(self, name: str) -> int:
        """Under a key, or as it follows from the number of heads."""
        if self.has(name):
            return self.count(name)
        return self.count("embedding_length") // max(self.count("attention.head_count"), 1)

    def _value(self, name: str, default: Any) -> Any:
        self.heeded.add(name)
        value = self.metadata.get(self.full(name), default)
        if value is None:
            raise self.missing(name)
        return value


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
