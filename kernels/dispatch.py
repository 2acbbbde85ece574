"""Chooses which implementation of an op runs: once at start per device and dtype, never per call.

An op's folder holds `op.py` (signature and meaning) and one module per implementation with the same signature.
A call finds the implementation that `select` fixed for its first tensor's device and dtype, or raises.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, Protocol, TypeVar

import torch

from slipstream import kernels
from slipstream.kernels.kernel import run


class Placed(Protocol):
    """The type of an op's first argument: a tensor, or an object with its device and dtype."""

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...


X = TypeVar("X", bound=Placed)
P = ParamSpec("P")
R = TypeVar("R")

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int32, torch.int64)
# Implementation -> the type of device it is made for; it is not imported for other types. All others run anywhere.
MADE_FOR = {"cpu": "cpu", "panels": "cpu", "tiled": "cpu", "cuda": "cuda", "triton": "cuda"}


class CannotRunError(RuntimeError):
    """An implementation was asked for that this machine, device or dtype cannot run, or none was selected."""


class Selected(NamedTuple):
    """A line of the table that `select` returns; the caller logs it."""

    op: str
    implementation: str
    reason: str
    # Better implementations that should run here and do not, each with what went wrong.
    failed: tuple[str, ...] = ()


class Op(Generic[X, P, R]):
    """A public function of `op.py`; calling it runs the selected implementation.

    implementations: module names in the op's folder, best first. any_dtype: one choice serves all dtypes, also of ops
    whose first tensor is of integers.
    """

    def __init__(
        self,
        signature: Callable[Concatenate[X, P], R],
        implementations: tuple[str, ...],
        *,
        any_dtype: bool,
    ) -> None:
        functools.update_wrapper(self, signature)
        self.name = signature.__name__
        self.folder = signature.__module__.split(".")[-2]
        self.implementations = implementations
        self.any_dtype = any_dtype
        self._table: dict[tuple[str, torch.dtype], Callable[..., R]] = {}
        self._forced: Callable[..., R] | None = None

    def __call__(self, first: X, *args: P.args, **kwargs: P.kwargs) -> R:
        chosen = self._forced or self._table.get((first.device.type, first.dtype))
        if chosen is None:
            raise CannotRunError(
                f"{self.folder}.{self.name}: nothing selected for {first.device.type} {first.dtype};"
                " call kernels.select(device, dtype) at start"
            )
        result: R = run(chosen, first, *args, **kwargs)
        return result

    def load(self, implementation: str) -> Callable[..., R]:
        """The function of that implementation. Raises CannotRunError if it does not exist or does not import."""
        function: Callable[..., R] = getattr(_module(self.folder, implementation), self.name)
        return function

    def fix(self, device: torch.device, dtype: torch.dtype, implementation: str) -> None:
        """Calls on this device and dtype run `implementation` from now on."""
        function = self.load(implementation)
        for each in (*FLOATS, *INTEGERS) if self.any_dtype else (dtype,):
            self._table[device.type, each] = function

    def swap_table(self, table: Mapping[tuple[str, torch.dtype], Callable[..., R]]) -> Any:
        """Choose by `table`, (device type, dtype) -> function, from now on; returns the table used before."""
        before, self._table = self._table, dict(table)
        return before

    def swap_forced(self, function: Callable[..., R] | None) -> Callable[..., R] | None:
        """Make every call run `function` (None: the selected implementation); returns what was forced before."""
        before, self._forced = self._forced, function
        return before


def op(
    *implementations: str, any_dtype: bool = False
) -> Callable[[Callable[Concatenate[X, P], R]], Op[X, P, R]]:
    """Decorator of a signature in `op.py`: names the implementations, best first."""

    def wrap(signature: Callable[Concatenate[X, P], R]) -> Op[X, P, R]:
        return Op(signature, implementations, any_dtype=any_dtype)

    return wrap


def select(
    device: torch.device | str,
    dtype: torch.dtype,
    asked: Mapping[str, str] | None = None,
    *,
    exact: Collection[str] = (),
    failed: Mapping[tuple[str, str], str] | None = None,
    prepares: bool = True,
) -> list[Selected]:
    """Fix the implementation of every op for one device and dtype; call it once per network at start.

    asked: op folder -> implementation that must be used. exact: op folders whose results must not depend on the rows
    computed beside them, in any bit; a definition in plain torch does not promise that unless it says `EXACT`. failed:
    (op folder, implementation) -> why it must not run here (`proof`). prepares: an implementation that has
    `prepare(device)` does here what would make its first call slow; one that cannot is passed over. Raises
    CannotRunError if an implementation in `asked` cannot run, or an op has none that does what is asked.
    """
    device, wishes = torch.device(device), dict(asked or {})
    if unknown := wishes.keys() - set(kernels.OPS):
        raise CannotRunError(f"no such op: {', '.join(sorted(unknown))}")
    table = []
    for folder, ops in _ops().items():
        must = wishes.get(folder)
        names = made_for(folder, device) if must is None else (must,)

        choice = _Choice(folder, device, dtype, exact=folder in exact, failed=failed or {}, prepares=prepares)
        selected = choice.of(names, "asked for" if must else f"best for {device.type} {_short(dtype)}")
        for one in ops:
            one.fix(device, dtype, selected.implementation)
        note = getattr(_module(folder, selected.implementation), "note", None)
        remark = None if note is None else note(device, dtype)
        table.append(selected if remark is None else selected._replace(reason=f"{selected.reason}; {remark}"))
    return table


def made_for(folder: str, device: torch.device) -> tuple[str, ...]:
    """The implementations of an op that are made for such a device, best first."""
    names = _ops()[folder][0].implementations
    return tuple(name for name in names if MADE_FOR.get(name, device.type) == device.type)


def candidates(folder: str, device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
    """Those of them that say that they can run there in this dtype."""
    return tuple(name for name in made_for(folder, device) if _refusal(folder, name, device, dtype) is None)


@contextmanager
def use(implementation: str, *folders: str) -> Iterator[None]:
    """Run `implementation` for the named ops (default: all) inside the block. For tests and benches.

    Raises CannotRunError if one of the ops does not have it. Not per thread: the whole process is switched.
    """
    known = _ops()
    chosen = [(one, one.load(implementation)) for folder in folders or kernels.OPS for one in known[folder]]
    before = [(one, one.swap_forced(function)) for one, function in chosen]
    try:
        yield
    finally:
        for one, function in before:
            one.swap_forced(function)


@contextmanager
def watched(wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Inside the block each op runs `wrap(its name, what was selected)`. For profiles; switches the whole process."""
    before = [(one, one.swap_table({})) for ops in _ops().values() for one in ops]
    for one, table in before:
        one.swap_table({key: wrap(one.name, function) for key, function in table.items()})
    try:
        yield
    finally:
        for one, table in before:
            one.swap_table(table)


class _Choice:
    """Goes through the implementations of one op."""

    def __init__(
        self,
        folder: str,
        device: torch.device,
        dtype: torch.dtype,
        *,
        exact: bool,
        failed: Mapping[tuple[str, str], str],
        prepares: bool,
    ) -> None:
        self.folder, self.device, self.dtype = folder, device, dtype
        self.exact, self.failed, self.prepares = exact, failed, prepares

    def of(self, names: Collection[str], reason: str) -> Selected:
        """The first that can run there, after which come what was refused before it, or `reason`."""
        refused: list[str] = []
        failed: list[str] = []
        for name in names:
            why = self._refusal(name)
            if why is None and (why := self._failure(name)) is not None:
                failed.append(f"{name}: {why}")
            if why is None:
                return Selected(self.folder, name, "; ".join(refused) or reason, tuple(failed))
            refused.append(f"{name} refused: {why}")
        raise CannotRunError(f"{self.folder}: {'; '.join(refused)}")

    def _refusal(self, name: str) -> str | None:
        """Why it is not made for what is asked; None if it is."""
        reason = _refusal(self.folder, name, self.device, self.dtype)
        if reason is None and self.exact and not _is_exact(self.folder, name):
            return "its bits may depend on the rows computed beside"
        return reason

    def _failure(self, name: str) -> str | None:
        """What went wrong with it on this machine; None if it is ready."""
        if (why := self.failed.get((self.folder, name))) is not None:
            return why
        prepare = getattr(_module(self.folder, name), "prepare", None)
        if prepare is None or not self.prepares:
            return None
        try:
            prepare(self.device, self.dtype)
        except CannotRunError as error:
            return str(error)
        return None


def _refusal(folder: str, implementation: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this implementation cannot run there; None if it can."""
    if MADE_FOR.get(implementation, device.type) != device.type:
        return f"the device is {device.type}"
    try:
        refuses = getattr(_module(folder, implementation), "refuses", None)
        reason: str | None = None if refuses is None else refuses(device, dtype)
    except CannotRunError as error:
        return str(error)
    return reason


def _is_exact(folder: str, implementation: str) -> bool:
    """Whether a row's result is the same, bit for bit, whatever is computed beside it."""
    return implementation != "reference" or getattr(_module(folder, implementation), "EXACT", False)


def _module(folder: str, implementation: str) -> ModuleType:
    try:
        return importlib.import_module(f"slipstream.kernels.{folder}.{implementation}")
    except ImportError as error:
        raise CannotRunError(f"kernels.{folder}.{implementation} does not import: {error}") from error


@functools.cache
def _ops() -> dict[str, list[Op[Any, Any, Any]]]:
    """Folder -> its ops, by import of every `op.py`."""
    modules = {folder: importlib.import_module(f"slipstream.kernels.{folder}.op") for folder in kernels.OPS}
    return {
        folder: [value for value in vars(module).values() if isinstance(value, Op)]
        for folder, module in modules.items()
    }


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
