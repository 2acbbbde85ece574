"""Which exceptions end the engine: those of a device that is lost, as torch, Triton and cuda.core word them."""

from __future__ import annotations

import pytest
import torch

from slipstream.engine.device_loss import device_loss, raise_if_lost
from slipstream.engine.errors import DeviceLost, InvalidRequest
from slipstream.kernels.device_fault import is_device_fault, is_out_of_memory


class CUDAError(Exception):
    """cuda.core's, which cannot be imported everywhere."""


LOST = [
    torch.AcceleratorError(
        "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be…"
    ),
    RuntimeError("CUDA error: unspecified launch failure"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(…)`"),
    RuntimeError("CUDA driver error: unknown error"),
    RuntimeError("Triton Error [CUDA]: misaligned address"),
    CUDAError("CUDA_ERROR_ILLEGAL_ADDRESS: While executing a kernel, the device encountered …"),
    RuntimeError("CUDA error: uncorrectable ECC error encountered"),
]
FULL = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    CUDAError("CUDA_ERROR_OUT_OF_MEMORY: The API call failed because it was unable to allocate …"),
]
HARMLESS = [
    torch.AcceleratorError("CUDA error: invalid configuration argument"),
    RuntimeError("CUDA error: too many resources requested for launch"),
    RuntimeError("CUDA error: operation not permitted when stream is capturing"),
    RuntimeError("CUDA error: no kernel image is available for execution on the device"),
    CUDAError("CUDA_ERROR_INVALID_VALUE: This indicates that one or more of the parameters …"),
    RuntimeError("a tensor of [CUDA error] is no device's"),
    ValueError("CUDA error: a client's words in a schema"),
    InvalidRequest("stop", "CUDA error: a client's words"),
]


@pytest.mark.parametrize("error", LOST, ids=str)
def test_a_lost_device_is_recognised(error: Exception) -> None:
    assert is_device_fault(error)
    assert not is_out_of_memory(error)
    with pytest.raises(DeviceLost) as caught:
        raise_if_lost(error)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [*FULL, *HARMLESS], ids=lambda one: str(one) or type(one).__name__)
def test_what_a_device_survives_ends_no_engine(error: Exception) -> None:
    assert not is_device_fault(error)
    assert device_loss(error) is None
    raise_if_lost(error)


def test_full_memory_is_told_from_the_rest() -> None:
    assert all(map(is_out_of_memory, FULL))
    assert not any(map(is_out_of_memory, HARMLESS))


def test_a_device_error_counts_wherever_it_is_in_a_chain() -> None:
    for how in ("cause", "context"):
        wrapped = ValueError("a drafter's own")
        setattr(wrapped, f"__{how}__", LOST[0])
        assert is_device_fault(wrapped)
        LOST[0].__context__ = wrapped  # a circle
        assert is_device_fault(wrapped)
        LOST[0].__context__ = None


def test_a_lost_device_stays_the_same_error() -> None:
    lost = DeviceLost()
    assert device_loss(lost) is lost
