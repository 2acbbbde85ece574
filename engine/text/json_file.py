"""JSON and text files of a checkpoint folder. Each is optional for some caller, so an absent file reads as empty."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slipstream.engine.errors import LoadError


def check_regular(path: Path) -> None:
    """Raises `LoadError` for what is there and no file, as a pipe: to read it would take for ever."""
    if path.exists() and not path.is_file():
        raise LoadError(f"{path}: not a regular file")


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file, empty if the file is absent. Raises `LoadError`."""
    check_regular(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(value, dict):
        raise LoadError(f"{path}: not a JSON object")
    return value
