"""Which exceptions say that nothing runs any more on this process' device, and which that its memory was full.

An illegal access or a hardware error spoils a CUDA context for good: every later call fails with the same error, and
only another process can use the device. A launch that was refused spoils nothing. torch, Triton and cuda.core have
exceptions of their own for both, so that they are told apart by type and by how the driver's words begin.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

# Types that only a device's error has; torch's (2.8 on) and cuda.core's. Older torch and Triton raise RuntimeError.
_TYPES = frozenset({"AcceleratorError", "CUDAError"})
_WORDS = re.compile(r"CUDA error\b|CUDA driver error\b|Triton Error \[CUDA\]|CUDA_ERROR_")
_FULL = re.compile(r"out of memory|OUT_OF_MEMORY|ALLOC_FAILED")
# The context outlives these: the launch was refused, the code is for another device, or a capture was broken off.
_REFUSED = re.compile(
    r"invalid (configuration |resource )?(argument|value|handle|device function)|INVALID_(VALUE|HANDLE|CONFIGURATION)"
    r"|too many resources|LAUNCH_OUT_OF_RESOURCES|no kernel image|NO_BINARY|NOT_SUPPORTED|not supported|captur|CAPTUR"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory of the device or the host was full: less work at once may fit."""
    return any(_is_full(one) for one in _chain(error))


def is_device_fault(error: BaseException) -> bool:
    """Whether the error, or an error that led to it, says that the device answers this process no more."""
    return any(
        _is_devices(one) and not _is_full(one) and not _REFUSED.search(str(one)) for one in _chain(error)
    )


def _is_full(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return _is_devices(error) and _FULL.search(str(error)) is not None


def _is_devices(error: BaseException) -> bool:
    """By type, or by the first words of a RuntimeError. Words further on may be a client's: a schema, a stop string."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if not names.isdisjoint(_TYPES):
        return True
    return isinstance(error, RuntimeError) and _WORDS.match(str(error)) is not None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what led to it, each once."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            waiting += [one.__cause__, one.__context__]
            yield one
