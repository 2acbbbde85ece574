"""A whole network on CUDA's `matmul` and `attention` in the emulator: bits of rows, and accuracy of logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from slipstream import kernels
from slipstream.engine.models.registry import load_network
from tests.emulator import emulated, needs_compiler, same
from tests.oracle.feeding import Runner

pytestmark = [needs_compiler, pytest.mark.usefixtures("_selected"), pytest.mark.sampled("cuda")]
FOLDER = Path(__file__).parents[2] / "demo" / "draft"
IDS = torch.randint(1000, (40,), generator=torch.Generator().manual_seed(3)).tolist()


def logits(dtype: torch.dtype, *cuts: list[int]) -> list[Tensor]:
    """Of one text fed in so many ways, each [len(IDS), vocab]; weights are packed for the ops in use."""
    runner = Runner(load_network(FOLDER, dtype, torch.device("cpu"), 256, None))
    return [runner.feed_chunks(slot, IDS, sizes) for slot, sizes in enumerate(cuts)]


def test_a_text_has_the_same_logits_however_it_is_cut() -> None:
    with kernels.use("cuda", "matmul", "attention"), emulated():
        whole, in_chunks = logits(torch.bfloat16, [40], [31, 1, 5, 3])
    assert same(in_chunks, whole)
    with kernels.use("reference"):
        (meant,), (exact,) = logits(torch.bfloat16, [40]), logits(torch.float32, [40])
    assert (whole - exact).square().mean() < 1.2 * (meant - exact).square().mean()
