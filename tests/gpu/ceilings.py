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
        n = setting.pick(2**30 if setting.on_gpu else 2**27, 2**16)
        x = torch.ones(n, dtype=torch.float32, device=setting.device)
        took = measure([lambda: x.sum()] * 3, setting.device)
        yield Finding(f"sum of {4 * n / 2**30:.3g} GiB", None, {"GB/s": 4 * n / took.seconds / 1e9})
    else:
        yield Finding("bfloat16 matmul", None, {"TFLOP/s": matmul_rate(setting) / 1e12})


def matmul_rate(setting: Setting) -> float:
    """Operations a second of a square bfloat16 product."""
    n = setting.pick(8192 if setting.on_gpu else 2048, 64)
    a, b = (torch.randn(n, n, device=setting.device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * n**3 / measure([lambda: a @ b] * 3, setting.device).seconds


def copy_rate(setting: Setting) -> float:
    """Bytes a second that a device copy reads and writes together."""
    n = setting.pick(2**31 if setting.on_gpu else 2**28, 2**16)
    source = torch.ones(n, dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    return 2 * n / measure([lambda: target.copy_(source)] * 3, setting.device).seconds
