"""The project's .cu files on a machine without a GPU: compiled for the host, run thread by thread as fibers.

    with emulated():
        ngram(tokens, ...)  # a cuda.py, on CPU tensors

Every tensor lies against a page that may not be touched, so accesses behind its end are found (with order 1: before
its start); machine.h lists what else is. `emulated(order=...)` runs threads and blocks in another order: results must
not depend on it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slipstream.kernels.cuda.launcher import launched_by
from slipstream.kernels.cuda.source import Argument, Grid, Source
from tests.emulator.guarded import Guarded

HERE = Path(__file__).parent
COMPILER = shutil.which("g++") or shutil.which("clang++")
FLAGS = (
    *(
        "-std=c++17",
        "-O1",
        "-g1",
        "-shared",
        "-fPIC",
        "-fno-strict-aliasing",
        "-fno-gnu-unique",
        "-U_FORTIFY_SOURCE",
    ),
    *("-fvisibility=hidden", "-fvisibility-inlines-hidden", "-fcf-protection=none", "-Wno-unknown-pragmas"),
    *(
        "-ffp-contract=off",
        "-fsanitize=undefined",
        "-fno-sanitize=vptr",
        "-fsanitize-undefined-trap-on-error",
    ),
)
needs_compiler = pytest.mark.skipif(
    COMPILER is None, reason="no C++ compiler (g++ or clang++) on this machine"
)


class EmulatedError(AssertionError):
    """The kernel did what a GPU would not forgive, or was launched with arguments of other kinds than it takes."""


class Launch(ctypes.Structure):
    """As in machine.h."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("order", ctypes.c_uint),
    ]


@contextmanager
def emulated(*, order: int = 0) -> Iterator[None]:
    """Launches inside the block run on the CPU.

    order: of threads and blocks, 0 ascending, 1 descending, 2 warp after warp, each up to a barrier of the block,
    others a random order.
    """

    def run(
        source: Source, instance: str, grid: Grid, block: int, arguments: tuple[Argument, ...], shared: int
    ) -> None:
        library = built(source)
        if instance not in source.instances:
            raise EmulatedError(f"{source!r} has no instance {instance}")
        number = source.instances.index(instance)
        launch = Launch(grid, (block, 1, 1), shared, order)
        _check_kinds(f"{instance} of {source!r}", getattr(library, f"letters_{number}")(), arguments)
        with Guarded(arguments, at_start=order == 1) as places:
            _call(library, number, places, launch, f"{instance} of {source!r}")

    with launched_by(run):
        yield


def kept() -> Path:
    """The folder of what is compiled for emulators, which later runs find."""
    folder = Path(tempfile.gettempdir()) / f"slipstream-emulator-{Path.home().name}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@functools.cache
def built(source: Source) -> ctypes.CDLL:
    """The library of a source, compiled once per content. Raises EmulatedError with the compiler's words."""
    assert COMPILER is not None
    text = _program(source)
    digest = hashlib.sha256(f"{source.digest} {text} {FLAGS} {_compiler_version()}".encode())
    for path in sorted(HERE.glob("*.h")):
        digest.update(path.read_bytes())
    folder = kept()
    library = folder / f"{source.path.stem}-{digest.hexdigest()[:32]}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder) as work:
            program, fresh = Path(work) / "program.cpp", Path(work) / "library.so"
            program.write_text(text)
            includes = [f"-I{each}" for each in (*source.folders, HERE)]
            command = [COMPILER, *FLAGS, *includes, str(program), "-o", str(fresh)]
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            if run.returncode != 0:
                raise EmulatedError(f"{source!r} does not compile for the host:\n{run.stderr[:6000]}")
            fresh.replace(library)
    loaded = ctypes.CDLL(str(library))
    for number in range(len(source.instances)):
        getattr(loaded, f"letters_{number}").restype = ctypes.c_char_p
    return loaded


def _program(source: Source) -> str:
    lines = ['#include "emulator.h"', f'#include "{source.path.resolve()}"']
    exported = 'extern "C" __attribute__((visibility("default")))'
    for number, instance in enumerate(source.instances):
        lines += [
            f"{exported} int launch_{number}(void** arguments, const emulator::Launch* launch, char* message,"
            " uint64_t* fault_at) {",
            f"  return emulator::run({instance}, arguments, *launch, message, fault_at);",
            "}",
            f"{exported} const char* letters_{number}() {{ return emulator::letters({instance}); }}",
        ]
    return "\n".join(lines) + "\n"


def _check_kinds(name: str, letters: bytes, arguments: tuple[Argument, ...]) -> None:
    """On a GPU an argument of the wrong kind is just read as other bits."""
    if len(letters) != len(arguments):
        raise EmulatedError(f"{name} takes {len(letters)} arguments, not {len(arguments)}")
    for position, (letter, argument) in enumerate(zip(letters.decode(), arguments, strict=True)):
        kind = "p" if argument is None or isinstance(argument, Tensor) else type(argument).__name__[0]
        if kind != letter:
            raise EmulatedError(
                f"argument {position} of {name} is a {type(argument).__name__}, wanted {letter!r}"
            )


def _call(library: ctypes.CDLL, number: int, places: list[int | float], launch: Launch, name: str) -> None:
    """Run it on prepared arguments: addresses, integers, floats. Raises EmulatedError with what went wrong."""
    words = [ctypes.c_float(one) if isinstance(one, float) else ctypes.c_longlong(one) for one in places]
    pointers = (ctypes.c_void_p * len(words))(*(ctypes.addressof(word) for word in words))
    message, fault_at = ctypes.create_string_buffer(512), ctypes.c_uint64(0)
    failed = getattr(library, f"launch_{number}")(
        pointers, ctypes.byref(launch), message, ctypes.byref(fault_at)
    )
    if failed:
        raise EmulatedError(f"{name}: {message.value.decode()}{_line(library, fault_at.value)}")


def _line(library: ctypes.CDLL, fault_at: int) -> str:
    """Source line of a fault, if the binutils are here to tell."""
    start = _start(library._name)
    if not fault_at or shutil.which("addr2line") is None or start is None:
        return ""
    command = ["addr2line", "-i", "-e", library._name, hex(fault_at - start)]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    lines = [line for line in found.splitlines() if ".cu" in line]
    return " at " + " in ".join(Path(line).name for line in lines) if lines else ""


def _start(library: str) -> int | None:
    """Where a library lies in this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(library):
            return int(line.split("-")[0], 16)
    return None


@functools.cache
def _compiler_version() -> str:
    assert COMPILER is not None
    return subprocess.run([COMPILER, "--version"], capture_output=True, text=True, check=True).stdout


def same(found: Tensor, meant: Tensor) -> bool:
    """Equal bit for bit, NaN included."""
    return found.dtype == meant.dtype and torch.equal(
        found.contiguous().view(torch.uint8), meant.contiguous().view(torch.uint8)
    )
