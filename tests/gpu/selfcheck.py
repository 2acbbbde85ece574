"""What a server does at its first start: every operator proves itself, in processes that compile on all cores.

Later parts find the kernels compiled. What is chosen afterwards is in part `machine`; what failed here is what a server
would have replaced.
"""

from __future__ import annotations

import os
import time

import torch

from slipstream import kernels
from slipstream.kernels import dispatch
from slipstream.kernels.proof import proving
from slipstream.kernels.proof.proving import Task, Tried
from tests.gpu.setting import Finding, Findings, Setting, not_measured


def cases(setting: Setting) -> list[str]:
    return ["operators"]


def run(setting: Setting, case: str) -> Findings:
    """A finding per operator: the implementation that proved itself, those that did not, and when it was done."""
    started = time.monotonic()
    ended: dict[str, float] = {}

    def done(tried: Tried) -> None:
        ended[tried.task.op] = time.monotonic() - started

    try:
        found = proving.run(
            tasks(setting), torch.get_num_threads(), patience_s=max(1.0, setting.left_s()), done=done
        )
    except proving.NotTriedError as error:
        yield not_measured("operators", str(error))
        return
    for one in found:
        figures = {"proven": one.proven or "none", "done after, s": ended.get(one.task.op, 0.0)}
        if one.failed:
            figures["why"] = "; ".join(f"{name}: {reason}" for name, reason in one.failed)[:600]
        yield Finding(f"{one.task.op} {one.task.dtype}", one.proven is not None and not one.failed, figures)
    cores = os.cpu_count()
    yield Finding("all operators", None, {"s": time.monotonic() - started, "cores": cores})


def tasks(setting: Setting) -> list[Task]:
    """Every op with the implementations before its definition, in the dtype of most checkpoints."""
    dtype = setting.pick(torch.bfloat16, torch.float32)
    found = []
    for op in setting.pick(kernels.OPS, ("norm", "gated")):
        names = dispatch.candidates(op, setting.device, dtype)
        names = names[: names.index("reference")] if "reference" in names else names
        if names:
            found.append(Task(str(setting.device), str(dtype).removeprefix("torch."), op, tuple(names)))
    return found
