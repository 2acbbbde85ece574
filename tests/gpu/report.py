"""The two files of a run, written anew as more is known: everything as JSON, and tables for people."""

from __future__ import annotations

import datetime
import json
import re
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.gpu.setting import BAR, NOT_MEASURED
from tests.gpu.supervise import Progress, Record

MARKS = {True: "ok", False: "**FAILED**", None: ""}


class Report:
    """What is known of a run so far, in `folder`."""

    def __init__(self, folder: Path, only: Sequence[str] = ()) -> None:
        """only: the parts that were picked; none where all run."""
        self._folder, self._only, self._started = folder, only, time.monotonic()
        self._when = datetime.datetime.now().astimezone()

    @property
    def seconds(self) -> float:
        """Since the run began."""
        return time.monotonic() - self._started

    def write(self, progress: Progress) -> list[Path]:
        """Both files, as soon as the device's name is known, which is theirs; returns where they are."""
        device = next(
            (str(one["figures"].get("is", "")) for one in progress.findings if one["name"] == "device"), ""
        )
        if not device:
            return []
        return self._write(device, progress)

    def close(self, progress: Progress) -> list[Path]:
        """Both files at the end, whatever is known."""
        return self.write(progress) or self._write("unknown", progress)

    def _write(self, device: str, progress: Progress) -> list[Path]:
        slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
        data = {
            "device": device,
            "when": self._when.isoformat(timespec="seconds"),
            "seconds": round(self.seconds, 1),
            "seconds_by_part": {part: round(spent, 1) for part, spent in progress.spent_s.items()},
            "failed": [named(one) for one in progress.findings if one["ok"] is False],
            "not_measured": [named(one) for one in unmeasured(progress)],
            "findings": progress.findings,
        }
        texts = {".json": json.dumps(data, indent=1), ".md": "\n".join(_pages(data, progress))}
        self._folder.mkdir(parents=True, exist_ok=True)
        stem = "-".join((slug, f"{self._when:%Y-%m-%d}", *self._only))
        files = [self._folder / f"{stem}{kind}" for kind in texts]
        for file, text in zip(files, texts.values(), strict=True):
            unfinished = file.with_name(f".{file.name}")
            unfinished.write_text(text + "\n")
            unfinished.replace(file)  # if the run is killed now, the file is a whole one
        return files


def named(record: Record) -> str:
    return f"{record['part']}: {record['name']}"


def unmeasured(progress: Progress) -> list[Record]:
    """What there was no time or no tool for."""
    return [one for one in progress.findings if str(one["figures"].get("why", "")).startswith(NOT_MEASURED)]


def bars(progress: Progress) -> list[Record]:
    """The goals that were set, and whether they are met."""
    found = [one for one in progress.findings if one["name"].startswith(BAR)]
    return [{**one, "name": one["name"].removeprefix(BAR)} for one in found]


def _pages(data: dict[str, Any], progress: Progress) -> Iterator[str]:
    yield f"# {data['device']}, {data['when']}"
    yield ""
    n_proven = sum(one["ok"] is True for one in progress.findings)
    counted = f"{n_proven} proven, {len(data['failed'])} failed, {len(data['not_measured'])} not measured"
    yield f"{counted}, {data['seconds']:.0f} s."
    yield from (f"- FAILED {name}" for name in data["failed"])
    if goals := bars(progress):
        yield from ("", "## Bars", "")
        yield from table(goals)
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
