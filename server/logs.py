"""Log lines of `key=value` pairs. Text that came from outside is quoted, so that one event stays one line."""

from __future__ import annotations

import json
import logging
import re
import sys

PLAIN = re.compile(r"[A-Za-z0-9._:/@+,-]*")


def pairs(**fields: object) -> str:
    """`a=1 b="two words"`; None is left out, floats keep three digits."""
    return " ".join(f"{name}={_shown(value)}" for name, value in fields.items() if value is not None)


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    text = str(value)
    return text if PLAIN.fullmatch(text) else json.dumps(text)


def configure(level: str) -> None:
    """Send everything to stderr, libraries from warnings on. Called once, by the command line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s level=%(levelname)s logger=%(name)s %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in ("server", "engine", "kernels"):
        logging.getLogger(name).setLevel(level.upper())
