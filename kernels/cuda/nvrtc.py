"""A .cu file to machine code, through NVIDIA's NVRTC: no CUDA toolkit is needed, and no GPU.

The result is a cubin of one architecture, never PTX, which the driver would have to be new enough to assemble.
"""

from __future__ import annotations

import functools
import io
import logging
import time
from pathlib import Path

from slipstream.kernels.cuda import cubins
from slipstream.kernels.cuda.cubins import Compiled as Compiled
from slipstream.kernels.cuda.source import Source
from slipstream.kernels.dispatch import CannotRunError

ARCHITECTURES = ("sm_80", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120")
# A cubin runs on its own capability and on later minor ones of the same major. `sm_90a` has what only Hopper has.
OF_CAPABILITY = {
    8: ((9, "sm_89"), (0, "sm_80")),
    9: ((0, "sm_90a"),),
    10: ((0, "sm_100"),),
    12: ((0, "sm_120"),),
}
log = logging.getLogger(__name__)


def architecture(capability: tuple[int, int]) -> str:
    """The architecture to compile for. Raises CannotRunError where none of ours runs."""
    major, minor = capability
    for least, name in OF_CAPABILITY.get(major, ()):
        if minor >= least:
            return name
    raise CannotRunError(f"compute capability {major}.{minor} is none of {', '.join(ARCHITECTURES)}")


def key_of(source: Source, arch: str) -> str:
    """What the code is kept under. Raises CannotRunError if cuda.core or NVRTC is missing."""
    major, minor = version()
    return f"{source.path.stem}-{arch}-nvrtc{major}.{minor}-{source.digest[:32]}"


def compiled(source: Source, arch: str, cache: Path | None) -> Compiled:
    """Machine code of all instances, from the folder `cache` or compiled and put there (None: no cache).

    Raises CannotRunError with the compiler's words if it refuses, or if cuda.core or NVRTC is missing.
    """
    key = key_of(source, arch)
    if cache is not None and (kept := cubins.load(cache, key)) is not None:
        log.debug("%r for %s from %s", source, arch, cache)
        return kept
    started = time.perf_counter()
    fresh = compile_now(source, arch)
    took = time.perf_counter() - started
    log.info("compiled %r for %s in %.1f s, %d kernels", source, arch, took, len(source.instances))
    if cache is not None:
        cubins.store(cache, key, fresh)
    return fresh


def compile_now(source: Source, arch: str) -> Compiled:
    """The compiler's work alone. Raises CannotRunError with its words if it refuses."""
    from cuda.core import Program, ProgramOptions

    version()
    options = ProgramOptions(
        name=source.path.name,
        arch=arch,
        std="c++17",
        fma=source.fuse,
        include_path=[str(folder) for folder in (*source.folders, _toolkit_headers())],
        lineinfo=True,
        ptxas_options=["-v"],
    )
    said = io.StringIO()
    program = Program(source.path.read_text(), "c++", options)
    try:
        code = program.compile("cubin", name_expressions=source.instances, logs=said)
    except Exception as error:  # cuda.core's own types have moved between its versions
        raise CannotRunError(
            f"{source!r} does not compile for {arch}:\n{error}\n{said.getvalue()}"
        ) from error
    finally:
        program.close()
    symbols = {name: _text(symbol) for name, symbol in code.symbol_mapping.items()}
    return Compiled(bytes(code.code), symbols, said.getvalue())


@functools.cache
def version() -> tuple[int, int]:
    """Of the NVRTC in use. Raises CannotRunError if it or its bindings are missing, or too old."""
    try:
        import cuda.core  # noqa: F401
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise CannotRunError(
            f"cuda.core is not installed ({error}); pip install 'slipstream[cuda]'"
        ) from error
    try:
        _, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:  # the loader's own types have moved between versions
        raise CannotRunError(f"NVRTC is missing: {error}; pip install 'slipstream[cuda]'") from error
    if major < 13:
        raise CannotRunError(f"NVRTC is {major}.{minor}; 13.0 or newer is needed")
    return int(major), int(minor)


def _toolkit_headers() -> Path:
    """Where cuda_bf16.h is. Raises CannotRunError if nowhere."""
    from cuda.pathfinder import find_nvidia_header_directory

    found = find_nvidia_header_directory("cudart")
    if found is None or not (Path(found) / "cuda_bf16.h").is_file():
        raise CannotRunError("CUDA's headers (cuda_bf16.h) are missing: pip install 'slipstream[cuda]'")
    return Path(found)


def _text(symbol: str | bytes) -> str:
    return symbol.decode() if isinstance(symbol, bytes) else symbol
