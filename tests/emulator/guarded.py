"""Copies of a launch's tensors that end or begin at a page nobody may touch, and are copied back afterwards."""

from __future__ import annotations

import ctypes
import mmap
from types import TracebackType
from typing import Any

from torch import Tensor

from slipstream.kernels.cuda.source import Argument

PAGE = mmap.PAGESIZE
MARK = 0xA5
libc: Any = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Guarded:
    """The arguments as numbers: addresses of copies for tensors. Storage that tensors share stays shared.

    There are forbidden pages on both sides. A copy ends against one (at the last multiple of 16, as CUDA's addresses
    are aligned), or with `at_start` begins against one; the bytes between are marked. Raises AssertionError if a mark
    was overwritten.
    """

    def __init__(self, arguments: tuple[Argument, ...], *, at_start: bool) -> None:
        self.arguments = arguments
        self.at_start = at_start
        self.regions: dict[
            int, tuple[int, int, int, int]
        ] = {}  # storage -> (map, its size, copy, bytes of it)

    def __enter__(self) -> list[int | float]:
        return [self._place(one) for one in self.arguments]

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        damaged = False
        for storage, (start, size, copy, n_bytes) in self.regions.items():
            if kind is None:
                ctypes.memmove(storage, copy, n_bytes)
                before = ctypes.string_at(start + PAGE, copy - start - PAGE)
                after = ctypes.string_at(copy + n_bytes, start + size - PAGE - copy - n_bytes)
                damaged = damaged or bool((before + after).strip(bytes([MARK])))
            libc.munmap(start, size)
        if damaged:
            raise AssertionError("a kernel wrote beside a tensor")

    def _place(self, argument: Argument) -> int | float:
        if argument is None:
            return 0
        if not isinstance(argument, Tensor):
            return argument
        storage = argument.untyped_storage()
        if storage.nbytes() == 0:
            return 0
        if storage.data_ptr() not in self.regions:
            self.regions[storage.data_ptr()] = self._copy(storage.data_ptr(), storage.nbytes())
        return self.regions[storage.data_ptr()][2] + argument.data_ptr() - storage.data_ptr()

    def _copy(self, storage: int, n_bytes: int) -> tuple[int, int, int, int]:
        inner = -(-n_bytes // PAGE) * PAGE
        size = inner + 2 * PAGE
        start = libc.mmap(
            None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0
        )
        copy = start + PAGE + (0 if self.at_start else (inner - n_bytes) // 16 * 16)
        ctypes.memset(start + PAGE, MARK, inner)
        ctypes.memmove(copy, storage, n_bytes)
        for forbidden in (start, start + PAGE + inner):
            if libc.mprotect(forbidden, PAGE, 0) != 0:
                raise OSError(ctypes.get_errno(), "mprotect failed")
        return start, size, copy, n_bytes
