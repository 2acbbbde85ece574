"""A thread that takes what the engine's threads leave of the processor."""

from __future__ import annotations

import ctypes
import os
import sys
import threading

import torch

# Least of all: of two threads that want one core, the other gets 98.5 % (Linux weighs 19 with 15, and 0 with 1024).
NICE = 19


def be_modest() -> None:
    """Compute on this thread alone, and behind all others, from now on. Other threads keep theirs.

    torch.set_num_threads would set the number of the whole process. What it sets is the number of each of the runtimes
    below torch, and these also know one of the calling thread.
    """
    torch.get_num_threads()  # a thread's first use sets its number, so this comes first
    runtime = ctypes.CDLL(torch._C.__file__)
    for name in ("omp_set_num_threads", "MKL_Set_Num_Threads_Local"):
        if (set_threads := getattr(runtime, name, None)) is not None:  # torch has no MKL on ARM
            set_threads(1)
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
