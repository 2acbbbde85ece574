"""Which implementation of an op runs where, and that the others are left alone."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import kernels
from slipstream.kernels import dispatch
from slipstream.kernels.cuda.launcher import refusal
from slipstream.kernels.dispatch import CannotRunError

CUDA = torch.device("cuda", 0)


def module(name: str, refusal: str | None, prepared: list[str]) -> ModuleType:
    made = ModuleType(name)
    made.refuses = lambda device, dtype: refusal  # type: ignore[attr-defined]
    made.prepare = lambda device, dtype: prepared.append(f"{name} on {device.type}")  # type: ignore[attr-defined]
    made.double = lambda x: name  # type: ignore[attr-defined]
    return made


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One op, `double`, with every kind of implementation; the CUDA one refuses. Gives what was prepared."""
    calls: list[str] = []
    refusals = {"cuda": "no compiler", "triton": None, "cpu": None, "reference": None}

    def double(x: Tensor) -> Tensor:
        raise NotImplementedError

    double.__module__ = "slipstream.kernels.double.op"
    op = dispatch.op(*refusals, any_dtype=True)(double)
    monkeypatch.setattr(kernels, "OPS", ("double",))
    monkeypatch.setattr(dispatch, "_ops", lambda: {"double": [op]})
    monkeypatch.setattr(dispatch, "_module", lambda folder, name: module(name, refusals[name], calls))
    return calls


def test_the_best_that_is_made_for_the_device_and_does_not_refuse(prepared: list[str]) -> None:
    assert kernels.select(CUDA, torch.bfloat16) == [("double", "triton", "cuda refused: no compiler", ())]
    assert kernels.select("cpu", torch.bfloat16) == [("double", "cpu", "best for cpu bfloat16", ())]
    assert prepared == ["triton on cuda", "cpu on cpu"]


@pytest.mark.parametrize(
    ("device", "asked", "words"),
    [(CUDA, "cuda", "no compiler"), (CUDA, "cpu", "device is cuda"), ("cpu", "triton", "device is cpu")],
)
def test_an_implementation_that_was_asked_for_is_never_replaced(
    device: torch.device | str, asked: str, words: str, prepared: list[str]
) -> None:
    with pytest.raises(CannotRunError, match=words):
        kernels.select(device, torch.float32, {"double": asked})
    assert not prepared


def test_one_choice_for_all_dtypes_covers_integers(prepared: list[str]) -> None:
    kernels.select("cpu", torch.bfloat16)
    ((op,),) = dispatch._ops().values()
    assert [op(torch.zeros(1, dtype=each)) for each in (torch.float64, torch.int32, torch.int64)] == [
        "cpu"
    ] * 3


@pytest.mark.usefixtures("prepared")
def test_watched_ops_run_inside_what_watches_them_and_go_back() -> None:
    kernels.select("cpu", torch.bfloat16)
    kernels.select(CUDA, torch.bfloat16)
    ((op,),) = dispatch._ops().values()
    calls: list[str] = []

    def wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x: calls.append(name) or f"watched {function(x)}"

    with dispatch.watched(wrap):
        assert op(torch.zeros(1)) == "watched cpu"
    with pytest.raises(ZeroDivisionError), dispatch.watched(wrap):
        raise ZeroDivisionError
    assert op(torch.zeros(1)) == "cpu"
    assert calls == ["double"]


def test_on_a_machine_without_a_gpu_the_table_says_why() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    refusal.cache_clear()
    assert dispatch.candidates("ngram", CUDA, torch.int32) == ("reference",)
    assert dispatch._refusal("ngram", "cuda", CUDA, torch.int32) == "torch sees no CUDA device"


def test_exactness_is_promised_by_an_implementation_or_refused() -> None:
    assert kernels.select("cpu", torch.bfloat16, exact=kernels.OPS) == kernels.select("cpu", torch.bfloat16)
    with pytest.raises(CannotRunError, match=r"reference refused: its bits may depend on the rows"):
        kernels.select("cpu", torch.float16, exact=("matmul",))
    assert kernels.select("cpu", torch.float16, exact=("choose", "verify"))  # these promise it


def test_every_operator_has_an_exact_implementation_for_cuda() -> None:
    """Whether it runs there only a GPU can say."""
    for folder, ops in dispatch._ops().items():
        names = [name for name in ops[0].implementations if name in ("cuda", "triton", "reference")]
        assert any(dispatch._is_exact(folder, name) for name in names), folder
