"""Compile every Triton kernel for GPUs that need not be there, and say what each takes of one.

    python -m tests.oracle.triton_compile 80 90      # prints JSON: architecture -> kernel -> figures

The ops' own functions run on tensors without memory, and every launch of theirs is compiled instead of started. So
what is compiled is what a GPU would get: arguments, constants and options come from the ops.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # before triton loads

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from slipstream.kernels.gated import triton as gated
from slipstream.kernels.gated.activation import GELU, SILU, Activation
from slipstream.kernels.gated_delta.spans import RecurrentRows
from slipstream.kernels.gated_norm import triton as gated_norm
from slipstream.kernels.matmul import triton as matmul
from slipstream.kernels.mla import triton as mla
from slipstream.kernels.mla.latent_types import LatentNorm, LatentRope
from slipstream.kernels.moe import triton as moe
from slipstream.kernels.moe.types import ExpertBiases, Routed, Routing
from slipstream.kernels.norm import triton as norm
from slipstream.kernels.norm_rope_write import triton as norm_rope_write
from slipstream.kernels.norm_rope_write.rows import HeadNorms, Rope
from slipstream.kernels.short_conv import triton as short_conv
from slipstream.kernels.short_conv.state import ConvState

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
N_ROWS, N_SPANS, N_SLOTS, N_PARKED = 9, 2, 8, 64


class NoDevice:
    """Stands for the driver of a GPU that is only compiled for."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return self.target.arch  # launches are remembered by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


def none_of(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def spans() -> RecurrentRows:
    """Nine rows and five parked ones in two spans."""
    sizes = {
        "span_starts": N_SPANS + 1,
        "slot_ids": N_SPANS,
        "history_starts": N_SPANS + 1,
        "history_rows": 5,
    }
    sizes |= {"n_settled": N_SPANS, "park_rows": N_ROWS}
    return RecurrentRows(**{name: none_of(torch.int32, n) for name, n in sizes.items()})


def run_norms(dtype: torch.dtype) -> None:
    x = none_of(dtype, N_ROWS, 5120)
    for scale in {dtype, torch.float32}:
        norm.rms_norm(x, none_of(scale, 5120), 1e-6)
        norm.add_rms_norm(x, x, none_of(scale, 5120), 1e-6)


def run_norm_rope_write(dtype: torch.dtype) -> None:
    """Attention of Qwen3 (8B), of Qwen3.5, which turns a quarter of a head, of narrower values, of Gemma 4 (31B)."""
    places = {name: none_of(torch.int64, N_ROWS) for name in ("positions", "row_pages", "row_offsets")}
    for n_heads, n_kv, d_head, d_value, half, scale in (
        (32, 8, 128, 128, 64, dtype),
        (24, 4, 256, 256, 32, torch.float32),
        (64, 4, 192, 128, 32, dtype),
        (32, 4, 512, 512, 256, dtype),
    ):
        norms = HeadNorms(none_of(scale, d_head), none_of(scale, d_head), 1e-6, values=d_head != 128)
        rope = Rope(none_of(torch.float32, 4096, half), none_of(torch.float32, 4096, half))
        qkv = none_of(dtype, N_ROWS, (n_heads + n_kv) * d_head + n_kv * d_value)
        for stored in (dtype, torch.float8_e4m3fn):
            stores = [none_of(stored, 100, n_kv, 64, width) for width in (d_head, d_value)]
            norm_rope_write.norm_rope_write(qkv, norms, rope, SimpleNamespace(**places), *stores)
            norm_rope_write.norm_rope_write(qkv, None, rope, SimpleNamespace(**places), *stores)


def run_gates(dtype: torch.dtype) -> None:
    gated.gated_mul(none_of(dtype, N_ROWS, 2 * 17408), SILU)
    gated.gated_mul(none_of(dtype, N_ROWS, 2 * 10240), GELU)
    gated.gated_mul(none_of(dtype, N_ROWS, 2 * 2880), Activation("clamped", 7.0, 1.702))
    gated.gated_mul(none_of(dtype, N_ROWS, 2 * 1280), Activation("limited", 16.0))
    gated.soft_cap(none_of(torch.float32, N_ROWS, 262_144), 30.0)
    gated.sigmoid_mul(none_of(dtype, N_ROWS, 6144), none_of(dtype, N_ROWS, 6144))
    gated.sigmoid_mul(none_of(dtype, N_ROWS, 6144), none_of(dtype, N_ROWS, 1))
    gated.sigmoid_mul(none_of(dtype, N_ROWS * 96, 128), none_of(dtype, N_ROWS * 96, 1))
    heads, gates = none_of(dtype, N_ROWS, 48, 128), none_of(dtype, N_ROWS, 48 * 128)
    gated_norm.gated_norm(heads, gates, none_of(torch.float32, 128), 1e-6, "silu")
    gated_norm.gated_norm(heads, gates, none_of(dtype, 128), 1e-6, "sigmoid")


def run_recurrent(dtype: torch.dtype) -> None:
    """Convolutions of Qwen3.5 (27B), 16 key and 48 value heads, and of Kimi Linear, 32 and 32."""
    for n_key, n_value in ((16, 48), (32, 32)):
        n_channels = (2 * n_key + n_value) * 128
        conv = ConvState(none_of(dtype, N_SLOTS, 3, n_channels), none_of(dtype, N_PARKED, n_channels))
        x = none_of(dtype, N_ROWS, n_channels)
        short_conv.short_conv(x, none_of(dtype, n_channels, 4), conv, spans())
        short_conv.settle_windows(conv.window, conv, spans())


def run_experts(dtype: torch.dtype) -> None:
    """Qwen3 (30B, 3B active), a router with groups and bias, Gemma 4 (26B, 4B active), gpt-oss (20B), Step-3.5."""
    logits = none_of(dtype, N_ROWS, 128)
    moe.route(logits, Routing(top_k=8, scores="softmax", normed=True))
    bias = none_of(torch.float32, 256)
    groups = {"bias": bias, "n_groups": 8, "n_groups_kept": 4}
    moe.route(
        none_of(dtype, N_ROWS, 256), Routing(top_k=8, scores="sigmoid", normed=True, scale=2.5, **groups)
    )
    routed = Routed(none_of(torch.int32, N_ROWS, 8), none_of(torch.float32, N_ROWS, 8))
    packed = moe.pack_experts(none_of(dtype, 128, 2 * 768, 2048), none_of(dtype, 128, 2048, 768))
    moe.experts(none_of(dtype, N_ROWS, 2048), routed, packed)
    packed = moe.pack_experts(none_of(dtype, 128, 2 * 704, 2816), none_of(dtype, 128, 2816, 704), None, GELU)
    moe.experts(none_of(dtype, N_ROWS, 2816), routed, packed)
    matrices = none_of(dtype, 32, 2 * 2880, 2880), none_of(dtype, 32, 2880, 2880)
    biases = ExpertBiases(none_of(dtype, 32, 2 * 2880), none_of(dtype, 32, 2880))
    packed = moe.pack_experts(*matrices, biases, Activation("clamped", 7.0, 1.702))
    moe.experts(none_of(dtype, N_ROWS, 2880), routed, packed)
    moe.route(
        none_of(dtype, N_ROWS, 288), Routing(top_k=8, scores="sigmoid", normed=True, scale=3.0, bias=bias)
    )
    packed = moe.pack_experts(
        none_of(dtype, 288, 2 * 1280, 4096), none_of(dtype, 288, 4096, 1280), None, Activation("limited", 7.0)
    )
    moe.experts(none_of(dtype, N_ROWS, 4096), routed, packed)


def run_latents(dtype: torch.dtype) -> None:
    """Attention of DeepSeek-V3, and of GLM-4.7-Flash; latents in the rows' dtype and, beside narrow rows, in float8."""
    places = {name: none_of(torch.int64, N_ROWS) for name in ("positions", "row_pages", "row_offsets")}
    batch = {"span_starts": N_SPANS + 1, "n_past": N_SPANS}
    rows = SimpleNamespace(**places, **{name: none_of(torch.int32, n) for name, n in batch.items()})
    rows.page_table = none_of(torch.int32, N_SPANS, 70)
    rope = LatentRope(Rope(none_of(torch.float32, 4096, 32), none_of(torch.float32, 4096, 32)))
    for n_heads, d_plain, d_value in ((128, 128, 128), (20, 192, 256)):
        q, kv = none_of(dtype, N_ROWS, n_heads, d_plain + 64), none_of(dtype, N_ROWS, 576)
        mla.head_linear(q[:, :, :d_plain], mla.pack_heads(none_of(dtype, n_heads, 512, d_plain)))
        mixed = none_of(dtype, N_ROWS, n_heads, 512)
        mla.head_linear(mixed, mla.pack_heads(none_of(dtype, n_heads, d_value, 512)))
        for stored in {dtype, dtype if dtype == torch.float32 else torch.float8_e4m3fn}:
            latents = none_of(stored, 100, 64, 576)
            turned = mla.write_latents(q, kv, LatentNorm(none_of(dtype, 512), 1e-6), rope, rows, latents)
            mla.latent_attention(mixed, turned, latents, rows, 0.1)


def run_products(dtype: torch.dtype) -> None:
    """A router of GLM-4.5: float32 whatever the network's dtype."""
    bias = none_of(torch.float32, 160)
    for packed in (matmul.pack(none_of(torch.float32, 160, 5120), one) for one in (None, bias)):
        matmul.linear(none_of(torch.float32, N_ROWS, 5120), packed)


ALL: tuple[Callable[[torch.dtype], None], ...] = (
    run_norms,
    run_norm_rope_write,
    run_gates,
    run_recurrent,
    run_experts,
    run_latents,
    run_products,
)


@contextmanager
def compiled_instead(capability: int, found: list[Any]) -> Any:
    """Launches inside append their compiled kernel to `found`."""
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if "EARLY" in kwargs and capability >= 90:  # as `triton_launch.early` says of such a device
            kwargs |= {"EARLY": True, "launch_pdl": True}
        found.append((self, run(self, *args, grid=grid, warmup=True, **kwargs)))

    driver.set_active(NoDevice(capability))
    JITFunction.run = compile_only
    try:
        yield
    finally:
        JITFunction.run = run


def figures(kernel: Any) -> dict[str, int]:
    """Registers of a thread, spilled bytes of a thread, shared memory of a program, threads."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (registers,), (stack,) = re.findall(r"REG:(\d+)", usage), re.findall(r"STACK:(\d+)", usage)
    threads = 32 * kernel.metadata.num_warps
    shared = kernel.metadata.shared
    waits = "griddepcontrol.wait" in kernel.asm["ptx"]
    return {
        "registers": int(registers),
        "stack": int(stack),
        "shared": shared,
        "threads": threads,
        "waits": int(waits),
    }


def compile_all(capability: int, dtypes: tuple[torch.dtype, ...]) -> dict[str, dict[str, int]]:
    """Kernel, dtype and number of the instance -> its figures."""
    table: dict[str, dict[str, int]] = {}
    for dtype in dtypes:
        found: list[Any] = []
        with compiled_instead(capability, found):
            for run in ALL:
                run(dtype)
        instances: dict[str, list[str]] = {}
        for function, kernel in found:
            folder = function.fn.__module__.split(".")[-2]
            name = f"{folder}.{function.fn.__name__}"
            same = instances.setdefault(name, [])
            if kernel.hash not in same:
                same.append(kernel.hash)
                table[f"{name} {str(dtype)[6:]} {len(same)}"] = figures(kernel)
    return table


def main(arguments: list[str]) -> None:
    every = "--all-dtypes" in arguments
    dtypes = (torch.bfloat16, torch.float16, torch.float32) if every else (torch.bfloat16,)
    capabilities = [int(one) for one in arguments if one.isdigit()]
    print(json.dumps({str(one): compile_all(one, dtypes) for one in capabilities}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
