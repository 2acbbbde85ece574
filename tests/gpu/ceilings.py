"""What the device can do at most: bytes moved by a copy, read and written counted, and bfloat16 products."""

from __future__ import annotations

import torch

from tests.gpu.clock import measure
from tests.gpu.setting import Finding, Findings, Setting


def cases(setting: Setting) -> list[str]:
    return ["copy", "read", "matmul"]


def run(setting: Setting, case: str) -> Findings:
    if case == "copy":
        yield Finding("device copy, read + written", None, {"GB/s": copy_rate(setting) / 1e9})
    elif case == "read":
        n = setting.pick(2**30, 2**16)
        x = torch.ones(n, dtype=torch.float32, device=setting.device)
        took = measure([lambda: x.sum()], setting.device)
        yield Finding(f"sum of {4 * n / 2**30:.3g} GiB", None, {"GB/s": 4 * n / took.seconds / 1e9})
    else:
        n = setting.pick(8192, 64)
        a, b = (torch.randn(n, n, device=setting.device, dtype=torch.bfloat16) for _ in range(2))
        took = measure([lambda: a @ b], setting.device)
        yield Finding(f"bfloat16 matmul {n}³", None, {"TFLOP/s": 2 * n**3 / took.seconds / 1e12})


def copy_rate(setting: Setting) -> float:
    """Bytes a second that a device copy reads and writes together."""
    n = setting.pick(2**31, 2**16)
    source = torch.ones(n, dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    return 2 * n / measure([lambda: target.copy_(source)], setting.device).seconds
