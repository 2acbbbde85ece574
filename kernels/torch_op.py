"""Registers a function of tensors as a torch op, with the shapes and dtypes of its results, so that torch.compile can
trace a call of it.

Only a traced graph calls it through torch's dispatcher, which costs 2 us a call; all other code calls the function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
LIBRARY: Any = torch.library.Library("slipstream", "FRAGMENT")  # type: ignore[no-untyped-call]


def torch_op(
    fake: Callable[..., R], *, mutates: tuple[str, ...] = ()
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: `function` becomes torch.ops.slipstream.<op folder>_<name>; its annotations are the schema.

    fake: called with the same arguments, gives empty tensors of the right shapes, dtypes and device, reads no values.
    mutates: parameters that are written. Raises ValueError if torch has no such type in schemas.
    """

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        name = f"{function.__module__.split('.')[-2]}_{function.__name__}"
        LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=mutates))
        LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"slipstream::{name}", fake, lib=LIBRARY)
        registered: Any = getattr(torch.ops.slipstream, name).default

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if torch.compiler.is_compiling():
                traced: R = registered(*args, **kwargs)
                return traced
            return function(*args, **kwargs)

        return call

    return wrap
