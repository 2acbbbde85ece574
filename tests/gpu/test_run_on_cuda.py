"""`make gpu` on a machine that has what it wants: nothing fails."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu import run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.timeout(600)
def test_all_is_proven(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--device", "cuda", "--out", str(tmp_path)]) == 0, capsys.readouterr().out
