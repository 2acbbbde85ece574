"""What the host sends to a device in one copy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.engine.batch import Layout, upload

ARRAYS = (
    np.arange(5, dtype=np.int64),
    np.zeros((0, 3), np.int32),
    np.linspace(0, 1, 7, dtype=np.float32).reshape(7, 1),
    np.zeros(0, np.int64),
)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2), (1,), (3, 1)])
def test_arrays_come_back_from_one_buffer_as_they_were(order: tuple[int, ...]) -> None:
    """The empty ones as well, and where there is nothing else: a chunk of a prompt asks for no logits."""
    arrays = [ARRAYS[i] for i in order]
    layout = Layout.of(arrays)
    buffer = np.zeros(layout.n_bytes, np.uint8)
    for one, place in zip(arrays, layout.arrays(buffer), strict=True):
        place[...] = one
    for one, sent in zip(arrays, layout.tensors(torch.from_numpy(buffer)), strict=True):
        assert torch.equal(sent, torch.from_numpy(one))
        assert sent.dtype == torch.from_numpy(one).dtype


def test_nothing_can_be_sent_to_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)  # which only a machine with a GPU can
    (sent,) = upload((np.zeros(0, np.int64),), torch.device("meta"))
    assert (tuple(sent.shape), sent.dtype, sent.device.type) == ((0,), torch.int64, "meta")
