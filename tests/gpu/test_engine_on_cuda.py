"""The engine on a CUDA device gives the CPU's tokens. In float64, where sums in another order flip no pick."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.oracle.lab import Bench, Lab, play
from tests.oracle.lossless import KINDS, demo_cases, folders_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["greedy", "warm", "all"])
def test_cuda_gives_the_tokens_of_the_cpu(name: str, kind: str, tmp_path: Path) -> None:
    folders = folders_of(kind, tmp_path)
    cpu = Lab(folders, torch.float64)
    cuda = Lab(folders, torch.float64, device="cuda")
    cases = demo_cases(cpu, name, 4)
    expected = play(cpu, Bench(), cases).tokens
    bench = Bench(("ngram-simple", "draft-model"), n_slots=4, n_pages=64)
    assert play(cuda, bench, cases).tokens == expected
