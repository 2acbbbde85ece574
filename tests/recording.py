"""Captures without a GPU: every operation of a piece of work is kept, with its tensors, and done again.

As in a CUDA graph, what a replay does was settled when it was captured: which operations, on which memory. A value
that the program looked at on the way would be frozen, and the same for ever. Looking at one raises here, as it does
there.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from slipstream.engine.models.captured import Replay
from slipstream.kernels import dispatch

READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.lift_fresh.default,  # a tensor of the program's own values: a copy from the host
}


class ReadsValueError(RuntimeError):
    """A capture looked at a value of the device, or sent one there."""


@dataclass(frozen=True)
class Call:
    """One operation, with the tensors it has always to use."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Tensor]  # fresh ones; views and changed arguments need no copy

    def again(self) -> None:
        made = tree_leaves(self.function(*self.args, **self.kwargs))
        fresh = [one for one in made if isinstance(one, Tensor)][: len(self.results)]
        for kept, one in zip(self.results, fresh, strict=True):
            kept.copy_(one)


class Tape(TorchDispatchMode):
    """Operations in their order. An op of ours is one of them, whatever it is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            raise ReadsValueError(str(func))
        return self.keep(func, args, kwargs or {})

    def keep(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        results = function(*args, **kwargs)
        known = {one.untyped_storage().data_ptr() for one in tensors_in((args, kwargs))}
        made = [one for one in tensors_in(results) if one.untyped_storage().data_ptr() not in known]
        if made or not tensors_in(results):
            assert len(made) == len(tensors_in(results)), "an operation with results old and new"
            self.calls.append(Call(function, args, kwargs, made))
        elif is_in_place(function):
            self.calls.append(Call(function, args, kwargs, []))
        return results


def tensors_in(values: Any) -> list[Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, Tensor)]


def is_in_place(function: Any) -> bool:
    schema = getattr(function, "_schema", None)
    return schema is not None and schema.is_mutable


def kept(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call it, as one operation of the tape that this thread records; whatever it does, it may look at values."""
    tape = _get_current_dispatch_mode()
    if not isinstance(tape, Tape):
        return function(*args, **kwargs)
    with _disable_current_modes():
        return tape.keep(function, args, kwargs)


_CALL, _TOLIST = dispatch.Op.__call__, Tensor.tolist
_LOCK, _TAPES = threading.Lock(), list[Tape]()  # ranks record at the same time, each in a thread


def _kept_op(op: dispatch.Op[Any, Any, Any], *args: Any, **kwargs: Any) -> Any:
    return kept(_CALL, op, *args, **kwargs)


def _listed(tensor: Tensor) -> Any:  # no operation of torch: a tape would not see it
    if isinstance(_get_current_dispatch_mode(), Tape):
        raise ReadsValueError("tolist")
    return _TOLIST(tensor)


@contextlib.contextmanager
def ops_kept(tape: Tape) -> Iterator[None]:
    """Our own ops are operations of the tape inside the block; only they may look at values."""
    with _LOCK:
        _TAPES.append(tape)
        dispatch.Op.__call__ = _kept_op  # type: ignore[method-assign,assignment]
        Tensor.tolist = _listed  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        with _LOCK:
            _TAPES.remove(tape)
            if not _TAPES:
                dispatch.Op.__call__, Tensor.tolist = _CALL, _TOLIST  # type: ignore[method-assign]


def record(work: Callable[[], None]) -> Replay:
    """An `engine.models.captured.Capture`."""
    work()
    tape = Tape()
    with ops_kept(tape), tape:
        work()

    def replay() -> None:
        for one in tape.calls:
            one.again()

    return replay
