"""JSON files of a checkpoint folder. Each is optional for some caller, so an absent file reads as empty."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slipstream.engine.errors import LoadError


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file, empty if the file is absent. Raises `LoadError`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(value, dict):
        raise LoadError(f"{path}: not a JSON object")
    return value
