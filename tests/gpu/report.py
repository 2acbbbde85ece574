"""The two files of a run: everything as JSON, and tables for people."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.gpu.supervise import Progress, Record

BAR = "BAR "
MARKS = {True: "ok", False: "**FAILED**", None: ""}


def write(folder: Path, progress: Progress, when: datetime.datetime, seconds: float) -> list[Path]:
    """Write both files and return where they are."""
    folder.mkdir(parents=True, exist_ok=True)
    device = _figure(progress.findings, "device")
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    stem = f"{slug or 'unknown'}-{when:%Y-%m-%d}"
    data = {
        "device": device,
        "when": when.isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "seconds_by_part": {part: round(spent, 1) for part, spent in progress.spent_s.items()},
        "failed": [f"{one['part']}: {one['name']}" for one in progress.findings if one["ok"] is False],
        "findings": progress.findings,
    }
    files = [folder / f"{stem}.json", folder / f"{stem}.md"]
    files[0].write_text(json.dumps(data, indent=1) + "\n")
    files[1].write_text("\n".join(_pages(data, progress)) + "\n")
    return files


def _figure(findings: Sequence[Record], name: str) -> str:
    return next((str(one["figures"].get("is", "")) for one in findings if one["name"] == name), "unknown")


def _pages(data: dict[str, Any], progress: Progress) -> Iterator[str]:
    yield f"# {data['device']}, {data['when']}"
    yield ""
    n_proven = sum(one["ok"] is True for one in progress.findings)
    yield f"{n_proven} proven, {len(data['failed'])} failed, {data['seconds']:.0f} s."
    for name in data["failed"]:
        yield f"- FAILED {name}"
    bars = [one for one in progress.findings if one["name"].startswith(BAR)]
    if bars:
        yield from ("", "## Bars", "")
        yield from table([{**one, "name": one["name"].removeprefix(BAR)} for one in bars])
    rest = [one for one in progress.findings if not one["name"].startswith(BAR)]
    for part, found in groupby(rest, key=lambda one: one["part"]):
        for case, rows in groupby(found, key=lambda one: one["case"]):
            yield from ("", f"## {part}{f': {case}' if case else ''}", "")
            yield from table(list(rows))


def table(rows: Sequence[Record]) -> Iterator[str]:
    """A column per figure that any row has."""
    columns = list(dict.fromkeys(name for row in rows for name in row["figures"]))
    yield f"| | {' | '.join(columns)} | |"
    yield f"|---|{'---|' * len(columns)}---|"
    for row in rows:
        cells = [_cell(row["figures"].get(name, "")) for name in columns]
        yield f"| {_cell(row['name'])} | {' | '.join(cells)} | {MARKS[row['ok']]} |"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("|", "\\|").replace("\n", " ")[:300]
