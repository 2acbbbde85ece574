"""The documentation: tables are whole, links resolve, generated parts are fresh, quoted messages are in the code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.server.describe import flags_table
from tests.bench import drafter_column, model_table

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
SOURCES = "\n".join(
    path.read_text()
    for room in ("server", "engine", "kernels")
    for path in sorted((ROOT / room).rglob("*.py"))
)


def prose(path: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)


def n_cells(row: str) -> int:
    return len(re.findall(r"(?<!\\)\|", row)) - 1


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_row_has_its_headers_cells(path: Path) -> None:
    for table in re.findall(r"(?:^\|.*\n)+", prose(path) + "\n", flags=re.MULTILINE):
        header, *rows = table.splitlines()
        assert [row for row in rows if n_cells(row) != n_cells(header)] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_curl_with_a_body_names_its_type(path: Path) -> None:
    commands = re.findall(r"^(?:\$ )?curl .*$", path.read_text(), flags=re.MULTILINE)
    assert [one for one in commands if " -d " in one and "content-type: application/json" not in one] == []


def anchors(path: Path) -> set[str]:
    """What GitHub makes of the page's headings."""
    titles = re.findall(r"^#+ (.*)$", prose(path), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def links(path: Path) -> Iterator[tuple[Path, str]]:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if "://" not in target:
            file, _, anchor = target.partition("#")
            yield (path.parent / file if file else path), anchor


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_link_leads_somewhere(path: Path) -> None:
    for target, anchor in links(path):
        assert target.exists(), target
        assert not anchor or anchor in anchors(target), f"{target}#{anchor}"


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    listed = {target.resolve() for target, _ in links(index)}
    assert {*(ROOT / "docs").glob("*.md")} - {index} <= listed


def test_the_table_of_families_is_fresh_and_whole() -> None:
    page = (ROOT / "docs" / "models.md").read_text()
    assert model_table.updated(page) == page, "`make docs` renews it"
    assert model_table.listed() == model_table.known()
    assert all((ROOT / "tests" / "oracle" / f"test_{row.proven}.py").exists() for row in model_table.ROWS)
    with pytest.raises(ValueError, match="no table"):
        model_table.updated("nothing here")


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_generated_parts_are_fresh() -> None:
    settings, readme = (ROOT / "docs" / "settings.md").read_text(), (ROOT / "README.md").read_text()
    assert flags_table.updated(settings) == settings, "`make docs` renews it"
    assert drafter_column.updated(readme) == readme, "`make docs` renews it"


def test_the_column_of_speeds_is_the_measurements() -> None:
    figures = {"drafter": "suffix", "task": "continue", "x plain": 2.04}
    data = {"findings": [{"model": "0.44B", "part": "drafters", "figures": figures}]}
    assert drafter_column.speeds(data) == {"suffix": "2.0 ×"}
    with pytest.raises(ValueError, match="no table"):
        drafter_column.updated("nothing here")


# --- troubleshooting ---

TROUBLES = ROOT / "docs" / "troubleshooting.md"


CODES = (
    r'code(?:: str = |=)"([a-z_]+)"',
    r'Refused\(\s*\d+,\s*"[a-z_]+",\s*"([a-z_]+)"',
    r'_(?:request|failed)\("([a-z_]+)"\)',
    r'unavailable\("[^"]*", "([a-z_]+)"\)',
)


def test_every_error_code_is_explained() -> None:
    codes = {code for pattern in CODES for code in re.findall(pattern, SOURCES)}
    assert len(codes) > 20
    assert codes <= set(re.findall(r"`([a-z_]+)`", TROUBLES.read_text()))


def test_messages_are_quoted_as_they_are() -> None:
    """Pieces of messages between …, in the first column of the first table, are in the code or in argparse's."""
    text = TROUBLES.read_text()
    rows = re.findall(r"^\| (.*?) \|", text[: text.index("## Errors of requests")], flags=re.MULTILINE)
    quoted = [one for row in rows for one in re.findall(r"`([^`]+)`", row)]
    pieces = [piece.strip(" ;:") for one in quoted for piece in re.split(r"…|--[a-z-]+", one)]
    foreign = {"unrecognized arguments", "Address already in use"}
    absent = [one for one in pieces if len(one) > 3 and one not in SOURCES and one not in foreign]
    assert len(pieces) > 15
    assert absent == []
