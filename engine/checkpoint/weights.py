"""Safetensors files -> tensors of a network; every tensor is used exactly once, or the load is refused.

Nothing is ever unpickled: `.bin` and `.pt` checkpoints are refused with a hint how to convert them.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from slipstream.engine.checkpoint.layouts import MARKS, PIECES, Layout, Pieces, Scheme, packed_bytes
from slipstream.engine.errors import CheckpointMismatch, LoadError, UnsupportedModel
from slipstream.engine.text.json_file import read_object
from slipstream.kernels.matmul.quantized import Quantized, joined, widened

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD = re.compile(r"[^/\\\0]*\.safetensors")
STORED_DTYPES = ("BF16", "F16", "F32", "F64")
INTEGER_DTYPES = ("I64", "I32")
# Tensors that old files carry although they are computed from the config.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
# Prefixes of wrapper checkpoints for several media -> those of the text model alone.
TEXT_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
# What wrappers hold beside the text model: not read.
MEDIA = re.compile(
    r"(model\.)?(visual|vision_tower|audio_tower|vision_model|multi_modal_projector|embed_vision|embed_audio)\."
)
# A folder of another model misses every tensor; stop after this many.
N_MISSING_MAX = 64


class TensorSource(Protocol):
    """What layers are built from: tensors by name, be they a checkpoint's or only their shapes."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def __contains__(self, name: str) -> bool: ...

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """The tensor of that name and shape, in `dtype` or the source's."""

    def take_linear(self, names: Sequence[str], d_in: int, d_outs: Sequence[int]) -> Tensor | Quantized:
        """The matrices `name.weight` [d_out, d_in] one below the other, as narrow as they are stored."""

    def drop_copy(self, name: str, original: Tensor) -> bool:
        """Count a tensor as used if it only repeats `original`; returns whether it does."""


def tensor_names(folder: Path | str) -> frozenset[str]:
    """What a folder's tensors are called. Raises `LoadError` if it cannot be read; no tensor is."""
    return Weights(folder, torch.float32, torch.device("cpu")).names


class Weights:
    """The tensors of one checkpoint folder, handed out by name; then `finish` settles the account."""

    def __init__(
        self, folder: Path | str, dtype: torch.dtype, device: torch.device, scheme: Scheme | None = None
    ) -> None:
        """Open the folder's files. Raises `LoadError` naming the file that is not there or not readable.

        scheme: how matrices of few bits are stored; without a scheme they are refused.
        """
        self.folder = Path(folder)
        self.dtype = dtype
        self.device = device
        self.scheme = scheme
        self.n_params = 0  # of the tensors handed out
        self.n_bytes = 0  # that they take on the device once they are packed
        self._files: dict[str, Any] = {}  # file name -> open handle
        listed = self._list_tensors()
        self._stored = {text_name(name): name for name in listed}
        if len(self._stored) < len(listed):
            raise LoadError(f"{folder}: holds the text model twice, under different prefixes")
        self._file_of = {text_name(name): file for name, file in listed.items()}  # tensor name -> file name
        ignored = [name for name in self._file_of if name.endswith(IGNORED_SUFFIXES) or MEDIA.match(name)]
        self._unused = set(self._file_of).difference(ignored)
        self._missing: list[str] = []
        # Matrix -> {what follows its layer's name: stored name}, of those that several tensors stand for.
        self._narrow = find_narrow(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._narrow or name in self._file_of

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """A fresh copy of a tensor on the run's device, in `dtype` or the run's; each name may be taken once.

        A missing tensor comes as zeros, so that `finish` can name all that are missing. Raises `LoadError` for
        another shape and `UnsupportedModel` for a dtype that is not read.
        """
        tensor = widened(self._take(name, shape, dtype or self.dtype))
        self._count(tensor)
        return tensor

    def take_linear(self, names: Sequence[str], d_in: int, d_outs: Sequence[int]) -> Tensor | Quantized:
        """The matrices `name.weight` [d_out, d_in], one below the other, in the run's dtype on its device.

        Those that are stored in one narrow layout stay narrow. Raises as `take` does.
        """
        shapes = [(d_out, d_in) for d_out in d_outs]
        matrix = joined(
            [
                self._take(f"{name}.weight", shape, self.dtype)
                for name, shape in zip(names, shapes, strict=True)
            ]
        )
        self._count(matrix)
        return matrix

    def _count(self, taken: Tensor | Quantized) -> None:
        self.n_params += math.prod(taken.shape)
        self.n_bytes += packed_bytes(taken, self.device)

    def _take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor | Quantized:
        """A fresh copy of a tensor, narrow if it is stored so."""
        if name in self._narrow:
            return self._take_narrow(name, shape, dtype)
        if name not in self._file_of:
            self._missing.append(name)
            if len(self._missing) >= N_MISSING_MAX:
                self.finish()
            return torch.zeros(tuple(shape), dtype=dtype, device=self.device)
        self._unused.remove(name)
        file = self._file_of[name]
        stored = self._read(file, name, shape)
        # A copy: the file may change under a mapping.
        tensor = stored.to(device=self.device, dtype=dtype, copy=True)
        self._refuse_broken(file, name, tensor)
        return tensor

    def _take_narrow(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor | Quantized:
        """The same of a matrix that several tensors stand for."""
        pieces = self._pieces(name)
        n_out, n_in = shape
        matrix = self._layout(pieces).read(pieces, (n_out, n_in), dtype)
        # No code of either kind is larger than 448.
        bound = math.inf if isinstance(matrix, Tensor) else 448 * float(matrix.scales.abs().max())
        if bound > torch.finfo(dtype).max and not bool(widened(matrix).isfinite().all()):
            raise LoadError(
                f"{pieces.where} does not fit {str(dtype).removeprefix('torch.')}; use another --dtype"
            )
        return matrix

    def _pieces(self, name: str) -> Pieces:
        def read(piece: str, wanted: Sequence[int] | None, dtypes: Sequence[str]) -> Tensor:
            self._unused.remove(piece)
            file = self._file_of[piece]
            stored = self._read(file, piece, self._stored_shape(piece) if wanted is None else wanted, dtypes)
            tensor = stored.to(device=self.device, copy=True)
            if tensor.dtype.itemsize > 1 and tensor.is_floating_point():
                self._refuse_broken(file, piece, tensor)
            return tensor

        return Pieces(f"{self.folder}: matrix {name}", self._narrow[name], read)

    def _layout(self, pieces: Pieces) -> Layout:
        if self.scheme is None:
            raise UnsupportedModel(
                f"{pieces.where}: is quantised (it is stored as {', '.join(sorted(pieces.names))}),"
                " and no quantization_config says how"
            )
        return self.scheme.layout_of(pieces)

    def _refuse_broken(self, file: str, name: str, tensor: Tensor) -> None:
        """Raise `LoadError` for a tensor that holds NaN or infinity: every reply would be noise."""
        if tensor.numel() == 0 or all(
            math.isfinite(one) for one in torch.stack(torch.aminmax(tensor)).tolist()
        ):
            return
        where = f"{self.folder / file}: tensor {name}"
        if tensor.dtype == torch.float16 and bool(torch.isfinite(self._read(file, name, tensor.shape)).all()):
            raise LoadError(f"{where} does not fit float16; use another --dtype")
        raise LoadError(f"{where} holds values that are not finite; the file is damaged")

    def take_again(self, name: str) -> Tensor:
        """Another copy of a tensor taken before, for a matrix that is packed in two ways."""
        if name not in self._file_of:
            raise LoadError(f"{self.folder}: tensor {name} is missing")
        stored = self._read(self._file_of[name], name, self.shape(name))
        return stored.to(device=self.device, dtype=self.dtype, copy=True)

    def take_integers(self, name: str, n: int) -> Tensor:
        """A tensor of whole numbers, [n] int64 on the device; counted as used, not among the parameters.

        Raises `LoadError` if it is missing, of another shape or not of whole numbers.
        """
        if name not in self._file_of:
            raise LoadError(f"{self.folder}: tensor {name} is missing")
        self._unused.discard(name)
        stored = self._read(self._file_of[name], name, [n], INTEGER_DTYPES)
        return stored.to(device=self.device, dtype=torch.int64, copy=True)

    def drop_copy(self, name: str, original: Tensor) -> bool:
        """Count a tensor as used if the files hold it and it only repeats `original`; returns whether."""
        if name not in self._file_of or name in self._narrow:
            return False
        stored = self._read(self._file_of[name], name, original.shape)
        repeats = torch.equal(stored.to(device=self.device, dtype=self.dtype), original)
        if repeats:
            self._unused.discard(name)
        return repeats

    def drop_twin(self, name: str, other: str) -> bool:
        """Count a tensor as used if the files hold it and it equals their tensor `other`; returns whether."""
        if not {name, other} <= self._file_of.keys() - self._narrow.keys():
            return False
        if self.shape(name) != self.shape(other):
            return False
        shape = self.shape(name)
        one, two = (self._read(self._file_of[key], key, shape) for key in (name, other))
        if torch.equal(one, two):
            self._unused.discard(name)
            return True
        return False

    def leave(self, names: Iterable[str]) -> None:
        """Do not account for tensors that belong to another network in the same folder."""
        self._unused.difference_update(names)

    @property
    def names(self) -> frozenset[str]:
        """All tensors that the files hold, and the matrices that several of them stand for."""
        return frozenset(self._file_of.keys() | self._narrow.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor as stored, for networks whose tensors are trusted more than their config.

        Raises `LoadError` if it is not there.
        """
        if name in self._narrow:
            pieces = self._pieces(name)
            layout = self._layout(pieces)
            return layout.shape(self._stored_shape(pieces.names[layout.codes]))
        if name not in self._file_of:
            raise LoadError(f"{self.folder}: tensor {name} is missing")
        return self._stored_shape(name)

    def _stored_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[self._file_of[name]].get_slice(self._stored[name]).get_shape())

    def finish(self) -> None:
        """Close the files. Raises `CheckpointMismatch` naming tensors that were missing or not used."""
        self._drop_empty_biases()
        self._files.clear()
        if self._missing or self._unused:
            raise CheckpointMismatch(str(self.folder), sorted(self._missing), sorted(self._unused))

    def _drop_empty_biases(self) -> None:
        """Count biases of quantised layers as used if they are zero: AutoGPTQ writes a bias for every layer."""
        for name in [f"{matrix.removesuffix('.weight')}.bias" for matrix in self._narrow]:
            if name in self._unused and not bool(
                self._read(self._file_of[name], name, self._stored_shape(name)).any()
            ):
                self._unused.remove(name)

    def _read(
        self, file: str, name: str, shape: Sequence[int], dtypes: Sequence[str] = STORED_DTYPES
    ) -> Tensor:
        """The tensor as stored, mapped from its file."""
        handle = self._files[file]
        view = handle.get_slice(self._stored[name])
        if view.get_dtype() not in dtypes:
            raise UnsupportedModel(
                f"{self.folder / file}: tensor {name} has dtype {view.get_dtype()}; only {', '.join(dtypes)}"
            )
        if tuple(view.get_shape()) != tuple(shape):
            raise LoadError(
                f"{self.folder / file}: tensor {name} has shape {list(view.get_shape())},"
                f" the config asks for {list(shape)}"
            )
        tensor: Tensor = handle.get_tensor(self._stored[name])
        return tensor

    def _list_tensors(self) -> dict[str, str]:
        """Tensor name -> file name, by the index if the folder has it; opens every file named."""
        index = self.folder / INDEX
        if not index.exists():
            if not (self.folder / SINGLE).exists():
                raise LoadError(self._nothing_to_read())
            return dict.fromkeys(self._open(SINGLE), SINGLE)
        file_of = read_object(index).get("weight_map")
        if not isinstance(file_of, dict) or not file_of:
            raise LoadError(f"{index}: weight_map is not an object of tensor names")
        for name, file in file_of.items():
            if not isinstance(file, str) or not SHARD.fullmatch(file):
                raise LoadError(
                    f"{index}: tensor {name} is said to be in {json.dumps(file)};"
                    " it must be a .safetensors file in the folder itself"
                )
        for file in sorted(set(file_of.values())):
            held = self._open(file)
            absent = sorted(name for name, where in file_of.items() if where == file and name not in held)
            if absent:
                raise LoadError(f"{self.folder / file}: has no tensor {absent[0]}, although {INDEX} says so")
        return file_of

    def _open(self, file: str) -> set[str]:
        """Open one file and return the names of its tensors."""
        path = self.folder / file
        try:
            # The files are mapped into host memory, from where each tensor is copied to its device.
            handle = self._files[file] = safe_open(path, framework="pt", device="cpu")
            return set(handle.keys())  # type: ignore[no-untyped-call]
        except FileNotFoundError:
            raise LoadError(f"{path}: no such file") from None
        except (SafetensorError, OSError, ValueError) as error:
            raise LoadError(f"{path}: {fault(path)} ({error})") from None

    def _nothing_to_read(self) -> str:
        """Why the folder holds no weights, with a hint if another format is there."""
        if not self.folder.is_dir():
            return f"{self.folder}: no such folder"
        pickled = sorted(one.name for one in self.folder.iterdir() if one.suffix in (".bin", ".pt", ".pth"))
        if pickled:
            return (
                f"{self.folder / pickled[0]}: only safetensors are read, pickled files can run any code;"
                " convert it with transformers: AutoModelForCausalLM.from_pretrained(folder)"
                ".save_pretrained(new_folder)"
            )
        return f"{self.folder}: neither {SINGLE} nor {INDEX} is there"


def text_name(name: str) -> str:
    """The name that a tensor of a wrapper checkpoint has in a checkpoint of the text model alone."""
    for prefix, plain in TEXT_PREFIXES:
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name


def find_narrow(names: Collection[str]) -> dict[str, dict[str, str]]:
    """Matrix -> {what follows its layer's name: stored name}, for the matrices that several tensors stand for."""
    marks = tuple(f".{mark}" for mark in MARKS)
    layers = {name.rpartition(".")[0] for name in names if name.endswith(marks)}
    found: dict[str, dict[str, str]] = {f"{layer}.weight": {} for layer in layers}
    for name in names:
        layer, _, piece = name.rpartition(".")
        if layer in layers and piece in (*PIECES, "weight"):
            found[f"{layer}.weight"][piece] = name
        if name.endswith("_blocks"):
            scales = f"{name.removesuffix('_blocks')}_scales"
            pieces = {"blocks": name, "scales": scales}
            found[f"{name.removesuffix('_blocks')}.weight"] = {
                piece: stored for piece, stored in pieces.items() if stored in names
            }
    return found


def fault(path: Path) -> str:
    """What is wrong with a safetensors file that cannot be opened; names the first tensor that is cut off."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (n_header,) = struct.unpack("<Q", file.read(8))
            if n_header > size - 8:
                return f"truncated: the header has {n_header} bytes, the file {size}"
            header = json.loads(file.read(n_header))
        for name, entry in sorted(header.items(), key=lambda item: item[1].get("data_offsets", [0, 0])[1]):
            end = 8 + n_header + entry.get("data_offsets", [0, 0])[1]
            if end > size:
                return f"truncated: tensor {name} ends at byte {end}, the file has {size}"
    except (OSError, ValueError, struct.error, AttributeError, TypeError, IndexError, RecursionError):
        return "not a safetensors file, its header is not readable"
    return "not a valid safetensors file"
