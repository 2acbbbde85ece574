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
from tests.gpu.dice import Dice, Draw
from tests.gpu.draws import EXACT, MAKERS
from tests.gpu.setting import Figures, Finding, Findings, Setting, selected, spoils

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Largest difference allowed, as a share of the largest value: rounding of results and of chains of sums.
SHARE = {torch.float32: 5e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
# Ops that round more than twice on the way, as their definitions do in the narrow dtype, or sum over a sequence.
WIDER = {"moe": 2.5, "gated_delta": 2.5, "norm_rope_write": 2.0}
ONE_DTYPE = ("ngram", "verify")  # no floats at all
FIRST = ("matmul", "attention", "choose", "verify", "ngram")  # compiled at once; Triton's take longer
N_DRAWS, N_DRAWS_QUICK = 24, 2


def cases(setting: Setting) -> list[str]:
    """The op folders, each dtype by itself: what breaks a process takes no other dtype with it."""
    return [
        f"{folder} {short(dtype)}"
        for folder in sorted(kernels.OPS, key=lambda one: one not in FIRST)
        for dtype in setting.pick(DTYPES, DTYPES[1:])
        if folder not in ONE_DTYPE or dtype == torch.float32
    ]


def run(setting: Setting, case: str) -> Findings:
    """One finding per implementation of an op."""
    folder, dtype = split(case)
    if folder not in MAKERS:
        yield Finding(case, ok=False, figures={"why": "tests/gpu/draws.py draws no inputs for it"})
        return
    selected(setting.device, dtype)  # for what an implementation calls of other ops
    trials = []
    for name in implementations(folder, setting.device):
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


def implementations(folder: str, device: torch.device) -> list[str]:
    """The implementations of an op that are made for such a device, best first."""
    (first, *_) = dispatch._ops()[folder]
    return [one for one in first.implementations if dispatch.MADE_FOR.get(one, device.type) == device.type]


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
        return 0.0 if self.folder in EXACT else SHARE[self.dtype] * WIDER.get(self.folder, 1.0)

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
            if spoils(error):
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
            return Finding(label, None, {**told, "why": "no time left"})
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


def difference(got: Tensor, meant: Tensor, *, exact: bool) -> float:
    """0 for equal results; infinite for other shapes, other integers, numbers in another place than NaN."""
    if got.shape != meant.shape or got.is_floating_point() != meant.is_floating_point():
        return float("inf")
    if exact or not got.is_floating_point():
        return 0.0 if torch.equal(bits(got), bits(meant.to(got.dtype))) else float("inf")
    one, other = got.double(), meant.double()
    if not torch.equal(one.isnan(), other.isnan()):
        return float("inf")
    one, other = one.nan_to_num(), other.nan_to_num()
    if one.numel() == 0:
        return 0.0
    return float((one - other).abs().max()) / max(1.0, float(other.abs().max()))


def bits(x: Tensor) -> Tensor:
    """The same numbers as integers, so that NaN and the signs of zeros count."""
    if not x.is_floating_point():
        return x
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize])
