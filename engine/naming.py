"""Names that users give: of settings and values, with the name they may have meant, of drafters and of models."""

from __future__ import annotations

import os
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

from slipstream.engine.errors import LoadError

GGUF = ".gguf"
# What `--spec-type` takes, in the order of `speculate/registry.py`, which has the same names and cannot be imported by
# those who read a command line; `draft-simple` is llama.cpp's name of `draft-model`, `ngram-gpu` nearly vLLM's of
# `ngram-device`.
DRAFTERS = (
    "forced",
    "prediction",
    "ngram-simple",
    "ngram-map-k",
    "ngram-map-k4v",
    "ngram-mod",
    "ngram-cache",
    "suffix",
    "draft-assistant",
    "draft-model",
    "draft-simple",
    "draft-eagle3",
    "draft-mtp",
    "draft-dspark",
    "draft-dflash",
    "ngram-device",
    "ngram-gpu",
)
TEST_DRAFTERS = ("garbage", "synthetic")  # not offered
NO_DRAFTER, ALL_DRAFTERS = "none", "auto"
# What `--chat-format` takes, the names in `server/openai/formats/known.py` among it.
CHAT_FORMATS = (
    "auto",
    "none",
    "generic",
    "template",
    "plain",
    "hermes",
    "qwen3-coder",
    "llama3",
    "mistral",
    "mistral-list",
    "deepseek",
    "deepseek-v3.1",
    "glm",
    "gemma4",
    "harmony",
)
# What `--chat-template` takes beside Jinja text, the table in `text/named_templates.py`.
CHAT_TEMPLATES = (
    "chatml",
    "command-r",
    "deepseek3",
    "gemma",
    "granite",
    "llama2",
    "llama3",
    "mistral-v7-tekken",
    "phi3",
    "phi4",
    "vicuna",
    "zephyr",
)
_ALIKE = 0.7  # least likeness of two names, of 1, to suggest one for the other


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of an error message: "; did you mean X?", or nothing if no known name is like the word."""
    found = closest(word, known)
    return "" if found is None else f"; did you mean {found}?"


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known name that is most like the word; None if none is."""
    by_lower = {one.lower(): one for one in known}
    found = get_close_matches(word.lower(), by_lower, n=1, cutoff=_ALIKE)
    return by_lower[found[0]] if found else None


def as_text(path: Path | str) -> str:
    """A path, or what was given in its place, as valid text: Python keeps bytes that are not UTF-8 as half characters,
    which no reply can have.
    """
    return os.fsencode(path).decode("utf-8", "replace")


def is_gguf(path: Path) -> bool:
    """Whether a path means a GGUF file, by its name."""
    return path.suffix.lower() == GGUF and not path.is_dir()


def model_path(name: str) -> Path | None:
    """The folder or GGUF file of this name; None: it names a hub repository. Raises `LoadError` if it can be neither.

    Hub names are `org/name`, `org/name:Q4_K_M` and `org/name/file.gguf`. Nothing is asked of the hub here.
    """
    path = Path(name)
    if path.is_dir() or (is_gguf(path) and path.exists()):
        return path
    if path.exists():
        raise LoadError(f"{name}: is neither a folder nor a GGUF file")
    is_file_on_hub = name.count("/") == 2 and is_gguf(path)
    if name.startswith((".", "/", "~")) or not (name.count("/") == 1 or is_file_on_hub):
        raise LoadError(f"{name}: no such {'file' if is_gguf(path) else 'folder'}{suggested_beside(path)}")
    return None


def suggested_beside(path: Path) -> str:
    """The end of an error message, as of `did_you_mean`: a model in the folder where the missing one would be."""
    folder = path.parent
    if folder.is_dir():
        found = closest(path.name, [one.name for one in _entries(folder) if _is_model(one)])
        return "" if found is None else f"; did you mean {folder / found}?"
    found = closest(folder.name, [one.name for one in _entries(folder.parent) if one.is_dir()])
    return "" if found is None else f"; did you mean {folder.parent / found / path.name}?"


def _is_model(path: Path) -> bool:
    return is_gguf(path) or (path / "config.json").is_file()


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
