"""The kernels that ran during a piece of work, by the time they took, and the time between them."""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.profiler import ProfilerActivity

from tests.gpu.setting import Finding, Findings, not_measured

N_NAMED = 20  # kernels with a line of their own
N_LETTERS = 60  # of a name


@dataclass(frozen=True, slots=True)
class Ran:
    """One run of a kernel, in microseconds of the profiler's clock."""

    name: str
    start_us: float
    end_us: float

    @property
    def us(self) -> float:
        return self.end_us - self.start_us


@dataclass(slots=True)
class Watched:
    """What ran, in order of their starts; filled when the work is done."""

    kernels: list[Ran] = field(default_factory=list)


@contextlib.contextmanager
def watched(device: torch.device) -> Iterator[Watched]:
    """All kernels on the device inside the block, those of replayed graphs included; on a CPU torch's own operators."""
    on_gpu, found = device.type == "cuda", Watched()
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        yield found
        if on_gpu:
            torch.cuda.synchronize(device)
    wanted = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    ran = [one for one in profiler.events() or () if one.device_type == wanted]
    found.kernels += sorted(
        (Ran(one.name, one.time_range.start, one.time_range.end) for one in ran), key=lambda one: one.start_us
    )


def table(kernels: Sequence[Ran], n_steps: int) -> Findings:
    """A line for all of them, then one for each kernel that takes most, per step."""
    if not kernels:
        yield not_measured("kernels", "the profiler recorded none")
        return
    busy, span = covered_us(kernels), max(one.end_us for one in kernels) - kernels[0].start_us
    whole = {"a step": len(kernels) / n_steps, "us a step": busy / n_steps}
    yield Finding(
        "all kernels", None, {**whole, "share": 1.0, "of the time none runs": 1 - busy / max(span, 1e-9)}
    )
    by_name: dict[str, list[float]] = defaultdict(list)
    for one in kernels:
        by_name[short(one.name)].append(one.us)
    for name, took in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:N_NAMED]:
        own = {
            "a step": len(took) / n_steps,
            "us a step": sum(took) / n_steps,
            "us each": sum(took) / len(took),
        }
        yield Finding(name, None, {**own, "share": sum(took) / max(busy, 1e-9)})


def covered_us(kernels: Sequence[Ran]) -> float:
    """Time in which any of them runs; in order of their starts."""
    total, end = 0.0, float("-inf")
    for one in kernels:
        total += max(0.0, one.end_us - max(end, one.start_us))
        end = max(end, one.end_us)
    return total


def short(name: str) -> str:
    """A kernel's name without its arguments and its namespaces."""
    plain = re.sub(r"^void |\b(at|native)::|\(anonymous namespace\)::|\((int|bool)\)", "", name)
    return plain.partition("(")[0][:N_LETTERS]
