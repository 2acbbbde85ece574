"""The team of OpenMP threads that waits for a thread's next task: how a thread gives it up. Needs torch alone."""

from __future__ import annotations

import ctypes

import torch

_SOFT = 1  # omp_pause_soft: nothing but threads is given up


def end_team() -> None:
    """End the threads that wait for the calling thread's next task, which would start them anew.

    Call it in a thread that has done its last task: while a process has more such threads than cores, the runtime's
    threads hardly spin before they sleep, and all tasks of other threads take longer.
    """
    try:
        pause = ctypes.CDLL(torch._C.__file__).omp_pause_resource_all  # since OpenMP 5.0
    except (OSError, AttributeError):
        return
    pause(_SOFT)
