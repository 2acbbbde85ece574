"""A whole network on CUDA's `matmul` and `attention` in the emulator: bits of rows, and accuracy of logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from slipstream import kernels
from slipstream.engine.models.registry import load_network
from tests.checkpoints import edited, tiny_checkpoint
from tests.emulator import emulated, needs_compiler, same
from tests.gguf_files import gguf_of
from tests.oracle.feeding import Runner, Windowed, loaded

pytestmark = [
    needs_compiler,
    pytest.mark.usefixtures("_selected"),
    pytest.mark.sampled(keep=1, together=True),
]
ABOUT = ("kernels/*/*.cu", "kernels/*/*.cuh", "kernels/cuda/include/*.cuh")
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


@pytest.mark.parametrize(
    ("kind", "name"), [*((one, "draft") for one in ("Q4_0", "Q5_0", "Q8_0")), ("Q4_K", "target")]
)
def test_matrices_of_a_gguf_file_are_as_narrow_as_the_file_has_them(
    kind: str, name: str, tmp_path: Path
) -> None:
    file = tmp_path / "model.gguf"
    gguf_of(FOLDER.parent / name).as_type(kind).write(file)

    def fed(dtype: torch.dtype, *cuts: list[int]) -> list[Tensor]:  # each [len(IDS), vocab]
        runner = Runner(load_network(file, dtype, torch.device("cpu"), 256, None))
        return [runner.feed_chunks(slot, IDS, sizes) for slot, sizes in enumerate(cuts)]

    with kernels.use("cuda", "matmul", "attention"), emulated():
        whole, in_chunks = fed(torch.bfloat16, [40], [31, 1, 5, 3])
    assert same(in_chunks, whole)
    with kernels.use("reference"):
        (meant,), (exact,) = fed(torch.bfloat16, [40]), fed(torch.float32, [40])
    assert (whole - exact).square().mean() < 1.2 * (meant - exact).square().mean()


def calmed(tensors: dict[str, Tensor]) -> None:
    for name in tensors:
        if name.endswith("q_norm.weight"):
            tensors[name] *= 0.25


def test_a_text_has_the_same_logits_where_heads_are_of_512_and_256(tmp_path: Path) -> None:
    """As in Gemma 4: full layers between sliding ones, keys and values that later layers share."""
    widths = {"global_head_dim": 512, "head_dim": 256}
    # Scores of wide heads are so large that one rounding chooses another position; smaller ones do not.
    folder = edited(tiny_checkpoint("gemma4", tmp_path / "wide", changes=widths), tmp_path / "calm", calmed)

    ids = [one % 384 for one in IDS]

    def fed(dtype: torch.dtype, *cuts: list[int]) -> list[Tensor]:  # each [len(ids), vocab]
        runner = Windowed(loaded(folder, dtype))
        return [runner.feed_chunks(slot, ids, sizes) for slot, sizes in enumerate(cuts)]

    with kernels.use("cuda", "matmul", "attention"), emulated():
        whole, in_chunks = fed(torch.bfloat16, [40], [31, 1, 5, 3])
    assert same(in_chunks, whole)
    with kernels.use("reference"):
        (meant,), (exact,) = fed(torch.bfloat16, [40]), fed(torch.float32, [40])
    ours, others = ((one - exact).square().mean().sqrt() for one in (whole, meant))
    assert ours < 1.5 * others  # over seeds from 0.8 to 1.2
    assert ours < 0.1 * exact.std()
