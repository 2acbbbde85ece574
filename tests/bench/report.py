"""The files of a run: everything as JSON (`SCHEMA`), and tables for people."""

from __future__ import annotations

import datetime
import json
import platform
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from tests.gpu.machine import PACKAGES, device_name, facts, version
from tests.gpu.report import table

Record = dict[str, Any]  # a finding as JSON, with its model and part
FIGURE = {"type": ["number", "string", "integer"]}
SCHEMA: Record = {
    "type": "object",
    "required": ["schema", "device", "about", "versions", "when", "command", "seconds", "models", "findings"],
    "properties": {
        "schema": {"const": 1},
        "device": {"type": "string"},
        "about": {"type": "object", "additionalProperties": {"type": "string"}},
        "versions": {"type": "object", "additionalProperties": {"type": "string"}},
        "when": {"type": "string", "format": "date-time"},
        "command": {"type": "string"},
        "seconds": {"type": "number", "minimum": 0},
        "models": {
            "type": "object",
            "additionalProperties": {"type": "object", "additionalProperties": FIGURE},
        },
        "findings": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["model", "part", "name", "ok", "figures"],
                "additionalProperties": False,
                "properties": {
                    "model": {"type": "string"},
                    "part": {"type": "string"},
                    "name": {"type": "string"},
                    "ok": {"enum": [None, False]},  # False: it raised
                    "figures": {"type": "object", "additionalProperties": FIGURE},
                },
            },
        },
    },
}


def heading(device: torch.device, command: str) -> Record:
    """What is known before anything is measured."""
    when = datetime.datetime.now().astimezone()
    return {
        "schema": 1,
        "device": device_name(device) if device.type == "cuda" else processor(),
        "about": facts(device),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in (*PACKAGES, "transformers")},
        },
        "when": when.isoformat(timespec="seconds"),
        "command": command,
        "seconds": 0.0,
        "models": {},
        "findings": [],
    }


def processor() -> str:
    """The CPU's name, or its kind where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def write(folder: Path, data: Record) -> list[Path]:
    """Write both files, named for device and date, and return where they are."""
    folder.mkdir(parents=True, exist_ok=True)
    slug = re.sub(r"[^a-z0-9]+", "-", data["device"].lower()).strip("-")
    stem = f"bench-{slug}-{data['when'][:10]}"
    files = [folder / f"{stem}.json", folder / f"{stem}.md"]
    files[0].write_text(json.dumps(data, indent=1) + "\n")
    files[1].write_text("\n".join(page(data)) + "\n")
    return files


def page(data: Record) -> Iterator[str]:
    """The tables, by model and part."""
    yield f"# {data['device']}, {data['when'][:10]}"
    yield ""
    yield f"`{data['command']}`, {data['seconds']:.0f} s. {told(data['about'])}. {told(data['versions'])}."
    for model, found in groupby(data["findings"], key=lambda one: one["model"]):
        yield from ("", f"## {model}", "", f"{told(data['models'].get(model, {}))}.")
        for part, rows in groupby(found, key=lambda one: one["part"]):
            yield from ("", f"### {part}", "")
            yield from table(list(rows))


def told(values: Record) -> str:
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in values.items()
    )
