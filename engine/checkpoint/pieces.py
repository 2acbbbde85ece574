"""The tensors that stand for one quantised matrix, and codes of four bits in words of eight."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.engine.errors import LoadError, UnsupportedModel

WORDS, WHOLE, SCALES = ("I32",), ("I64", "I32"), ("F32", "BF16", "F16")  # of safetensors
META = torch.device("meta")
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of columns 0 … 7 in a word, counted from the lowest four bits


@dataclass(frozen=True, slots=True)
class Pieces:
    """The stored tensors of one matrix."""

    where: str  # folder and matrix, for messages
    names: Mapping[str, str]  # what follows the matrix's name -> stored name
    # (stored name, shape, dtypes) -> on the device
    read: Callable[[str, Sequence[int] | None, Sequence[str]], Tensor]
    stored: Callable[[str], Sequence[int]]  # stored name -> its shape in the files
    is_part: bool = False  # what is read may be one rank's part of it

    def __contains__(self, piece: str) -> bool:
        return piece in self.names

    def take(self, piece: str, shape: Sequence[int] | None, dtypes: Sequence[str]) -> Tensor:
        """A piece as it is stored. shape: None for any. Raises `LoadError` if it is missing or of another shape."""
        if piece not in self.names:
            raise LoadError(f"{self.where}: has no {piece}")
        return self.read(self.names[piece], shape, dtypes)

    def shape(self, piece: str) -> tuple[int, ...]:
        """A piece's shape in the files; () if it is missing, which `take` says."""
        return tuple(self.stored(self.names[piece])) if piece in self.names else ()


def count_groups(pieces: Pieces, n_in: int, n_group: int | None) -> int:
    """Groups of so many inputs. Raises `UnsupportedModel` if they do not come out even."""
    if n_in % (n_group or n_in):
        raise UnsupportedModel(f"{pieces.where}: {n_in} inputs are no multiple of group_size = {n_group}")
    return n_in // (n_group or n_in)


def count_words(pieces: Pieces, n: int) -> int:
    """Words of eight codes each. Raises `UnsupportedModel` if they do not come out even."""
    if n % 8:
        raise UnsupportedModel(
            f"{pieces.where}: 4-bit codes of {n} inputs or outputs, must be a multiple of 8"
        )
    return n // 8


def nibbles(words: Tensor) -> Tensor:
    """The eight codes of each word, the lowest bits first: [n_rows, n] int32 -> [n_rows, 8 * n] uint8."""
    pairs = words.contiguous().view(torch.uint8)  # [n_rows, 4 * n]
    return torch.stack((pairs & 15, pairs >> 4), 2).flatten(1)


def interleaved(words: Tensor) -> Tensor:
    """The same of AWQ's words, whose columns lie in another order."""
    codes = nibbles(words).view(words.shape[0], -1, 8)  # [n_rows, n, 8]
    return codes[:, :, list(AWQ_PLACES)].flatten(1)


def in_pairs(codes: Tensor) -> Tensor:
    """[n_out, n_in] -> [n_out, n_in / 2] uint8, as `Int4Weight` keeps them."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def check_shape(pieces: Pieces, shape: Sequence[int], stored: Sequence[int]) -> None:
    """Raise `LoadError` unless `weight_shape` (compressed-tensors) is the matrix's. stored: as its codes have it."""
    whole = stored if pieces.is_part else shape
    if (told := pieces.take("weight_shape", [2], WHOLE).tolist()) != list(whole):
        raise LoadError(f"{pieces.where}: weight_shape says {told}, the config asks for {list(shape)}")


def read_order(pieces: Pieces, piece: str, n_in: int, n_groups: int) -> Tensor | None:
    """Inputs sorted by the group that a piece gives each, [n_in] int64; None if groups are runs of neighbours.

    Raises `LoadError` unless all groups have one size.
    """
    groups = pieces.take(piece, [n_in], WHOLE).to(torch.int64)  # [n_in]
    is_cut = len(groups) != math.prod(pieces.shape(piece))
    if is_cut:
        groups = groups - groups.min()
    runs = torch.arange(n_in, device=groups.device) // (n_in // n_groups)  # [n_in]
    if torch.equal(groups, runs):
        return None
    if is_cut:
        raise UnsupportedModel(
            f"{pieces.where}: {piece} shuffles the inputs of groups, which cannot be divided over ranks"
        )
    order = torch.argsort(groups, stable=True)
    if not torch.equal(groups[order], runs):
        raise LoadError(
            f"{pieces.where}: {piece} must name each of {n_groups} groups {n_in // n_groups} times"
        )
    return order


def reordered(codes: Tensor, order: Tensor | None) -> Tensor:
    """Codes in pairs [n_out, n_in / 2] whose inputs come in another order."""
    if order is None:
        return codes
    apart = torch.stack((codes & 15, codes >> 4), 2).flatten(1)  # [n_out, n_in]
    return in_pairs(apart[:, order])
