"""The results on the page about performance: `python -m tests.bench.page FILE.json docs/performance.md`.

They stand between `<!-- results -->` and `<!-- /results -->`; plots and tables go into a folder beside the page.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.bench import plots, report

START, END = "<!-- results -->", "<!-- /results -->"


def renew(path: Path, data: report.Record) -> None:
    """Write the page's results, its plots and its tables. Raises ValueError where the marks are missing."""
    before, start, rest = path.read_text(encoding="utf-8").partition(START)
    _, end, after = rest.partition(END)
    if not (start and end):
        raise ValueError(f"{path}: no {START} … {END}")
    folder = path.with_suffix("")
    images = plots.draw(data, folder)
    (folder / "figures.md").write_text("\n".join(report.page(data)) + "\n", encoding="utf-8")
    text = "\n".join(results(data, images, folder.name))
    path.write_text(f"{before}{START}\n{text}\n{END}{after}", encoding="utf-8")


def results(data: report.Record, images: Sequence[Path], folder: str) -> Iterator[str]:
    """Where and how it was measured, then each question with its plot."""
    about = f"{data['device']} ({report.told(data['about'])})"
    yield f"{about}, {data['when'][:10]}, {data['seconds'] / 60:.0f} minutes of `{data['command']}`."
    yield f"{report.told(data['versions'])}."
    yield ""
    for name, told in data["models"].items():
        yield f"- {name}: {report.told(told)}"
    yield ""
    yield f"All figures: [{folder}/figures.md]({folder}/figures.md)."
    for image in images:
        title = plots.QUESTIONS[image.stem].title
        yield from ("", f"### {title}", "", f"![{title}]({folder}/{image.name})")


if __name__ == "__main__":
    renew(Path(sys.argv[2]), json.loads(Path(sys.argv[1]).read_text()))
