"""Every operation the engine runs on a device: one folder per op, a public signature and its implementations.

Importing this package loads neither torch nor numba: other libraries probe for a package of this name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.kernels.dispatch import Op as Op
    from slipstream.kernels.dispatch import Selected as Selected
    from slipstream.kernels.dispatch import select as select
    from slipstream.kernels.dispatch import use as use

OPS = (
    "matmul",
    "norm",
    "norm_rope_write",
    "attention",
    "mla",
    "gated",
    "moe",
    "short_conv",
    "gated_delta",
    "gated_norm",
    "choose",
    "verify",
    "ngram",
)


def __getattr__(name: str) -> Any:
    """`kernels.select` and `kernels.use`, loaded when first asked for."""
    if name in ("Op", "Selected", "select", "use"):
        from slipstream.kernels import dispatch

        return getattr(dispatch, name)
    raise AttributeError(f"module 'slipstream.kernels' has no attribute {name!r}")
