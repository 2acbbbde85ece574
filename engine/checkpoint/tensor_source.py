"""What layers are built from, and what that reads: tensors by name."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from slipstream.engine.ranks import Joint, Ranks
from slipstream.kernels.matmul.blocks import BlockWeight
from slipstream.kernels.matmul.quantized import Quantized


class StoredTensors(Protocol):
    """The tensors of a checkpoint's files, as they are stored, by the names of the text model alone."""

    @property
    def names(self) -> Collection[str]: ...

    def where(self, name: str) -> str:
        """File and tensor, for messages."""

    def in_file(self, name: str) -> str:
        """What the files call a tensor, or would if they had it."""

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> str | None:
        """As safetensors calls it, as "BF16"; None for matrices in block types."""

    def read(self, name: str) -> Tensor | BlockWeight:
        """In host memory, perhaps mapped from the file."""

    def close(self) -> None: ...


class TensorSource(Protocol):
    """What layers are built from: tensors by name, be they a checkpoint's or only their shapes."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def ranks(self) -> Ranks:
        """The processes over which the network is divided. Shapes asked for are those of one rank's part."""

    def __contains__(self, name: str) -> bool: ...

    def take(
        self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None, joint: Joint | None = None
    ) -> Tensor:
        """The tensor of that name and shape, in `dtype` or the source's. joint: a dimension that is several."""

    def take_linear(
        self, names: Sequence[str], d_in: int, d_outs: Sequence[int], joint: Sequence[int] = ()
    ) -> Tensor | Quantized:
        """The matrices `name.weight` [d_out, d_in] one below the other, as narrow as they are stored.

        joint: sizes of the matrices that the first of them consists of, if these are several.
        """

    def take_matrix(
        self, name: str, shape: tuple[int, int], *, for_rows: bool = True
    ) -> Tensor | BlockWeight:
        """A matrix of that name and shape, in blocks if it is stored so and its use can read them, else widened.

        for_rows: rows are taken of it, as of an embedding; False: it is packed.
        """

    def take_tied(self, name: str, original: Tensor | BlockWeight) -> Tensor | BlockWeight:
        """The matrix `name.weight`, taken for its rows before, once more: to be packed. original: as it was taken."""

    def take_expert(self, name: str, shape: tuple[int, int]) -> Tensor | Quantized:
        """A matrix of that name and shape, as narrow as experts are multiplied: on CPUs, as narrow as it is stored."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Of a tensor undivided; None where nothing is stored, so that any shape is right."""

    def drop_copy(self, name: str, original: Tensor | BlockWeight) -> bool:
        """Count a tensor as used if it only repeats `original`; returns whether it does."""

    def leave(self, names: Iterable[str]) -> None:
        """Do not account for tensors that nothing reads, if they are there."""
