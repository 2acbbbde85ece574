"""The process of `child.py` on a bare machine: torch, triton, numpy, safetensors, tokenizers and nothing else.

For tests: whatever else is installed cannot be imported.
"""

from __future__ import annotations

import sys

MISSING = (
    "fastapi",
    "gguf",
    "httpx",
    "huggingface_hub",
    "jinja2",
    "llguidance",
    "llvmlite",
    "numba",
    "orjson",
    "prometheus_client",
    "pydantic",
    "pytest",
    "starlette",
    "structlog",
    "transformers",
    "uvicorn",
)


def block() -> None:
    """Make every import of a missing package fail."""
    for name in MISSING:
        assert name not in sys.modules, f"{name} is loaded already"
        sys.modules[name] = None  # type: ignore[assignment]


if __name__ == "__main__":
    block()
    import slipstream.engine.service.start.launch  # noqa: F401 - it must load too, though no part launches a server's engine
    from tests.gpu import child

    child.main()
