"""Every implementation of every op against the definition, on fresh random inputs.

Ops that promise bits (`choose`, `ngram`, …) are held against the reference on the host in the same dtype; all others
against the reference in float64 on the host, from the same numbers. Integers must be equal everywhere.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream import kernels
from slipstream.kernels import dispatch
from slipstream.kernels.device_fault import is_device_fault
from slipstream.kernels.proof.judge import EXACT, difference, limit_of
from tests.gpu.dice import Dice, Draw
from tests.gpu.draws import MAKERS
from tests.gpu.setting import NOT_MEASURED, Figures, Finding, Findings, Setting

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ONE_DTYPE = ("ngram", "verify")  # no floats at all
FIRST = ("matmul", "attention", "choose", "verify", "ngram")  # compiled at once; Triton's take longer
N_DRAWS, N_DRAWS_QUICK = 24, 2


def cases(setting: Setting) -> list[str]:
    """The op folders, each dtype by itself: what breaks a process takes no other dtype with it."""
    return [
        f"{folder} {short(dtype)}"
        for folder in sorted(kernels.OPS, key=lambda one: one not in FIRST)
        for dtype in DTYPES
        if folder not in ONE_DTYPE or dtype == torch.float32
    ]


def run(setting: Setting, case: str) -> Findings:
    """One finding per implementation of an op."""
    folder, dtype = split(case)
    if folder not in MAKERS:
        yield Finding(case, ok=False, figures={"why": "tests/gpu/draws.py draws no inputs for it"})
        return
    kernels.select(setting.device, dtype)  # for what an implementation calls of other ops
    trials = []
    for name in dispatch.made_for(folder, setting.device):
        if reason := dispatch._refusal(folder, name, setting.device, dtype):
            yield Finding(f"{folder}.{name} {short(dtype)}", None, {"why": f"refused: {reason}"})
        else:
            trials.append(Trial(folder, name, dtype))
    check(trials, setting)
    for one in trials:
        yield one.finding(setting.pick(N_DRAWS, N_DRAWS_QUICK))


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def split(case: str) -> tuple[str, torch.dtype]:
    folder, name = case.split()
    return folder, getattr(torch, name)


@dataclass(slots=True)
class Trial:
    """One implementation of an op in one dtype, on one draw after another."""

    folder: str
    name: str
    dtype: torch.dtype
    n_done: int = 0
    worst: float = 0.0
    failure: Figures | None = None

    @property
    def limit(self) -> float:
        return limit_of(self.folder, self.dtype)

    def hold(self, draw: Draw, meant: Sequence[Tensor], device: torch.device, seed: int) -> None:
        """Run the implementation on a draw and compare."""
        label = f"{self.folder}.{self.name} {short(self.dtype)} at {draw.says}"
        try:
            with kernels.use(self.name, self.folder):
                got = [
                    one.cpu()
                    for one in draw.call({k: v.to(device, copy=True) for k, v in draw.tensors.items()})
                ]
        except Exception as error:
            if is_device_fault(error):
                raise RuntimeError(f"{label}: {error}") from error
            self.failure = {"seed": seed, "why": f"{type(error).__name__}: {error} at {draw.says}"[:600]}
            return
        self.n_done += 1
        for i, (one, other) in enumerate(zip(got, meant, strict=True)):
            found = difference(one, other, exact=self.folder in EXACT)
            self.worst = max(self.worst, found)
            if not found <= self.limit and self.failure is None:
                self.failure = {"result": i, "seed": seed, "why": f"off by {found:.3g} at {draw.says}"}

    def finding(self, n_meant: int) -> Finding:
        label = f"{self.folder}.{self.name} {short(self.dtype)}"
        told: Figures = {"draws": self.n_done, "worst": self.worst, "limit": self.limit}
        if self.failure is not None:
            return Finding(label, ok=False, figures={**told, **self.failure})
        if self.n_done < n_meant:
            return Finding(label, None, {**told, "why": f"{NOT_MEASURED}no time left"})
        return Finding(label, ok=True, figures=told)


def check(trials: Sequence[Trial], setting: Setting) -> None:
    """Enough draws for every implementation; one that has failed is left."""
    n_meant = setting.pick(N_DRAWS, N_DRAWS_QUICK)
    for _ in range(n_meant):
        waiting = [one for one in trials if one.failure is None]
        if not waiting or setting.left_s() < 0:
            return
        seed = secrets.randbits(32)
        first = waiting[0]
        draw = MAKERS[first.folder](Dice(seed, first.dtype, quick=setting.quick))
        cast = Tensor.clone if first.folder in EXACT else wide
        with kernels.use("reference"):
            meant = draw.call({key: cast(value) for key, value in draw.tensors.items()})
        for one in waiting:
            one.hold(draw, meant, setting.device, seed)


def wide(x: Tensor) -> Tensor:
    """A copy, floats in float64."""
    return x.to(torch.float64, copy=True) if x.is_floating_point() else x.clone()
