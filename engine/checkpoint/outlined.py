"""A checkpoint's tensors by their shapes alone: whether its files hold what its config says, before any is read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.engine.checkpoint.pieces import META
from slipstream.engine.checkpoint.weights import STORED_DTYPES, Weights
from slipstream.engine.ranks import Joint
from slipstream.kernels.matmul.blocks import BlockWeight
from slipstream.kernels.matmul.quantized import Quantized


class OutlinedWeights(Weights):
    """A source whose tensors have no memory. Raises `LoadError` for another shape, as a source that reads would.

    What is missing or surplus it does not say: `Weights.finish` does, of the parts that are read.
    """

    def _stored(
        self,
        name: str,
        shape: Sequence[int],
        dtypes: Sequence[str] = STORED_DTYPES,
        joint: Joint | None = None,
    ) -> Tensor:
        self._runs(name, shape, joint)
        return torch.empty(tuple(shape), dtype=self.dtype, device=META)

    def _take_narrow(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, joint: Joint | None
    ) -> Tensor | Quantized:
        if self.shape(name) != tuple(shape):
            raise self._other_shape(f"{self.folder}: matrix {name}", self.shape(name), shape)
        return self._layout(self._pieces(name)).outline((shape[0], shape[1]), dtype)

    def _refuse_broken(self, name: str, tensor: Tensor) -> None:
        """There are no values to look at."""

    def drop_copy(self, name: str, original: Tensor | BlockWeight) -> bool:
        """There is nothing to compare."""
        return False

    def finish(self) -> None:
        """Close the files."""
        self._files.close()
