"""A GGUF file, or the files it was split into, read as the checkpoint folder that it was made of."""

from __future__ import annotations

import mmap
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from slipstream.engine.checkpoint.gguf.dialects import DIALECTS
from slipstream.engine.checkpoint.gguf.header import Header, Stored, read_header, shown
from slipstream.engine.checkpoint.gguf.keys import Keys
from slipstream.engine.checkpoint.gguf.matrices import PLAIN, Matrix, check_kind, map_file, read_stored
from slipstream.engine.checkpoint.gguf.model_config import generation_config, model_config
from slipstream.engine.checkpoint.gguf.names import Recipe, names_in_file, recipes
from slipstream.engine.errors import LoadError

SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)


def read_keys(path: Path) -> Keys:
    """What a file says, and the tensors of all files that it was split into.

    Raises `LoadError` naming the file and what is wrong with it, `UnsupportedModel` for what is not read.
    """
    first = read_header(path)
    tensors = _all_tensors(first)  # before all else: the later parts of a split model have no other keys
    architecture = first.metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise LoadError(f"{path}: general.architecture = {shown(architecture)}, must be a string")
    return Keys(path, first.metadata, tensors, architecture)


def split_files(path: Path) -> list[Path]:
    """The files that a model was split into, by the name of the first; of a whole file that file alone."""
    match = SPLIT.fullmatch(path.name)
    if match is None or not int(match[3]):
        return [path]
    stem, n_files = match[1], int(match[3])
    return [path.with_name(f"{stem}-{i + 1:05}-of-{n_files:05}{path.suffix}") for i in range(n_files)]


def _all_tensors(first: Header) -> dict[str, Stored]:
    """The tensors of the first file and of all that follow it."""
    tensors, n_files = dict(first.tensors), first.metadata.get("split.count", 1)
    paths = split_files(first.path)
    if n_files not in (0, 1) and n_files != len(paths):
        raise LoadError(
            f"{first.path}: split.count = {shown(n_files)}, and the name says it is one of {len(paths)} files"
        )
    if paths[0] != first.path:
        raise LoadError(f"{first.path}: a later part of a split model; name the first, {paths[0].name}")
    for number, path in enumerate(paths[1:], start=1):
        part = read_header(path)
        if part.metadata.get("split.no") != number:
            raise LoadError(f"{path}: split.no = {shown(part.metadata.get('split.no'))}, must be {number}")
        if twice := sorted(tensors.keys() & part.tensors.keys()):
            raise LoadError(f"{path}: tensor {twice[0]} is in an earlier part too")
        tensors |= part.tensors
    expected = first.metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise LoadError(
            f"{first.path}: the parts have {len(tensors)} tensors, split.tensors.count = {shown(expected)}"
        )
    return tensors


def _read_model(path: Path) -> tuple[Keys, dict[str, Any], Mapping[str, Recipe]]:
    """What a file says of its model, config.json, and how tensors are made of what is stored.

    Raises `LoadError`, or `UnsupportedModel` for what `model_config.py`, `dialects.py` and `check_kind` refuse.
    """
    keys = read_keys(path)
    config = model_config(keys)
    for one in keys.tensors.values():
        check_kind(one)
    return keys, config, recipes(keys, DIALECTS[keys.architecture])


def read_configs(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json and generation_config.json of a file's model, as transformers would write them."""
    keys, config, made = _read_model(path)
    kinds = {name: one.stored[0].kind for name, one in made.items() if len(one.shape) == 2}
    narrow = {name.removesuffix(".weight"): kind for name, kind in kinds.items() if kind not in PLAIN}
    if narrow:
        config["block_types"] = narrow
    return config, generation_config(keys.metadata)


class GgufTensors:
    """The tensors of a file under transformers' names, in transformers' arrangement."""

    def __init__(self, path: Path) -> None:
        """Raises as `read_configs`."""
        self.folder = path
        self._keys, _, self._recipes = _read_model(path)
        self._maps: dict[Path, mmap.mmap] = {}

    @property
    def names(self) -> Collection[str]:
        return self._recipes.keys()

    def where(self, name: str) -> str:
        """The file, and the tensor as the file calls it."""
        return " and ".join(one.where for one in self._recipes[name].stored)

    def in_file(self, name: str) -> str:
        """What the file calls a tensor, or would if it had it."""
        if name in self._recipes:
            return " and ".join(one.name for one in self._recipes[name].stored)
        dialect = DIALECTS[self._keys.architecture]
        return names_in_file(name, dialect.rules(self._keys), dialect)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._recipes[name].shape

    def dtype(self, name: str) -> str | None:
        """As safetensors calls it; None for block types."""
        kind = self._recipes[name].stored[0].kind
        return kind if kind in PLAIN else None

    def read(self, name: str) -> Matrix:
        """A tensor, mapped where it is not rearranged. Raises `LoadError` if it does not fit the file's heads."""
        recipe = self._recipes[name]
        for one in recipe.stored:
            if one.path not in self._maps:
                self._maps[one.path] = map_file(one.path)
        stored = [read_stored(self._maps[one.path], one, recipe.part) for one in recipe.stored]
        try:
            made = recipe.make(*stored)
        except ValueError as error:
            raise LoadError(f"{self.where(name)} {error}") from None
        if isinstance(made, Tensor) and made.shape != recipe.shape:
            shapes = [list(one.shape) for one in recipe.stored]
            raise LoadError(
                f"{self.where(name)} has shape {shapes[0]}, which does not become {list(recipe.shape)}"
            )
        return made

    def close(self) -> None:
        """Let the files go. What is still in use, as an embedding, stays mapped, and is read again when needed."""
        for one in self._maps.values():
            one.madvise(mmap.MADV_DONTNEED)
        self._maps.clear()
