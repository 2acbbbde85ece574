"""What has been proven on this machine, kept for later starts: a file for each state of sources, libraries and device.

Only successes are kept. What failed may have failed for want of memory, and is tried again by the next start.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import logging
import platform
from collections.abc import Collection, Generator
from pathlib import Path

import torch

from slipstream.kernels import user_cache

log = logging.getLogger(__name__)

_LIBRARIES = ("torch", "numba", "llvmlite", "triton", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc")
_WHAT = "proofs of operators"  # to `user_cache`
_DRIVER, _CPU = Path("/proc/driver/nvidia/version"), Path("/proc/cpuinfo")


class Kept:
    """The proofs of one state, in a folder that may be missing or refuse."""

    def __init__(self, folder: Path | None, state: str) -> None:
        """folder: None keeps nothing. state: all that a proof depends on (`state_of`)."""
        self._folder = folder
        self._name = f"{hashlib.sha256(state.encode()).hexdigest()[:32]}.json"

    def load(self) -> set[str]:
        """What has been proven. Nothing, where the file is missing or damaged."""
        if self._folder is None:
            return set()
        try:
            told = json.loads((self._folder / self._name).read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return set()
        except (OSError, ValueError) as error:
            log.warning("kept proofs cannot be read (%s); operators prove themselves again", error)
            return set()
        return {one for one in told if isinstance(one, str)} if isinstance(told, list) else set()

    def add(self, proven: Collection[str]) -> None:
        """Keep what was proven besides, if the folder allows it."""
        if self._folder is not None and proven:
            every = json.dumps(sorted(self.load() | {*proven}), indent=0).encode()
            user_cache.keep(self._folder / self._name, every, _WHAT)

    @contextlib.contextmanager
    def alone(self) -> Generator[None, None, None]:
        """One process at a time, so that servers that start together do not all prove the same."""
        if self._folder is None:
            yield
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            lock = (self._folder / ".lock").open("a")
        except OSError as error:
            user_cache.cannot_keep(_WHAT, f"in {self._folder} ({error.strerror})")
            yield
            return
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def state_of(device: torch.device, n_threads: int) -> str:
    """All that a proof depends on: the package's sources, libraries, device and driver, threads."""
    folder = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(path for kind in ("py", "cu", "cuh") for path in folder.rglob(f"*.{kind}")):
        digest.update(path.read_bytes())
    libraries = " ".join(f"{name}={_version(name)}" for name in _LIBRARIES)
    return "\n".join((digest.hexdigest(), libraries, _machine(device), f"{n_threads} threads"))


def _version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        return f"{name} {capability} {_DRIVER.read_text() if _DRIVER.exists() else ''}"
    said = _CPU.read_text() if _CPU.exists() else platform.processor()
    kinds = {
        line for line in said.splitlines() if line.startswith(("model name", "flags", "Features", "CPU part"))
    }
    return "\n".join((platform.machine(), *sorted(kinds)))
