"""What drafting from text runs is compiled when a drafter is built, not by the first request that uses it.

What `auto` always loads is compiled before that, while the operators are proven.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import SimpleNamespace

import pytest

from slipstream.engine.service.start import drafters
from slipstream.engine.settings import Settings
from slipstream.engine.speculate.registry import BY_NAME, Row
from slipstream.engine.speculate.text import occurrences, prediction, suffix
from tests.process import ROOT
from tests.unit.test_ngrams import MAKERS

ABOUT = ("engine/speculate/ngram/*.py", "engine/speculate/text/*.py", "kernels/*.py")
# Modules with a function `use`, and what it takes.
USES = [
    *(("test_ngrams", (which,)) for which in range(len(MAKERS))),
    *(("test_ngram_cache", ()), ("test_suffix", ()), ("test_prediction", ())),
]
AHEAD = ("prediction", "suffix")  # compiled while a server loads


@pytest.mark.sampled(keep=0, together=True)
def test_nothing_is_compiled_once_a_drafter_is_built() -> None:
    """In a new interpreter, as other tests have compiled things; in a fork of it for each drafter."""
    code = f"from {__name__} import use_each; use_each()"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def use_each() -> None:
    """Use each drafter in a process of its own. Fails if one of them does."""
    for name in AHEAD:  # first, as loading the other modules builds drafters
        _forked(partial(build_compiled, name))
    for module, arguments in USES:
        _forked(
            lambda module=module, arguments=arguments: import_module(f"tests.unit.{module}").use(*arguments)
        )


def _forked(work: Callable[[], object]) -> None:
    child = os.fork()
    if not child:
        work()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, work


def build_compiled(name: str) -> None:
    """Fails if building a drafter compiles what its row's `compile` did not."""
    members = [one for module in (prediction, suffix, occurrences) for one in vars(module).values()]
    functions = [one for one in members if hasattr(one, "py_func")]
    assert not any(one.signatures for one in functions)
    BY_NAME[name].compile()
    made = [len(one.signatures) for one in functions]
    BY_NAME[name].build(SimpleNamespace(n_slots=2, settings=Settings()))  # type: ignore[arg-type]  # all it reads
    assert sum(made) > 0
    assert made == [len(one.signatures) for one in functions]


def _row(name: str, compiles: Callable[[], object]) -> Row:
    return Row(name=name, build=BY_NAME[name].build, compile=compiles)


def test_it_is_compiled_beside_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    has_begun, may_end, by = threading.Event(), threading.Event(), list[threading.Thread]()

    def compiles() -> None:
        has_begun.set()
        assert may_end.wait(60)
        by.append(threading.current_thread())

    monkeypatch.setattr(drafters, "BY_NAME", {"suffix": _row("suffix", compiles)})
    with drafters.compiling(["suffix"]):
        assert has_begun.wait(60)
        may_end.set()
    assert len(by) == 1
    assert by[0] is not threading.current_thread()


def test_what_does_not_compile_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiles() -> None:
        raise ValueError("no such type")

    monkeypatch.setattr(drafters, "BY_NAME", {"suffix": _row("suffix", compiles)})
    with pytest.raises(ValueError, match="no such type"), drafters.compiling(["suffix"]):
        pass
