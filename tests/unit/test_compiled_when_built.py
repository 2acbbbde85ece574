"""What drafting from text runs is compiled when a drafter is built, not by the first request that uses it."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module

from tests.process import ROOT
from tests.unit.test_ngrams import MAKERS

# Modules with a function `use`, and what it takes.
USES = [
    *(("test_ngrams", (which,)) for which in range(len(MAKERS))),
    *(("test_ngram_cache", ()), ("test_suffix", ()), ("test_prediction", ())),
]


def test_nothing_is_compiled_once_a_drafter_is_built() -> None:
    """In a new interpreter, as other tests have compiled things; in a fork of it for each drafter."""
    code = f"from {__name__} import use_each; use_each()"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def use_each() -> None:
    """Use each drafter in a process of its own. Fails if one of them does."""
    for module, arguments in USES:
        child = os.fork()
        if not child:
            import_module(f"tests.unit.{module}").use(*arguments)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0, (module, arguments)
