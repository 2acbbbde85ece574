"""What is asked of an implementation: the definition's results within rounding, and a row's bits in any company."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from slipstream.kernels import dispatch
from slipstream.kernels.device_fault import is_device_fault
from slipstream.kernels.proof.case import Cut, Make
from slipstream.kernels.proof.inputs import Inputs

EXACT = frozenset({"choose", "ngram", "verify"})  # every implementation gives the definition's bits
# Largest difference allowed, as a share of the largest value: rounding of results and of chains of sums.
SHARE: Mapping[torch.dtype, float] = {torch.float32: 5e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
# Ops that round more than twice on the way, as their definitions do in the narrow dtype, or sum over a sequence.
WIDER: Mapping[str, float] = {"moe": 2.5, "gated_delta": 2.5, "norm_rope_write": 2.0, "norm": 1.5}
_HOST = torch.device("cpu")


def limit_of(folder: str, dtype: torch.dtype) -> float:
    """Largest difference from the definition that `difference` may find."""
    return 0.0 if folder in EXACT else SHARE[dtype] * WIDER.get(folder, 1.0)


def problem(
    folder: str,
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    leaves_out: Collection[str] = (),
    weights: str | None = None,
) -> str | None:
    """Why implementation `name` of the op must not run there; None if it proves itself.

    leaves_out: names of cases. weights: of a type that few models have; its cases alone. Other ops that it calls must
    have been selected. Raises only what says that the device is lost.
    """
    try:
        prepare = getattr(importlib.import_module(f"slipstream.kernels.{folder}.{name}"), "prepare", None)
        if prepare is not None:
            prepare(device, dtype)
        proof = importlib.import_module(f"slipstream.kernels.{folder}.proof")
        cases: Mapping[str, Make] = proof.CASES if weights is None else proof.cases_of(weights)
        for says, make in cases.items():
            if says in leaves_out:
                continue
            with dispatch.use("reference"):
                meant = make(Inputs(_HOST, dtype, wide=folder not in EXACT)).whole()
            with dispatch.use(name, folder):
                wrong = _wrong(make, meant, Inputs(device, dtype), limit_of(folder, dtype))
            if wrong is not None:
                return f"{says}: {wrong}"
    except Exception as error:
        if is_device_fault(error):
            raise
        return f"{type(error).__name__}: {error}"[:600]
    return None


def _wrong(make: Make, meant: Sequence[Tensor], inputs: Inputs, limit: float) -> str | None:
    """What is wrong with the op as it is now selected, on one case."""
    case = make(inputs)
    found = [one.clone() for one in case.whole()]
    for i, (one, other) in enumerate(zip(found, meant, strict=True)):
        off = difference(one.cpu(), other, exact=limit == 0.0)
        if not off <= limit:
            return f"result {i} is off by {off:.3g} of the largest value, {limit:.3g} is allowed"
    return other_bits(case.cuts(), found)


def other_bits(cuts: Iterable[Cut], whole: Sequence[Tensor]) -> str | None:
    """In which cut of a case a row's bits are not those it has among all; None if nowhere. whole: all results."""
    for cut in cuts:
        for i, (one, other) in enumerate(zip(cut.results, whole, strict=True)):
            if not torch.equal(bits(one), bits(other[cut.rows])):
                return f"result {i} has other bits in {cut.says} than among all"
    return None


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
