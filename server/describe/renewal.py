"""Writes generated text to files, for `make docs`. With `--check` it only compares; the exit status is 1 if stale."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path


def renew(arguments: Sequence[str], fresh: Callable[[str], str]) -> int:
    """Replace the text of every file named in `arguments` by what `fresh` makes of it; returns the exit status.

    With `--check` among the arguments nothing is written.
    """
    status = 0
    for path in (Path(one) for one in arguments if one != "--check"):
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if (made := fresh(text)) == text:
            continue
        if "--check" in arguments:
            sys.stderr.write(f"{path} is stale; `make docs` renews it\n")
            status = 1
        else:
            path.write_text(made, encoding="utf-8")
    return status
