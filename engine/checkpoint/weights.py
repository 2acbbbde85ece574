"""A checkpoint's files -> tensors of a network; every tensor is used exactly once, or the load is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from slipstream.engine.checkpoint.gguf.files import GgufTensors
from slipstream.engine.checkpoint.gguf.matrices import is_finite
from slipstream.engine.checkpoint.layouts import (
    Layout,
    Scheme,
    find_narrow,
    largest,
    packed_bytes,
    placed,
    stays_narrow,
)
from slipstream.engine.checkpoint.parts import cut_blocks
from slipstream.engine.checkpoint.pieces import Pieces
from slipstream.engine.checkpoint.safetensors_folder import SafetensorsFolder
from slipstream.engine.checkpoint.tensor_source import StoredTensors
from slipstream.engine.errors import CheckpointMismatch, LoadError, UnsupportedModel
from slipstream.engine.naming import is_gguf
from slipstream.engine.ranks import ALONE, Joint, Ranks, cut, cut_of
from slipstream.kernels.matmul.blocks import BlockWeight
from slipstream.kernels.matmul.quantized import Quantized, joined, widened

STORED_DTYPES = ("BF16", "F16", "F32", "F64")
INTEGER_DTYPES = ("I64", "I32")
# Tensors that old files carry although they are computed from the config.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
# What wrappers hold beside the text model: not read.
MEDIA = re.compile(
    r"(model\.)?(visual|vision_tower|audio_tower|vision_model|multi_modal_projector|vit_large_projector"
    r"|embed_vision|embed_audio)\."
)
# A folder of another model misses every tensor; stop after this many.
N_MISSING_MAX = 64
MOST_MISSING = 1 << 28  # numbers of a missing tensor that zeros are made for


def open_tensors(path: Path) -> StoredTensors:
    """The tensors of a folder of safetensors, or of a GGUF file. Raises `LoadError` naming the file."""
    return GgufTensors(path) if is_gguf(path) else SafetensorsFolder(path)


def tensor_names(folder: Path | str) -> frozenset[str]:
    """What a checkpoint's tensors are called. Raises `LoadError` if it cannot be read; no tensor is."""
    return Weights(folder, torch.float32, torch.device("cpu")).names


class Weights:
    """The tensors of one checkpoint, handed out by name; then `finish` settles the account."""

    def __init__(
        self,
        folder: Path | str,
        dtype: torch.dtype,
        device: torch.device,
        scheme: Scheme | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """Open the folder's files. Raises `LoadError` naming the file that is not there or not readable.

        scheme: how matrices of few bits are stored; without a scheme they are refused. ranks: whose part is handed out.
        """
        self.folder = Path(folder)
        self.dtype = dtype
        self.device = device
        self.scheme = scheme
        self.ranks = ranks
        self.n_params = 0  # of the tensors handed out
        self.n_bytes = 0  # that they take on the device once they are packed
        self._files = open_tensors(self.folder)
        names = self._files.names
        ignored = [name for name in names if name.endswith(IGNORED_SUFFIXES) or MEDIA.match(name)]
        self._unused = set(names).difference(ignored)
        self._missing: list[str] = []
        self._divided: set[str] = set()  # tensors of which only a part was read
        # Matrix -> {what follows its layer's name: stored name}, of those that several tensors stand for.
        self._narrow = find_narrow(names)

    def __contains__(self, name: str) -> bool:
        return name in self._narrow or name in self._files.names

    def take(
        self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None, joint: Joint | None = None
    ) -> Tensor:
        """A fresh copy of a tensor on the run's device, in `dtype` or the run's; each name may be taken once.

        A missing tensor comes as zeros, so that `finish` can name all that are missing. Raises `LoadError` for
        another shape and `UnsupportedModel` for a dtype that is not read.
        """
        tensor = widened(self._take(name, shape, dtype or self.dtype, joint)).to(self.device)
        if self._is_added_once(name):
            tensor.zero_()
        self._count(tensor)
        return tensor

    def take_linear(
        self, names: Sequence[str], d_in: int, d_outs: Sequence[int], joint: Sequence[int] = ()
    ) -> Tensor | Quantized:
        """The matrices `name.weight` [d_out, d_in], one below the other, in the run's dtype on its device.

        Those that are stored in one narrow layout stay narrow. joint: sizes of the matrices that the first of them
        consists of. Raises as `take` does.
        """
        joints = [Joint(0, joint) if joint and not i else None for i in range(len(names))]
        matrix = joined(
            [
                placed(self._take(f"{name}.weight", (d_out, d_in), self.dtype, one), self.device)
                for name, d_out, one in zip(names, d_outs, joints, strict=True)
            ]
        )
        self._count(matrix)
        return matrix

    def take_expert(self, name: str, shape: tuple[int, int]) -> Tensor | Quantized:
        """A matrix in the run's dtype, on CPUs as narrow as it is stored, else widened. Raises as `take` does."""
        taken = self._take(name, shape, self.dtype)
        matrix = taken if self.device.type == "cpu" else widened(taken).to(self.device)
        self._count(matrix)
        return matrix

    def take_matrix(
        self, name: str, shape: tuple[int, int], *, for_rows: bool = True
    ) -> Tensor | BlockWeight:
        """A matrix in the run's dtype, in blocks if it is stored so and its use can read them, else widened.

        for_rows: rows are taken of it, as of an embedding; False: it is packed. Raises as `take` does.
        """
        taken = self._take(name, shape, self.dtype)
        if not isinstance(taken, BlockWeight) or (for_rows and self.device.type != "cpu"):
            taken = widened(taken)
        matrix = placed(taken, self.device)
        self._count(matrix)
        return matrix

    def take_tied(self, name: str, original: Tensor | BlockWeight) -> Tensor | BlockWeight:
        """The matrix `name.weight`, taken for its rows before, once more: to be packed, which takes room again.

        original: as it was taken. One in blocks stays in the file, so it takes room once.
        """
        if isinstance(original, BlockWeight):
            return original
        matrix: Tensor | BlockWeight = original
        stored = None if f"{name}.weight" in self._narrow else self._stored(f"{name}.weight", original.shape)
        if isinstance(stored, BlockWeight):
            stored = replace(stored, dtype=self.dtype)
            matrix = placed(stored, self.device) if stays_narrow(stored, self.device) else original
        self.n_bytes += packed_bytes(matrix, self.device) // self.ranks.n
        return matrix

    def _count(self, taken: Tensor | Quantized) -> None:
        self.n_params += math.prod(taken.shape)
        self.n_bytes += packed_bytes(taken, self.device)

    def _is_added_once(self, name: str) -> bool:
        """Whether a bias belongs to products of which the ranks compute parts, so that only the first may add it.

        If the outputs had been divided, so would the bias.
        """
        if not self.ranks.rank or not name.endswith("bias") or name in self._divided:
            return False
        matrix = name.removesuffix("bias").rstrip("._")
        return any(one == matrix or one.startswith((f"{matrix}.", f"{matrix}_")) for one in self._divided)

    def _take(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, joint: Joint | None = None
    ) -> Tensor | Quantized:
        """A fresh copy of a tensor, narrow if it is stored so."""
        if name in self._narrow:
            return self._take_narrow(name, shape, dtype, joint)
        if name not in self._files.names:
            self._missing.append(name)
            if len(self._missing) >= N_MISSING_MAX or math.prod(shape) > MOST_MISSING:
                self.finish()
            return torch.zeros(tuple(shape), dtype=dtype, device=self.device)
        self._unused.remove(name)
        if isinstance(stored := self._stored(name, shape, joint=joint), BlockWeight):
            return self._take_blocks(stored, name, dtype)
        # A copy: the file may change under a mapping.
        tensor = stored.to(device=self.device, dtype=dtype, copy=True)
        self._refuse_broken(name, tensor)
        return tensor

    def _take_blocks(self, stored: BlockWeight, name: str, dtype: torch.dtype) -> BlockWeight:
        """The same of a matrix in a block type, still in the file."""
        if not is_finite(stored):
            raise LoadError(
                f"{self._files.where(name)} holds values that are not finite; the file is damaged"
            )
        return replace(stored, dtype=dtype)

    def _take_narrow(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, joint: Joint | None
    ) -> Tensor | Quantized:
        """The same of a matrix that several tensors stand for."""
        pieces = self._pieces(name, joint)
        if len(shape) != 2:
            raise UnsupportedModel(
                f"{pieces.where}: is quantised (it is stored as {', '.join(sorted(pieces.names))}),"
                f" and of {len(shape)} dimensions; only matrices are read so"
            )
        n_out, n_in = shape
        matrix = self._layout(pieces).read(pieces, (n_out, n_in), dtype)
        if largest(matrix) > torch.finfo(dtype).max and not bool(widened(matrix).isfinite().all()):
            raise LoadError(
                f"{pieces.where} does not fit {str(dtype).removeprefix('torch.')}; use another --dtype"
            )
        return matrix

    def _pieces(self, name: str, joint: Joint | None = None) -> Pieces:
        """joint: of its outputs, wherever the layout has them."""

        def read(piece: str, wanted: Sequence[int] | None, dtypes: Sequence[str]) -> Tensor:
            self._unused.remove(piece)
            shape = self._files.shape(piece) if wanted is None else wanted
            tensor = self._read(piece, shape, dtypes, outputs).to(device=self.device, copy=True)
            if tensor.dtype.itemsize > 1 and tensor.is_floating_point():
                self._refuse_broken(piece, tensor)
            return tensor

        where, of_file = f"{self.folder}: matrix {name}", self._files.shape
        found = Pieces(where, self._narrow[name], read, of_file, self.ranks.n > 1)
        outputs = None if joint is None else replace(joint, dim=self._layout(found).output_dim)
        return found

    def _layout(self, pieces: Pieces) -> Layout:
        if self.scheme is None:
            raise UnsupportedModel(
                f"{pieces.where}: is quantised (it is stored as {', '.join(sorted(pieces.names))}),"
                " and no quantization_config says how"
            )
        return self.scheme.layout_of(pieces)

    def _refuse_broken(self, name: str, tensor: Tensor) -> None:
        """Raise `LoadError` for a tensor that holds NaN or infinity: every reply would be noise."""
        if tensor.numel() == 0 or all(
            math.isfinite(one) for one in torch.stack(torch.aminmax(tensor)).tolist()
        ):
            return
        where = self._files.where(name)
        if tensor.dtype == torch.float16 and bool(torch.isfinite(self._read(name, tensor.shape)).all()):
            raise LoadError(f"{where} does not fit float16; use another --dtype")
        raise LoadError(f"{where} holds values that are not finite; the file is damaged")

    def take_again(self, name: str) -> Tensor:
        """Another copy of a tensor taken before, for a matrix that is packed in two ways."""
        return self._read(name, self.shape(name)).to(device=self.device, dtype=self.dtype, copy=True)

    def take_integers(self, name: str, n: int) -> Tensor:
        """A tensor of whole numbers, [n] int64 on the device; counted as used, not among the parameters.

        Raises `LoadError` if it is missing, of another shape or not of whole numbers.
        """
        if name not in self._files.names:
            raise LoadError(f"{self.folder}: tensor {name} is missing")
        self._unused.discard(name)
        return self._read(name, [n], INTEGER_DTYPES).to(device=self.device, dtype=torch.int64, copy=True)

    def drop_copy(self, name: str, original: Tensor | BlockWeight) -> bool:
        """Count a tensor as used if the files hold it and it only repeats `original`; returns whether."""
        if name not in self._files.names or name in self._narrow:
            return False
        stored = self._stored(name, original.shape)
        if isinstance(stored, BlockWeight) or isinstance(original, BlockWeight):
            repeats = _same_blocks(stored, original)
        else:
            repeats = torch.equal(stored.to(device=self.device, dtype=self.dtype), original)
        if repeats:
            self._unused.discard(name)
        return repeats

    def drop_twin(self, name: str, other: str) -> bool:
        """Count a tensor as used if the files hold it and it equals their tensor `other`; returns whether."""
        if not {name, other} <= self._files.names - self._narrow.keys():
            return False
        if self.shape(name) != self.shape(other):
            return False
        shape = self.shape(name)
        one, two = (self._read(key, shape) for key in (name, other))
        if torch.equal(one, two):
            self._unused.discard(name)
            return True
        return False

    def leave(self, names: Iterable[str]) -> None:
        """Do not account for tensors that nothing reads, or another network in the same folder."""
        self._unused.difference_update(names)

    @property
    def names(self) -> frozenset[str]:
        """All tensors that the files hold, and the matrices that several of them stand for."""
        return frozenset(self._files.names | self._narrow.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor as stored, undivided, where tensors are trusted more than their config.

        Raises `LoadError` if it is not there.
        """
        if name in self._narrow:
            pieces = self._pieces(name)
            layout = self._layout(pieces)
            return layout.shape(self._files.shape(pieces.names[layout.codes]))
        if name not in self._files.names:
            raise LoadError(f"{self.folder}: tensor {name} is missing")
        return self._files.shape(name)

    def finish(self) -> None:
        """Close the files. Raises `CheckpointMismatch` naming tensors that were missing or not used."""
        self._drop_empty_biases()
        self._files.close()
        if self._missing or self._unused:
            missing, unused = (
                sorted({self._files.in_file(name) for name in names})
                for names in (self._missing, self._unused)
            )
            raise CheckpointMismatch(str(self.folder), missing, unused)

    def _drop_empty_biases(self) -> None:
        """Count biases of quantised layers as used if they are zero: AutoGPTQ writes a bias for every layer."""
        for name in [f"{matrix.removesuffix('.weight')}.bias" for matrix in self._narrow]:
            if name in self._unused and not bool(self._read(name, self._files.shape(name)).any()):
                self._unused.remove(name)

    def _read(
        self,
        name: str,
        shape: Sequence[int],
        dtypes: Sequence[str] = STORED_DTYPES,
        joint: Joint | None = None,
    ) -> Tensor:
        """A tensor of plain numbers as stored, mapped from its file; of a matrix in a block type its values."""
        return widened(self._stored(name, shape, dtypes, joint))

    def _stored(
        self,
        name: str,
        shape: Sequence[int],
        dtypes: Sequence[str] = STORED_DTYPES,
        joint: Joint | None = None,
    ) -> Tensor | BlockWeight:
        files, runs = self._files, self._runs(name, shape, joint)
        if (dtype := files.dtype(name)) not in (None, *dtypes):
            raise UnsupportedModel(f"{files.where(name)} has dtype {dtype}; only {', '.join(dtypes)}")
        tensor = files.read(name)
        if tuple(shape) == files.shape(name):
            return tensor
        self._divided.add(name)
        if isinstance(tensor, Tensor):
            return cut(tensor, runs)
        part = cut_blocks(tensor, runs)
        if part is None:
            raise UnsupportedModel(
                f"{files.where(name)}: blocks of {tensor.kind} cannot be cut to {list(shape)}{self._of_part}"
            )
        return part

    def _runs(self, name: str, shape: Sequence[int], joint: Joint | None) -> list[list[slice]]:
        """Per dimension what this rank reads of a tensor. Raises `LoadError` for a shape that is no part of it."""
        stored = self._files.shape(name)
        runs = cut_of(self.ranks, stored, shape, joint)
        if runs is None:
            raise self._other_shape(self._files.where(name), stored, shape)
        return runs

    def _other_shape(self, where: str, stored: Sequence[int], shape: Sequence[int]) -> LoadError:
        return LoadError(
            f"{where} has shape {list(stored)}, the config asks for {list(shape)}{self._of_part}"
        )

    @property
    def _of_part(self) -> str:
        return f" (--tensor-parallel-size {self.ranks.n})" if self.ranks.n > 1 else ""


def _same_blocks(one: Tensor | BlockWeight, other: Tensor | BlockWeight) -> bool:
    """Whether two matrices have the same bytes in the same block type."""
    if not isinstance(one, BlockWeight) or not isinstance(other, BlockWeight):
        return False
    return one.kind == other.kind and torch.equal(one.data, other.data)
