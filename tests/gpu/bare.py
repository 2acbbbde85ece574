"""The process of `child.py` on a bare machine: what `make gpu` may import, and nothing else.

For tests: whatever else is installed is not found.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder

MAY = {"torch", "triton", "numpy", "safetensors", "tokenizers", "cuda", "slipstream", "demo", "tests"}
OF_TORCH = {"torchgen", "functorch", "sympy", "mpmath", "networkx", "filelock", "fsspec", "typing_extensions"}


class Bare(PathFinder):
    """Finds what a bare machine has."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: object = None
    ) -> ModuleSpec | None:
        top = name.partition(".")[0]
        is_here = top in MAY | OF_TORCH or top in sys.stdlib_module_names or top.startswith("_")
        return super().find_spec(name, path, target) if is_here else None


def block() -> None:
    """Nothing but that is found from here on."""
    assert not (late := {"pydantic", "numba"} & set(sys.modules)), f"loaded already: {late}"
    sys.meta_path[:] = [Bare if found is PathFinder else found for found in sys.meta_path]


def load() -> None:
    """Load what a bare machine must be able to load. No part launches a server's engine, but that is to work too."""
    block()
    import slipstream.engine.service.start.launch  # noqa: F401
    import tests.gpu.child  # noqa: F401


if __name__ == "__main__":
    load()
    from tests.gpu import child

    child.main()
