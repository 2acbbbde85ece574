"""What a server does at its first start: every operator proves itself, in processes that compile on all cores.

Later parts find the kernels compiled. What is chosen afterwards is in part `chosen`; what failed here is what a server
would have replaced.
"""

from __future__ import annotations

import os
import time

import torch

from slipstream import kernels
from slipstream.engine.service.start.operators import Use
from slipstream.kernels.proof import proving
from slipstream.kernels.proof.proving import Task, Tried
from tests.gpu import quantized
from tests.gpu.setting import Finding, Findings, Setting, not_measured


def cases(setting: Setting) -> list[str]:
    return ["operators"]


def run(setting: Setting, case: str) -> Findings:
    """A finding per operator: the implementation that proved itself, those that did not, and when it was done."""
    started = time.monotonic()
    ended: dict[Task, float] = {}

    def done(tried: Tried) -> None:
        ended[tried.task] = time.monotonic() - started

    dtype, ops = setting.pick((torch.bfloat16, kernels.OPS), (torch.float32, ("norm", "gated")))
    weights = frozenset({"int8", *quantized.BLOCKS})
    use = Use(setting.device, dtype, frozenset(ops), is_whole=True, weights=weights)
    tasks = use.tasks(leaves_out=())
    try:
        found = proving.run(tasks, torch.get_num_threads(), done=done)
    except proving.NotTriedError as error:
        yield not_measured("operators", str(error))
        return
    for one in found:
        figures = {"proven": one.proven or "none", "done after, s": ended.get(one.task, 0.0)}
        if one.failed:
            figures["why"] = "; ".join(f"{name}: {reason}" for name, reason in one.failed)[:600]
        of = "" if one.task.weights is None else f" of {one.task.weights}"
        yield Finding(
            f"{one.task.op}{of} {one.task.dtype}", one.proven is not None and not one.failed, figures
        )
    cores = os.cpu_count()
    yield Finding("all operators", None, {"s": time.monotonic() - started, "cores": cores})
