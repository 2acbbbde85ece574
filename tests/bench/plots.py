"""One plot per question, from a run's JSON; models stand side by side. Wants matplotlib, which is loaded here alone."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.report import Record
from tests.bench.scene import NO_OVERLAP

Rows = Sequence[Record]  # the figures of a model's findings in one part
SIDE_IN, DPI, N_COLOURS = 5.2, 80, 64
MARKERS = "os^Dv"
INK, FAINT = "#333333", "#bbbbbb"


@dataclass(frozen=True, slots=True)
class Question:
    """A plot: what it answers, where its figures come from, and how one model's share of it is drawn."""

    title: str
    part: str
    draw: Callable[[Any, Rows], None]
    height_in: float = 3.4


def line(axes: Any, rows: Rows, x: str, y: str, label: str, style: str = "o-") -> None:
    axes.plot([one[x] for one in rows], [one[y] for one in rows], style, label=label, markersize=4)


def powers(axes: Any, rows: Rows, x: str, label: str) -> None:
    """An axis of powers of two, written out."""
    places = sorted({one[x] for one in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [f"{n // 1024}k" if n >= 1024 else str(n) for n in places])
    axes.set_xlabel(label)


def speed_up(axes: Any, rows: Rows) -> None:
    """A row per drafter, a mark per task."""
    names = list(dict.fromkeys(one["drafter"] for one in rows if one["drafter"] != "plain"))[::-1]
    marks(axes, rows, names, "drafter", "x plain")
    axes.set_xlabel("times plain decoding")


def against_peers(axes: Any, rows: Rows) -> None:
    rows = [one for one in rows if "side" in one]
    marks(axes, rows, list(dict.fromkeys(one["side"] for one in rows))[::-1], "side", "x our plain")
    axes.set_xlabel("times plain decoding here")


def marks(axes: Any, rows: Rows, names: Sequence[str], name: str, value: str) -> None:
    """names: from the bottom up."""
    axes.axvline(1, color=INK, linewidth=0.8)
    for task, marker in zip(dict.fromkeys(one["task"] for one in rows), MARKERS, strict=False):
        found = [one for one in rows if one["task"] == task and one[name] in names]
        places = [names.index(one[name]) for one in found]
        axes.plot([one[value] for one in found], places, marker, label=task, markersize=6, alpha=0.85)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlim(left=0)
    axes.legend(loc="lower right")


def by_rows(axes: Any, rows: Rows) -> None:
    for n_past in dict.fromkeys(one["context"] for one in rows):
        line(
            axes,
            [one for one in rows if one["context"] == n_past],
            "rows",
            "x one row",
            f"after {n_past} tokens",
        )
    powers(axes, rows, "rows", "rows of a pass")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("times a pass of one row")
    axes.legend()


def by_streams(axes: Any, rows: Rows) -> None:
    for name, label in (("auto", "default drafters"), ("plain", "no speculation")):
        for way, style in (("", "o-"), (NO_OVERLAP, "o--")):
            found = [one for one in rows if one["drafter"] == f"{name}{way}"]
            if found:
                line(axes, found, "streams", "tokens/s", f"{label}{way}", style)
    powers(axes, rows, "streams", "streams at once")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("tokens/s of all")
    axes.legend()


def by_context(axes: Any, rows: Rows) -> None:
    line(axes, rows, "context", "tokens/s", "passes")
    limits = [{"context": one["context"], "limit": one["tokens/s"] / one["of ceiling"]} for one in rows]
    line(axes, limits, "context", "limit", "reading weights, keys and values once", "k--")
    powers(axes, rows, "context", "tokens before")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("tokens/s of one stream")
    axes.legend(loc="lower left")


def by_prompt(axes: Any, rows: Rows) -> None:
    line(axes, rows, "tokens", "first token, ms", "new prompt")
    line(axes, rows, "tokens", "90 % cached, ms", "90 % cached", "s-")
    powers(axes, rows, "tokens", "tokens of the prompt")
    axes.set_yscale("log")
    axes.set_ylabel("ms to the first token")
    for one in rows:
        place = (one["tokens"], one["first token, ms"])
        axes.annotate(
            f"{one['tokens/s']:.0f}/s", place, (0, 6), textcoords="offset points", ha="center", fontsize=8
        )
    axes.margins(0.12)
    axes.legend(loc="lower right")


QUESTIONS = {
    "drafters": Question("How much faster is decoding, by drafter and task?", "drafters", speed_up, 5.4),
    "width": Question("What does a pass cost, by its rows?", "width", by_rows),
    "concurrency": Question("How many tokens a second do several streams get?", "concurrency", by_streams),
    "context": Question("How fast is decoding after a long context?", "context", by_context),
    "prompt": Question("How long does the first token take?", "prompt", by_prompt),
    "peers": Question("How do others do on the same checkpoint?", "peers", against_peers),
}


def draw(data: Record, folder: Path, stem: str = "") -> list[Path]:
    """A PNG per question that the run has figures for, named for it behind `stem`."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style = {"axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": FAINT, "font.size": 9}
    style |= {"axes.grid": True, "grid.color": "#eeeeee", "legend.frameon": False, "axes.axisbelow": True}
    files = []
    for name, question in QUESTIONS.items():
        by_model: dict[str, list[Record]] = {}
        for one in data["findings"]:
            if one["part"] == question.part and "why" not in one["figures"]:
                by_model.setdefault(one["model"], []).append(one["figures"])
        if not by_model:
            continue
        with mpl.rc_context(style):
            figure = Figure(figsize=(SIDE_IN * len(by_model), question.height_in), layout="constrained")
            places = figure.subplots(1, len(by_model), squeeze=False)[0]
            for axes, (model, rows) in zip(places, by_model.items(), strict=True):
                question.draw(axes, rows)
                axes.set_title(model, fontsize=9)
            figure.suptitle(question.title, fontsize=11)
            folder.mkdir(parents=True, exist_ok=True)
            files.append(folder / f"{stem}{'-' if stem else ''}{name}.png")
            save(figure, files[-1])
    return files


def save(figure: Any, path: Path) -> None:
    """As a PNG of few colours, which is a third as large."""
    from PIL import Image

    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=DPI)
    with Image.open(drawn) as image:
        image.convert("RGB").quantize(N_COLOURS).save(path, optimize=True)
