"""What the device can do at most: bytes of memory read, or read and written by a copy, and bfloat16 products."""

from __future__ import annotations

import time

import torch

from tests.gpu.clock import measure
from tests.gpu.setting import Finding, Findings, Setting

AWAKE_S = 0.5


def cases(setting: Setting) -> list[str]:
    return ["copy", "read", "matmul"]


def run(setting: Setting, case: str) -> Findings:
    if case == "copy":
        yield Finding("device copy, read + written", None, {"GB/s": copy_rate(setting) / 1e9})
    elif case == "read":
        yield Finding("plain read", None, {"GB/s": read_rate(setting) / 1e9})
    else:
        yield Finding("bfloat16 matmul", None, {"TFLOP/s": matmul_rate(setting) / 1e12})


def awake(setting: Setting) -> None:
    """Work the device until its clocks are up: at rest they are a fraction of what they are in use."""
    if setting.on_gpu:
        a = torch.ones(4096, 4096, device=setting.device, dtype=torch.bfloat16)
        end = time.monotonic() + AWAKE_S
        while time.monotonic() < end:
            for _ in range(16):
                a @ a
            torch.cuda.synchronize(setting.device)


def matmul_rate(setting: Setting) -> float:
    """Operations a second of a square bfloat16 product."""
    awake(setting)
    n = setting.pick(8192 if setting.on_gpu else 2048, 64)
    a, b = (torch.randn(n, n, device=setting.device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * n**3 / measure([lambda: a @ b] * 3, setting.device).seconds


def memory_rate(setting: Setting) -> float:
    """Bytes a second that the memory gives at most, as far as plain work shows."""
    return max(read_rate(setting), copy_rate(setting))


def read_rate(setting: Setting) -> float:
    """Bytes a second that a sum reads."""
    awake(setting)
    n = setting.pick(2**30 if setting.on_gpu else 2**27, 2**16)
    x = torch.ones(n, dtype=torch.float32, device=setting.device)
    return 4 * n / measure([lambda: x.sum()] * 3, setting.device).seconds


def copy_rate(setting: Setting) -> float:
    """Bytes a second that a device copy reads and writes together."""
    awake(setting)
    n = setting.pick(2**31 if setting.on_gpu else 2**28, 2**16)
    source = torch.ones(n, dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    return 2 * n / measure([lambda: target.copy_(source)] * 3, setting.device).seconds
