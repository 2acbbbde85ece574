"""The measured column of the README's table of drafters: `python -m tests.bench.drafter_column README.md [--check]`.

Figures are those of the newest `bench-*.json` in `tests/bench/results`: each drafter alone, on one task of one model.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from slipstream.server.describe.renewal import renew

MODEL, TASK = "0.44B", "continue"
RESULTS = Path(__file__).parent / "results"
HEADER = "| type | guesses by | use it when | speed |"
UNKNOWN = "–"


def speeds(data: dict[str, Any]) -> dict[str, str]:
    """Tokens per second over those of plain decoding, by drafter."""
    return {
        found["figures"]["drafter"]: f"{found['figures']['x plain']:.1f} ×"
        for found in data["findings"]
        if (found["model"], found["part"]) == (MODEL, "drafters") and found["figures"]["task"] == TASK
    }


def updated(text: str) -> str:
    """The text with the last cell of each row of the table renewed. Raises ValueError if there is no table."""
    before, header, rest = text.partition(HEADER)
    if not header:
        raise ValueError(f"no table that begins with {HEADER}")
    table, blank, after = rest.partition("\n\n")
    newest = max(RESULTS.glob("bench-*.json"), key=lambda path: json.loads(path.read_text())["when"])
    known = speeds(json.loads(newest.read_text()))

    def row(match: re.Match[str]) -> str:
        return f"{match[1]}{known.get(match[2], UNKNOWN)} |"

    return (
        before
        + header
        + re.sub(r"^(\| `([a-z0-9-]+)` \|.*\| )[^|]*\|$", row, table, flags=re.M)
        + blank
        + after
    )


if __name__ == "__main__":
    sys.exit(renew(sys.argv[1:], updated))
