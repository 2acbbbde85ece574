"""A few hundred of the files that `python -m tests.fuzz.gguf` makes, and the mutator itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.engine.checkpoint.gguf.header import Scanner
from slipstream.engine.errors import LoadError
from tests.fuzz.gguf import MOST_MIB, Mutator, Seeds, end_of, run, seeds
from tests.gguf_bytes import F32, STRING, array, file, info, key

SEED = file([key("a.b", STRING, "text"), array("c", F32, [1.0, 2.0])], [info("x", [2, 4])], bytes(32))


@pytest.fixture(scope="module")
def begin(tmp_path_factory: pytest.TempPathFactory) -> Seeds:
    return seeds(tmp_path_factory.mktemp("seeds"))


def test_mutants(begin: Seeds, tmp_path: Path) -> None:
    findings = run(begin, tmp_path, seed=1, n_cases=150)
    assert not findings.wrong
    assert findings.largest_mib < MOST_MIB
    assert findings.ends["loaded"] > 15
    assert findings.ends["LoadError"] > 150
    assert findings.ends["UnsupportedModel"] > 5


def test_the_same_seed_makes_the_same_files() -> None:
    made = [
        [one.next() for _ in range(50)]
        for one in (Mutator([SEED], 4), Mutator([SEED], 4), Mutator([SEED], 5))
    ]
    assert made[0] == made[1] != made[2]
    assert len({*made[0]}) > 40
    assert len({len(one) for one in made[0]}) > 3
    assert SEED not in made[0][:10]


@pytest.mark.parametrize(
    ("error", "wrong"),
    [
        (LoadError("{}: damaged"), None),
        (LoadError("damaged"), "a message without the file"),
        (LoadError("{}: two\nlines"), "a message of several lines"),
        (LoadError("{}: " + "x" * 3000), "a message of several lines or 3"),
        (IndexError("list"), "IndexError at test_gguf_sample.py:"),
        (MemoryError(), "MemoryError at"),
        (BaseException("panic"), "BaseException at"),
    ],
    ids=str,
)
def test_what_counts_as_a_finding(error: BaseException, wrong: str | None) -> None:
    path = Path("some/file.gguf")

    def step() -> None:
        raise type(error)(str(error).format(path))

    found = end_of(step, path)[1]
    assert found is None if wrong is None else wrong in (found or "")
    assert end_of(lambda: None, path) == ("loaded", None)


def test_a_planted_fault_is_seen(begin: Seeds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that believes lengths."""

    def believes(self: Scanner, n: int) -> None:
        self.at += n

    monkeypatch.setattr(Scanner, "_step", believes)
    assert run(begin, tmp_path, seed=1, n_cases=60).wrong
