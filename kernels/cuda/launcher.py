"""Kernels of a source on the device: loaded once, launched on torch's current stream."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.cuda import cubins, nvrtc
from slipstream.kernels.cuda.source import Argument, Grid, Source
from slipstream.kernels.dispatch import CannotRunError

LEAST_DRIVER = 13000  # of cuDriverGetVersion: cubins of a compiler 13.x load on any driver of 13
Runner = Callable[[Source, str, Grid, int, tuple[Argument, ...], int], None]

_loading = threading.Lock()
_thread = threading.local()  # .device: whose context the thread is known to have
_streams: dict[int, Any] = {}  # cuda.core's by handle
_configs: dict[tuple[Grid, int, int, bool], Any] = {}


def launch(
    source: Source, instance: str, grid: Grid, block: int, *arguments: Argument, shared: int = 0
) -> None:
    """Run a kernel on the current device and torch's current stream; returns before it has run.

    grid: blocks in x, y and z; block: threads of one. arguments: a tensor or None is passed as its address, an int
    for a parameter of any integer type up to 64 bits, a float for `float`. shared: dynamic shared memory, bytes.
    Raises CannotRunError if the source does not compile or load. A grid with a zero in it launches nothing.
    """
    if 0 not in grid:
        _runner(source, instance, grid, block, arguments, shared)


def compile_for(device: torch.device, *sources: Source) -> None:
    """Load what will be launched there, so that the first request waits for no compiler. Raises CannotRunError."""
    index = torch.cuda.current_device() if device.index is None else device.index
    with torch.cuda.device(index):
        _enter(index)
        for source in sources:
            load(source, index)
    _thread.device = None  # torch has changed the thread's device back


@functools.cache
def refusal(device: torch.device) -> str | None:
    """Why kernels of CUDA sources cannot run there; None if they can. Compiles nothing."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    try:
        nvrtc.version()
        nvrtc.architecture(torch.cuda.get_device_capability(device))
        driver = _driver_version()
    except CannotRunError as error:
        return str(error)
    if driver < LEAST_DRIVER:
        return f"the driver is for CUDA {driver // 1000}.{driver % 1000 // 10}; CUDA 13.0 is needed"
    return None


@functools.cache
def runs_early(device: torch.device | int) -> bool:
    """Whether a GPU has programmatic dependent launch, as from Hopper on."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def has_warpgroups(device: torch.device) -> bool:
    """Whether a GPU has products of warpgroups (wgmma) and copies of whole pieces: Hopper."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; elsewhere, where launches are emulated, so few that blocks have to go on."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


@contextmanager
def launched_by(runner: Runner) -> Iterator[None]:
    """Launches go to `runner` inside the block, in the whole process. For tests without a GPU."""
    global _runner
    before, _runner = _runner, runner
    try:
        yield
    finally:
        _runner = before


def on_device(
    source: Source, instance: str, grid: Grid, block: int, arguments: tuple[Argument, ...], shared: int
) -> None:
    """The runner of real launches."""
    device: int = torch._C._cuda_getDevice()
    if getattr(_thread, "device", None) != device:
        _enter(device)
    kernel = source.loaded.get((instance, device))
    if kernel is None:
        load(source, device)
        kernel = _loaded(source, instance, device)
    handle: int = torch._C._cuda_getCurrentRawStream(device)
    stream = _streams.get(handle) or _stream(handle)
    early = source.early and runs_early(device)
    config = _configs.get((grid, block, shared, early)) or _config(grid, block, shared, early)
    _launch()(stream, config, kernel, *packed(arguments))


def packed(arguments: tuple[Argument, ...]) -> list[Any]:
    """Arguments as cuda.core takes them: addresses and integers as they are, floats as 32 bits."""
    return [
        one.data_ptr()
        if isinstance(one, Tensor)
        else ctypes.c_float(one)
        if isinstance(one, float)
        else one or 0
        for one in arguments
    ]


_runner: Runner = on_device


def load(source: Source, device: int) -> None:
    """Have the kernels of a source on a device: compiled, or read from the disk, unless they are there already.

    Raises CannotRunError. Launches do it by themselves, but not while a graph is captured.
    """
    from cuda.core import ObjectCode

    with _loading:
        if any(on == device for _, on in source.loaded):
            return
        arch = nvrtc.architecture(torch.cuda.get_device_capability(device))
        code = nvrtc.compiled(source, arch, cubins.user_folder())
        loaded = ObjectCode.from_cubin(code.cubin, name=repr(source))
        kernels = {(name, device): loaded.get_kernel(symbol) for name, symbol in code.symbols.items()}
        for kernel in kernels.values():
            _allow_shared_memory(kernel, device)
        source.loaded.update(kernels)


def _loaded(source: Source, instance: str, device: int) -> Any:
    try:
        return source.loaded[instance, device]
    except KeyError:
        listed = ", ".join(source.instances)
        raise CannotRunError(f"{source!r} has no instance {instance}; it has {listed}") from None


def _enter(device: int) -> None:
    """Make torch's context the thread's. torch does so itself only when it calls the CUDA runtime, perhaps never."""
    from cuda.core import Device

    Device(device).set_current()
    _thread.device = device


def _allow_shared_memory(kernel: Any, device: int) -> None:
    """Let launches ask for all the shared memory a block can have; without it the limit is 48 kB."""
    from cuda.bindings import driver

    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    most = _checked(driver.cuDeviceGetAttribute(attribute, device))
    own = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
    dynamic = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    handle = driver.CUkernel(int(kernel.handle))
    static = _checked(driver.cuKernelGetAttribute(own, handle, device))
    _checked(driver.cuKernelSetAttribute(dynamic, most - static, handle, device))


def _checked(answer: tuple[Any, ...]) -> Any:
    """The value of a driver call. Raises CannotRunError on a failure."""
    if int(answer[0]) != 0:
        raise CannotRunError(f"the CUDA driver says {answer[0]}")
    return answer[1] if len(answer) > 1 else None


def _driver_version() -> int:
    from cuda.bindings import driver

    try:
        return int(_checked(driver.cuDriverGetVersion()))
    except CannotRunError:
        raise
    except Exception as error:  # the loader's own types have moved between versions
        raise CannotRunError(f"the CUDA driver is missing: {error}") from error


def _stream(handle: int) -> Any:
    """torch's stream as cuda.core's. Handles are few: torch has a pool of them and never frees one."""
    from cuda.core import LEGACY_DEFAULT_STREAM, Stream

    stream = Stream.from_handle(handle) if handle else LEGACY_DEFAULT_STREAM
    _streams[handle] = stream
    return stream


def _config(grid: Grid, block: int, shared: int, early: bool) -> Any:  # noqa: FBT001
    from cuda.core import LaunchConfig

    if len(_configs) > 4096:  # a grid that follows the length of a text has many values
        _configs.clear()
    config = _configs[grid, block, shared, early] = LaunchConfig(
        grid=grid, block=block, shmem_size=shared, programmatic_stream_serialization=early
    )
    return config


@functools.cache
def _launch() -> Any:
    from cuda.core import launch as core_launch

    return core_launch
