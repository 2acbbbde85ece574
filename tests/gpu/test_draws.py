"""The inputs of `make gpu` are ones that the GPU kernels take, and what it asks of results it would refuse if wrong.

CUDA C++ runs in the emulator, Triton in its interpreter.
"""

from __future__ import annotations

import importlib

import pytest
import torch

import tests.oracle.interpreted  # noqa: F401 - before anything else loads Triton, and puts its interpreter right
from slipstream import kernels
from slipstream.kernels import dispatch
from slipstream.kernels.proof.judge import EXACT, difference
from tests.emulator import emulated, needs_compiler
from tests.gpu.dice import Dice
from tests.gpu.draws import MAKERS
from tests.gpu.parity import ONE_DTYPE, Trial, wide

CPU = torch.device("cpu")


def made_for_gpus(name: str) -> list[str]:
    """The ops that have an implementation."""
    return [folder for folder in kernels.OPS if name in dispatch._ops()[folder][0].implementations]


for _folder in made_for_gpus("triton"):  # now, while Triton still interprets
    importlib.import_module(f"slipstream.kernels.{_folder}.triton")


def holds(folder: str, name: str, seed: int) -> None:
    dtype = torch.float32 if folder in ONE_DTYPE else torch.bfloat16
    draw = MAKERS[folder](Dice(seed, dtype, quick=True))
    cast = torch.Tensor.clone if folder in EXACT else wide
    with kernels.use("reference"):
        meant = draw.call({key: cast(value) for key, value in draw.tensors.items()})
    trial = Trial(folder, name, dtype)
    trial.hold(draw, meant, CPU, seed)
    assert trial.failure is None
    assert trial.n_done == 1
    # The same results, one of them wrong in one place, do not pass.
    trial.hold(type(draw)(draw.tensors, lambda t: spoilt(draw.call(t))), meant, CPU, seed)
    assert trial.failure is not None
    assert not trial.finding(2).ok


def spoilt(results: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The first result that holds anything, wrong at its end by a twentieth of its largest value."""
    found = [one.clone() for one in results]
    whole = next(one for one in found if one.numel()).view(-1)
    if whole.is_floating_point():
        whole[-1] = whole[-1].nan_to_num() + 0.05 * max(1.0, float(whole[whole.isfinite()].abs().max()))
    else:
        whole[-1] += 1
    return tuple(found)


def test_every_op_is_drawn() -> None:
    assert set(MAKERS) == set(kernels.OPS)


@needs_compiler
@pytest.mark.parametrize("folder", made_for_gpus("cuda"))
@pytest.mark.parametrize("seed", [2, 9, 14])  # weights of all kinds, keys of float8
def test_cuda_kernels_take_them(folder: str, seed: int) -> None:
    with emulated():
        holds(folder, "cuda", seed)


@pytest.mark.sampled(keep=3)
@pytest.mark.parametrize("folder", made_for_gpus("triton"))
def test_triton_kernels_take_them(folder: str) -> None:
    holds(folder, "triton", 39)  # a draw of few rows


def test_differences_are_seen() -> None:
    one = torch.tensor([1.0, -2.0, float("nan")])
    assert difference(one, one.double(), exact=False) == 0
    assert difference(one + torch.tensor([0.0, 0.01, 0.0]), one.double(), exact=False) == pytest.approx(
        0.005, rel=1e-3
    )
    assert difference(torch.tensor([1.0, float("nan"), 3.0]), one.double(), exact=False) == float("inf")
    assert difference(one[:2], one.double(), exact=False) == float("inf")
    assert difference(torch.tensor([0.0]), torch.tensor([-0.0]), exact=True) == float("inf")
    assert difference(torch.tensor([3]), torch.tensor([4]), exact=False) == float("inf")
