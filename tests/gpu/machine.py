"""What runs here: versions, the device, and which implementation of every op was chosen, with the reason."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess

import torch

from slipstream import kernels
from tests.gpu.setting import Finding, Findings, Setting

PACKAGES = ("torch", "triton", "numpy", "safetensors", "tokenizers", "cuda-core", "cuda-bindings", "numba")


def cases(setting: Setting) -> list[str]:
    return ["versions", "device", "implementations"]


def run(setting: Setting, case: str) -> Findings:
    if case == "versions":
        yield Finding("python", None, {"is": platform.python_version()})
        for name in PACKAGES:
            yield Finding(name, None, {"is": version(name)})
        yield Finding("CUDA of torch", None, {"is": torch.version.cuda or "none"})
    elif case == "device":
        yield Finding("device", None, {"is": device_name(setting.device)})
        for name, value in facts(setting.device).items():
            yield Finding(name, None, {"is": value})
    else:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for one in kernels.select(setting.device, dtype):
                for why in one.failed:
                    yield Finding(f"{one.op} for {str(dtype)[6:]}", ok=False, figures={"why": why[:600]})
                chosen = {"chosen": one.implementation, "reason": one.reason}
                yield Finding(f"{one.op} {str(dtype)[6:]}", None, chosen)


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def device_name(device: torch.device) -> str:
    """The GPU's name, or the CPU's kind."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu {platform.machine()}"


def facts(device: torch.device) -> dict[str, str]:
    """What a reader of the figures wants to know of the device."""
    if device.type != "cuda":
        return {
            "threads": str(torch.get_num_threads()),
            "cpu capability": torch.backends.cpu.get_cpu_capability(),
        }
    about = torch.cuda.get_device_properties(device)
    told = {
        "compute capability": f"{about.major}.{about.minor}",
        "multiprocessors": str(about.multi_processor_count),
        "memory": f"{about.total_memory / 2**30:.1f} GiB",
        "L2 cache": f"{about.L2_cache_size / 2**20:.0f} MiB",
    }
    query = [
        "nvidia-smi",
        "--query-gpu=driver_version,clocks.sm,clocks.max.sm,power.limit",
        "--format=csv,noheader",
    ]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
        told["driver, clock, most, power"] = found.strip().splitlines()[device.index or 0]
    except (OSError, subprocess.SubprocessError, IndexError):
        told["driver"] = "nvidia-smi does not say"
    return told
