"""A device that answers no more ends the engine. Everything else that raises ends a draft or a request at most.

Every place on the engine's thread that goes on after an exception asks here first: what it would try next, on a device
that is lost, fails as well, for every request, in a server that still looks healthy.
"""

from __future__ import annotations

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
