"""A piece of work on the CPU, recorded while it runs and then replayed: what CUDA graphs are to a GPU.

What a replay does was settled when it was recorded: which operations, on which memory. Calls of compiled kernels become
programs (`program.py`); operations of torch between them, and operators of ours that look at values, are called again,
and their results copied to where they were. Work that itself looks at a value cannot be replayed; it then runs as it
would without a tape.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from slipstream.kernels.kernel import Kernel, begin_recording, end_recording
from slipstream.kernels.lent_memory import LentMemory
from slipstream.kernels.program import CannotReplay, Program

log = logging.getLogger(__name__)

Work = Callable[[], None]
_ATEN = torch.ops.aten
# What torch says of operations that give the program a value, or tensors whose size depends on values.
_LOOKS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# Operations that make memory and leave it as it is.
_EMPTY = {
    *(_ATEN.empty.memory_format, _ATEN.empty_strided.default, _ATEN.empty_like.default),
    *(_ATEN.new_empty.default, _ATEN.new_empty_strided.default),
}


class Tape(TorchDispatchMode):
    """Operations of the thread that enters it, in their order."""

    def __init__(self, memory: LentMemory) -> None:
        super().__init__()
        self._memory = memory
        self._program = Program()
        self._steps: list[Work] = []
        self.refusal: str | None = None  # why it cannot be replayed

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True, torch's default, loads the whole of torch.compile, and Triton with it, for a second.
        return False

    def __enter__(self) -> Tape:
        begin_recording(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        end_recording()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _EMPTY:
            return self._memory.like(func(*args, **kwargs))
        if _looks(func, args):
            self.refusal = f"{func} in a pass"
        return self._keep(func, args, kwargs, func(*args, **kwargs), writes=func._schema.is_mutable)

    def kernel(self, kernel: Kernel, args: tuple[Any, ...]) -> Any:
        """As `Recorder` says."""
        result = kernel.dispatcher(*args)
        try:
            self._program.add(kernel, args)
        except CannotReplay as error:
            self.refusal = str(error)
        return result

    def operator(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As `Recorder` says. An implementation that is `RECORDABLE` is recorded call by call; another is one call."""
        if getattr(sys.modules[function.__module__], "RECORDABLE", False):
            return function(*args, **kwargs)
        end_recording()
        try:
            with _disable_current_modes():
                made = function(*args, **kwargs)
                if not all(isinstance(one, Tensor) for one in tree_leaves(made)):
                    self.refusal = f"{function.__module__}.{function.__name__} gives more than tensors"
                return self._keep(function, args, kwargs, made, writes=True)
        finally:
            begin_recording(self)

    def _keep(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        made: Any,
        *,
        writes: bool,
    ) -> Any:
        """What it has made, in memory that is kept. If that is new, or if the operation writes, it is a step."""
        memory = self._memory
        known = {one.untyped_storage().data_ptr() for one in tree_leaves((args, kwargs)) if _is_tensor(one)}
        leaves, form = tree_flatten(made)
        results: list[tuple[int, Tensor]] = []
        for i, one in enumerate(leaves):
            if _is_tensor(one) and one.untyped_storage().data_ptr() not in known:
                leaves[i] = memory.like(one).copy_(one)
                results.append((i, memory.alias(leaves[i])))
        if results or writes:
            self._close_program()
            given = tree_map_only(Tensor, memory.alias, (args, kwargs))
            self._steps.append(_Again(function, *given, results))
        return tree_unflatten(leaves, form)

    def _close_program(self) -> None:
        if len(self._program):
            self._steps.append(self._program.seal())
            self._program = Program()

    def replay(self) -> Replay:
        """What does all steps again."""
        self._close_program()
        return Replay(tuple(self._steps), self._memory)


@dataclass(frozen=True, slots=True)
class Replay:
    """Recorded work."""

    steps: Sequence[Work]
    memory: LentMemory  # in which they work; it lives as long

    def __call__(self) -> None:
        for step in self.steps:
            step()


@dataclass(frozen=True, slots=True)
class _Again:
    """An operation, done again with the tensors it has always to use."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: Sequence[tuple[int, Tensor]]  # which of what it makes, and where that was

    def __call__(self) -> None:
        made = self.function(*self.args, **self.kwargs)
        leaves = (made,) if _is_tensor(made) else tree_leaves(made)
        for i, kept in self.results:
            kept.copy_(leaves[i])


def _looks(function: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operation of torch hands a value to the program, or takes one from it."""
    if function is _ATEN.index.Tensor:  # its size depends on values if it is asked for by a mask
        return any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1])
    return function is _ATEN.lift_fresh.default or not _LOOKS.isdisjoint(function.tags)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def recorder_of(memory: LentMemory) -> Callable[[Work], Work]:
    """(work) -> its replay, or the work itself where it cannot be replayed; the work has then run once."""
    refusals: set[str] = set()

    def record(work: Work) -> Work:
        tape = Tape(memory)
        with tape:
            work()
        if tape.refusal is None:
            return tape.replay()
        if tape.refusal not in refusals:
            refusals.add(tape.refusal)
            log.warning("passes are not recorded, and run slower than they could: %s", tape.refusal)
        return work

    return record
