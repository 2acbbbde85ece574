"""Which cases `make test` leaves out: of tests marked `sampled`, all but a few cases.

Of a file's marked functions each keeps one, of different values of their parameters, so that each of a file's models,
say, is kept by some function; and of all together no fewer are kept than the largest `keep` of the marks says. Of those
marked `together` no more: where sources alone decide (kernels in the emulator and in Triton's interpreter), so that the
run after their last change has said what there is to say, or where each starts servers of its own. Where a file has
changed and there is no time for all of it, each function keeps as many as its own mark says; one, if that says
`together`. `keep=0`: no sample has it.

A marked test of one long course asks the fixture `is_whole` whether all cases of its file run, and is shorter if not.

`make check-all` runs every case, and writes down for each file with such tests a digest of what it is about
(tests/reach.py) and how long it took. Where that digest is another now, `make test` runs every case of the file too,
the quickest files first and as far as `--extra-s` seconds go: a record that has fallen behind costs no more than that.
Which files found no time is said at the end of the run. The record is committed; a line per file, so that it merges.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import reach
from tests.reach import ROOT

RECORD = Path(__file__).with_name("full_record.txt")
KEEP = 1  # cases, unless a mark says otherwise
EXTRA_S = 60.0
UNKNOWN_S = 20.0  # what a file that is not in the record is taken to cost
# Of the configuration: the files of which every case runs; None: all.
WHOLE = pytest.StashKey[frozenset[str] | None]()
POSTPONED = "a sample ran, though changed since every case did (make check-all)"
STEADY = 2.0  # times are written anew only where they are off by more than this factor, so that lines stay as they are


@dataclass(frozen=True, slots=True)
class Line:
    """A file's digest when all of its cases last passed, and the seconds that took."""

    digest: str
    seconds: float


def recorded(record: Path = RECORD) -> dict[str, Line]:
    """Lines by the file's path from the repository's root."""
    lines = (line.split() for line in record.read_text().splitlines()) if record.exists() else ()
    return {path: Line(made, float(seconds)) for path, made, seconds in lines}


def write(lines: Mapping[str, Line], record: Path = RECORD) -> None:
    record.write_text(
        "".join(f"{path} {one.digest} {one.seconds:g}\n" for path, one in sorted(lines.items()))
    )


def renewed(known: Mapping[str, Line], run: Mapping[str, Line]) -> dict[str, Line]:
    """The record after a run of every case of some files. run: what each file was, and took."""
    made = {path: one for path, one in known.items() if (ROOT / path).is_file()}
    for path, now in run.items():
        before = known[path].seconds if path in known else 0.0
        is_steady = before / STEADY <= now.seconds <= before * STEADY
        made[path] = Line(now.digest, before if is_steady else max(1.0, round(now.seconds)))
    return made


def digests(paths: Iterable[str], root: Path = ROOT) -> dict[str, str]:
    return {path: reach.digest(root / path, root) for path in paths if (root / path).is_file()}


@dataclass(frozen=True, slots=True)
class Choice:
    """Of the files that are not as recorded: those whose every case runs, and those for which there is no time."""

    whole: tuple[str, ...]
    postponed: tuple[str, ...]


UNCHANGED = Choice((), ())


def choose(known: Mapping[str, Line], now: Mapping[str, str], extra_s: float) -> Choice:
    """now: digests by path, of the files that have marked tests."""
    cost = {
        path: known[path].seconds if path in known else UNKNOWN_S
        for path, made in now.items()
        if path not in known or known[path].digest != made
    }
    whole: list[str] = []
    for path in sorted(cost, key=lambda one: (cost[one], one)):
        if cost[path] > extra_s:
            break
        extra_s -= cost[path]
        whole.append(path)
    return Choice(tuple(whole), tuple(sorted(cost.keys() - set(whole))))


class Summary:
    """A plugin: what marked files took; at the end, which of them want a whole run, or the new record."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        path = report.nodeid.partition("::")[0]
        if "sampled" in report.keywords:
            self._seconds[path] = self._seconds.get(path, 0.0) + report.duration

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
    ) -> None:
        now = digests(self._seconds)
        if not config.getoption("--whole"):
            choice = choose(recorded(), now, config.getoption("--extra-s"))
            if choice.postponed:
                terminalreporter.write_line(f"{POSTPONED}: {', '.join(choice.postponed)}")
        elif config.getoption("--record") and exitstatus == pytest.ExitCode.OK:
            run = {path: Line(made, self._seconds[path]) for path, made in now.items()}
            write(renewed(recorded(), run))
            terminalreporter.write_line(f"{RECORD.name}: every case of {len(run)} files has passed")


def is_marked(item: pytest.Item) -> bool:
    return item.get_closest_marker("sampled") is not None


def path_of(item: pytest.Item) -> str:
    """An item's file from the repository's root, as in its node id."""
    return item.nodeid.partition("::")[0]


def thinned(
    items: Sequence[pytest.Item], choice: Choice = UNCHANGED
) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests to run and those left out. Of postponed files no functions are sampled together."""
    cases: dict[tuple[str, str], list[pytest.Item]] = {}
    keep: dict[tuple[str, str], int] = {}
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is not None and (path := path_of(item)) not in choice.whole:
            is_postponed, is_together = path in choice.postponed, mark.kwargs.get("together", False)
            least = KEEP if is_postponed and is_together else mark.kwargs.get("keep", KEEP)
            is_alone = is_postponed or not least
            key = path, _function(item) if is_alone else "together" if is_together else ""
            cases.setdefault(key, []).append(item)
            keep[key] = max(keep.get(key, 0), least)
    left: set[pytest.Item] = set()
    for key, several in cases.items():
        n_kept = keep[key] if key[1] else max(keep[key], len({_function(item) for item in several}))
        kept = spread([_values(item) for item in several], n_kept)
        left |= {item for i, item in enumerate(several) if i not in kept}
    return [one for one in items if one not in left], [one for one in items if one in left]


def _function(item: pytest.Item) -> str:
    return str(getattr(item, "originalname", item.name))


def _values(item: pytest.Item) -> tuple[str, frozenset[tuple[int, str]]]:
    """The function, and the parts of a case's id, each with its place: values as far as ids tell.

    They are the same in every process. Functions share them.
    """
    call = getattr(item, "callspec", None)
    return _function(item), frozenset(enumerate([] if call is None else call.id.split("-")))


def spread(cases: Sequence[tuple[str, Collection[object]]], keep: int) -> set[int]:
    """Places of the cases to keep, each a function and its values: first the first, then one of each other function.

    Of these whichever has most values that no kept one has; among equals the one farthest from those kept, the earlier
    of two.
    """
    kept: set[int] = set()
    seen: set[object] = set()
    functions: set[str] = set()
    while len(kept) < min(keep, len(cases)):
        left = [i for i in range(len(cases)) if i not in kept]
        best = max(
            left,
            key=lambda i: (
                cases[i][0] not in functions,
                len(set(cases[i][1]) - seen),
                min((abs(i - j) for j in kept), default=0),
                -i,
            ),
        )
        kept.add(best)
        functions.add(cases[best][0])
        seen |= set(cases[best][1])
    return kept
