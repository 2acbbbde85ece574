"""The share of the memory's peak rate that kernels reach by the device's own counters, where ncu may read them.

    python3 -m tests.gpu.counters

runs the kernels by themselves; the part runs that below `ncu`.
"""

from __future__ import annotations

import csv
import io
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial

import torch

from slipstream import kernels
from slipstream.engine.batch import Batch, Span
from slipstream.kernels.attention.op import attention
from slipstream.kernels.choose.op import RowParams, choose
from slipstream.kernels.matmul.op import linear, pack
from slipstream.kernels.moe.op import Routing, experts, pack_experts, route
from tests.gpu import group
from tests.gpu.kernel_times import short
from tests.gpu.setting import Finding, Findings, Setting, not_measured

SHARE = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
TIME = "gpu__time_duration.sum"
DENIED = "ERR_NVGPUCTRPERM"


def cases(setting: Setting) -> list[str]:
    return ["memory"]


def run(setting: Setting, case: str) -> Findings:
    tool = group.tool("ncu")
    if tool is None or not setting.on_gpu:
        yield not_measured(case, "the device is no GPU" if tool else "ncu is not on the PATH")
        return
    command = [tool, "--csv", "--metrics", f"{SHARE},{TIME}", "--clock-control", "none"]
    command += ["--profile-from-start", "off", sys.executable, "-m", "tests.gpu.counters"]
    ended = group.run(command, setting.left_s())
    if DENIED in ended.output:
        yield not_measured(case, "this user may not read the device's counters")
    elif ended.is_late:
        yield not_measured(case, "no time left")
    elif ended.status:
        yield Finding(case, ok=False, figures={"why": f"ended with {ended.status}: {ended.output[-600:]}"})
    else:
        yield from findings(ended.output)


def findings(output: str) -> Findings:
    """One per kernel, from ncu's table, which stands behind its messages."""
    lines = [line for line in output.splitlines() if line.startswith('"')]
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for row in csv.DictReader(io.StringIO("\n".join(lines))):
        value = f"{row['Metric Value']} {row['Metric Unit']}"
        found[short(row["Kernel Name"])][row["Metric Name"]].append(value)
    for name, metrics in found.items():
        # Of several runs the last: its weights were not the first that came.
        figures = {"of peak": metrics[SHARE][-1], "took": metrics[TIME][-1], "runs": len(metrics[TIME])}
        yield Finding(name, None, figures)
    if not found:
        yield not_measured("memory", f"ncu printed no table: {output[-300:]}")


def works(device: torch.device) -> Mapping[str, Callable[[], object]]:
    """The kernels that move most of a decoding pass's memory, at sizes of an 8B model and of one with experts."""
    normal = partial(torch.randn, device=device, dtype=torch.bfloat16)
    n_past, page = 8192, 64
    n_pages = n_past // page + 1
    batch = Batch.build([Span(0, [0], n_past, 0, 1)], [list(range(n_pages))], page, device)
    keys, values = (normal(n_pages, 8, page, 128) for _ in range(2))
    routing = Routing(top_k=8, scores="softmax", normed=True)
    packed = pack_experts(normal(128, 1536, 2048), normal(128, 2048, 768))
    n = 16
    params = RowParams(
        torch.ones(n, device=device),
        torch.zeros(n, dtype=torch.int32, device=device),
        torch.ones(n, device=device),
        torch.zeros(n, device=device),
        torch.arange(n, device=device),
        torch.arange(n, device=device),
    )
    routed = route(normal(1, 128), routing)
    return {
        "matmul": partial(linear, normal(1, 4096), pack(normal(28672, 4096))),
        "attention": partial(attention, normal(1, 32, 128), keys, values, batch, 128**-0.5),
        "moe": partial(experts, normal(1, 2048), routed, packed),
        "choose": partial(choose, torch.randn(n, 151_936, device=device), params),
    }


def main() -> None:
    device = torch.device("cuda")
    for dtype in (torch.bfloat16, torch.float32):
        kernels.select(device, dtype)
    for work in works(device).values():
        work()  # compiled, before anything is counted
        flushed = torch.zeros(2**28, device=device)  # a gigabyte: nothing of the weights is left in a cache
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        work()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        del flushed


if __name__ == "__main__":
    with torch.inference_mode():
        main()
