"""Generated text in files: `make docs` writes it; with `--check` it is only compared, and if stale the status is 1."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path


def renew(arguments: Sequence[str], fresh: Callable[[str], str]) -> int:
    """Give every file named in `arguments` the text that `fresh` makes of its present one."""
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
