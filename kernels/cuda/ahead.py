"""Machine code of the .cu files ahead of the first start, for images and on machines without the GPU.

It depends on the architecture and the compiler alone, not on a model, a device or a driver.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from slipstream.kernels.cuda import cubins, nvrtc
from slipstream.kernels.cuda.source import KERNELS, Source
from slipstream.kernels.dispatch import CannotRunError


def sources() -> Iterator[Source]:
    """Every .cu that some operator launches."""
    for path in sorted(KERNELS.glob("*/cuda.py")):
        module = importlib.import_module(f"slipstream.kernels.{path.parent.name}.cuda")
        for one in vars(module).values():
            found = one.values() if isinstance(one, dict) else (one,)
            yield from (source for source in found if isinstance(source, Source))


def compile_ahead(architectures: Sequence[str], n_threads: int) -> Iterator[str]:
    """Have every source's code for each architecture in the user's cache; a line for each as it is there.

    architectures: of `nvrtc.ARCHITECTURES`. Raises CannotRunError if a source does not compile, if cuda.core is
    missing, or if there is no folder to keep code in.
    """
    folder = cubins.user_folder()
    if folder is None:
        raise CannotRunError("there is no folder to keep compiled kernels in")
    nvrtc.version()
    with ThreadPoolExecutor(n_threads) as pool:
        works = {
            pool.submit(_kept, source, arch, folder): f"{source!r} for {arch}"
            for arch in architectures
            for source in sources()
        }
        try:
            for work in as_completed(works):
                work.result()
                yield works[work]
        finally:
            pool.shutdown(cancel_futures=True)


def _kept(source: Source, arch: str, folder: Path) -> None:
    nvrtc.compiled(source, arch, folder)
    if cubins.load(folder, nvrtc.key_of(source, arch)) is None:
        raise CannotRunError(f"{folder} cannot be written to")
