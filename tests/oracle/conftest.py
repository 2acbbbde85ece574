"""Fixtures of the tests that hold networks against other implementations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from slipstream import kernels
from tests.checkpoints import N_PROMPT, Oracle, theirs, tiny_checkpoint

# Triton has wheels for Linux alone; there it is among what tests need.
collect_ignore_glob = [] if find_spec("triton") else ["test_triton_*"]


@pytest.fixture(scope="module")
def _selected() -> None:
    """Ops chosen for this machine, one thread."""
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        kernels.select(torch.device("cpu"), dtype)


@pytest.fixture(params=["reference", "selected"])
def ops(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a test once on the definitions of the ops and once on what this machine would select."""
    with kernels.use("reference") if request.param == "reference" else nullcontext():
        yield


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Target checkpoints of six layers by family, made once."""
    folders: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in folders:
            changes = {"num_hidden_layers": 6}
            folders[family] = tiny_checkpoint(family, tmp_path_factory.mktemp(family), changes=changes)
        return folders[family]

    return get


@pytest.fixture(scope="module")
def oracle(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Oracle]:
    """Checkpoint, prompt and transformers' logits of one of the module's VARIANTS, made once.

    VARIANTS: name -> (family, what to change in its config).
    """
    made: dict[str, Oracle] = {}

    def get(variant: str) -> Oracle:
        if variant not in made:
            family, changes = request.module.VARIANTS[variant]
            folder = tiny_checkpoint(family, tmp_path_factory.mktemp("oracle"), changes=changes)
            prompt = torch.randint(384, (N_PROMPT,), generator=torch.Generator().manual_seed(1))
            with torch.inference_mode():
                made[variant] = folder, prompt, theirs(folder)(prompt[None]).logits[0]
        return made[variant]

    return get
