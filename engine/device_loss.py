"""A device that answers no more ends the engine. Everything else that raises ends a draft or a request at most.

Every place on the engine's thread that goes on after an exception asks here first: what it would try next, on a device
that is lost, fails as well, for every request, in a server that still looks healthy.
"""

from __future__ import annotations

from collections.abc import Callable

from slipstream.engine.errors import DeviceLost
from slipstream.kernels.device_fault import is_device_fault


def device_loss(error: BaseException) -> DeviceLost | None:
    """The error that ends the engine, if `error` says that its device is lost."""
    if isinstance(error, DeviceLost):
        return error
    if not is_device_fault(error):
        return None
    lost = DeviceLost()
    lost.__cause__ = error
    return lost


def raise_if_lost(error: BaseException) -> None:
    """Raises `DeviceLost` where the device is lost; returns where the caller may go on."""
    if (lost := device_loss(error)) is not None:
        raise lost


class Spared:
    """Hands what goes wrong inside to `failed`, and goes on behind it; raises `DeviceLost` where the device is lost.

    A class, not a generator: a step goes through several, and every slot through two.
    """

    __slots__ = ("_failed",)

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self._failed = failed

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        raise_if_lost(error)
        self._failed(error)
        return True
