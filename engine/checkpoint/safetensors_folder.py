"""The safetensors files of a checkpoint folder, opened: names, shapes, and tensors mapped from them.

Nothing is ever unpickled: `.bin` and `.pt` checkpoints are refused with a hint how to convert them.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Collection
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from slipstream.engine.errors import LoadError
from slipstream.engine.text.json_file import read_object

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD = re.compile(r"[^/\\\0]*\.safetensors")
# Prefixes of wrapper checkpoints for several media -> those of the text model alone.
TEXT_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
# Endings of pickled weights, and what is said of them.
PICKLED = (".bin", ".pt", ".pth")
ONLY_SAFETENSORS = (
    "only safetensors are read, pickled files can run any code; convert a model with transformers:"
    " AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder); of a draft head, which transformers"
    f' does not know, the file itself: safetensors.torch.save_file(torch.load(file, weights_only=True), "{SINGLE}")'
)


class SafetensorsFolder:
    """The tensors of a folder. Those of a wrapper for several media have the names of its text model alone."""

    def __init__(self, folder: Path) -> None:
        """Open the folder's files. Raises `LoadError` naming the file that is not there or not readable."""
        self.folder = folder
        self._files: dict[str, Any] = {}  # file name -> open handle
        listed = self._list_tensors()
        self._stored = {text_name(name): name for name in listed}
        if len(self._stored) < len(listed):
            raise LoadError(f"{folder}: holds the text model twice, under different prefixes")
        self._file_of = {text_name(name): file for name, file in listed.items()}  # tensor name -> file name

    @property
    def names(self) -> Collection[str]:
        return self._file_of.keys()

    def where(self, name: str) -> str:
        """File and tensor, for messages."""
        return f"{self.folder / self._file_of[name]}: tensor {name}"

    def in_file(self, name: str) -> str:
        """What the files call a tensor, for messages."""
        return self._stored.get(name, name)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._view(name).get_shape())

    def dtype(self, name: str) -> str:
        """As safetensors calls it, as "BF16"."""
        return str(self._view(name).get_dtype())

    def read(self, name: str) -> Tensor:
        """The tensor as stored, mapped from its file into host memory."""
        tensor: Tensor = self._files[self._file_of[name]].get_tensor(self._stored[name])
        return tensor

    def close(self) -> None:
        """Let the files go."""
        self._files.clear()

    def _view(self, name: str) -> Any:
        return self._files[self._file_of[name]].get_slice(self._stored[name])

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
        pickled = sorted(one.name for one in self.folder.iterdir() if one.suffix in PICKLED)
        if pickled:
            return f"{self.folder / pickled[0]}: {ONLY_SAFETENSORS}"
        if files := sorted(one.name for one in self.folder.glob("*.gguf")):
            return f"{self.folder}: a folder of GGUF files; name one of them: {', '.join(files)}"
        return f"{self.folder}: neither {SINGLE} nor {INDEX} is there"


def text_name(name: str) -> str:
    """The name that a tensor of a wrapper checkpoint has in a checkpoint of the text model alone."""
    for prefix, plain in TEXT_PREFIXES:
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name


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
