"""That the count of what one step takes to read still counts a step."""

from __future__ import annotations

import re

import pytest

from tests.bench import reading_list


def test_a_step_with_a_draft_is_read_from_its_plan_to_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    reading_list.main(["--list"])
    total, *names = capsys.readouterr().out.splitlines()
    n_types, n_functions, n_files = map(int, re.findall(r"\d+", total))
    types = {one for one in names if one.startswith("slipstream.engine.")}
    functions = {one for one in names if ".py " in one}
    assert (n_types, n_functions) == (len(types), len(functions))
    assert n_files == len({one.split()[0] for one in functions})
    assert {"core/engine.py Engine.step", "speculate/text/suffix.py Suffix.guess"} <= functions
    assert "slipstream.engine.speculate.drafter.Draft" in types
