"""Slots in files: a saved prefix as safetensors, never pickled, with what proves that it belongs to this server.

A file with state of another model would be read without any error and give senseless text, and so would a flipped
bit. So a file names the networks that made it, and a checksum covers all its tensors.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from slipstream.engine.cache.cache import Cache
from slipstream.engine.cache.saved import Saved, SavedWindow
from slipstream.engine.checkpoint.safetensors_folder import fault
from slipstream.engine.errors import InvalidRequest, SlotFileRefused, SlotNotSaved
from slipstream.engine.images import ImageMark
from slipstream.engine.models.reading.documents import checkpoint_files

log = logging.getLogger(__name__)

_FORMAT = "slipstream-slot-2"
_NAME_BYTES = 200  # file systems take 255, of which a temporary name needs some more
_BARRED = frozenset('/\\:*?"<>|')
_TENANT = "tenant-"  # folders of tenants begin with it
_SHOWN = 80  # characters of what a file says of itself, in an error
_DTYPES = {  # by safetensors' names
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I32": torch.int32,
    "U8": torch.uint8,
}
_N_SAMPLES, _SAMPLE_BYTES = 256, 1024  # of each file of weights


class SlotFiles:
    """The folder of saved slots. Every tenant has a subfolder, so that names reveal nothing to other tenants."""

    def __init__(self, folder: Path, fingerprint: str, page_size: int) -> None:
        """fingerprint: `state_fingerprint` of the running networks."""
        self._folder = folder
        self._remove_parts()
        self._identity = {"format": _FORMAT, "page_size": str(page_size), "fingerprint": fingerprint}

    def _remove_parts(self) -> None:
        """Files of saves that were interrupted; those of other servers that are being written are locked."""
        for part in (*self._folder.glob(".*.part"), *self._folder.glob(f"{_TENANT}*/.*.part")):
            with contextlib.suppress(OSError), part.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                part.unlink()

    def path(self, filename: str, tenant: str) -> Path:
        """Where a name lies. Raises `InvalidRequest` unless it is a plain, visible name in the folder itself."""
        if not filename or len(filename.encode()) > _NAME_BYTES:
            raise InvalidRequest("filename", f"must have 1 … {_NAME_BYTES} bytes")
        if not filename.isprintable() or _BARRED & set(filename):
            barred = " ".join(sorted(_BARRED))
            raise InvalidRequest("filename", f"must have neither control characters nor any of {barred}")
        if filename.startswith((".", " ")) or filename.endswith((".", " ")):
            raise InvalidRequest("filename", "must not begin or end with a dot or a space")
        if not tenant:
            if filename.startswith(_TENANT):
                raise InvalidRequest("filename", f"must not begin with {_TENANT}: folders are named so")
            return self._folder / filename
        return self._folder / f"{_TENANT}{hashlib.sha256(tenant.encode()).hexdigest()[:32]}" / filename

    def write(self, path: Path, saved: Saved) -> int:
        """Store a prefix, in place of what was there, which stays whole until then; returns the file's bytes.

        Raises `SlotNotSaved`; InvalidRequest for a folder's name.
        """
        if path.is_dir():
            raise InvalidRequest("filename", f"{path.name} is a folder in --slot-save-path")
        try:
            return self._write(path, saved)
        except (OSError, SafetensorError) as error:
            log.exception("a slot could not be saved path=%s", path)
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise SlotNotSaved(reason) from error

    def _write(self, path: Path, saved: Saved) -> int:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        tensors = {name: tensor.contiguous() for name, tensor in _tensors(saved).items()}
        metadata = {**self._identity, "sha256": _checksum(tensors)}
        # Only its owner may read what people wrote; mkstemp ensures that.
        handle, temporary = tempfile.mkstemp(prefix=".", suffix=".part", dir=path.parent)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)  # see `_remove_parts`
            save_file(tensors, temporary, metadata=metadata)
            n_bytes = os.stat(temporary).st_size
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        finally:
            os.close(handle)
        return n_bytes

    def read(self, path: Path) -> tuple[Saved, int]:
        """What is stored there, and the file's bytes.

        Raises `SlotFileRefused` for a file that is missing, damaged, or another model's.
        """
        name = path.name
        if not path.is_file():
            raise SlotFileRefused(f"there is no saved slot {name}")
        try:
            with path.open("rb") as file, safe_open(_same(file), framework="pt", device="cpu") as header:
                metadata = header.metadata() or {}
                self._check(name, metadata)
                tensors = _read_tensors(file, header)
                if _checksum(tensors) != metadata.get("sha256"):
                    raise SlotFileRefused(f"{name} is damaged: its checksum is wrong")
                return _saved(tensors), os.fstat(file.fileno()).st_size
        except (SafetensorError, OSError) as error:
            raise SlotFileRefused(f"{name} is damaged: {fault(path)} ({error})") from None
        except (KeyError, ValueError):
            raise SlotFileRefused(f"{name} is damaged: not the tensors of a saved slot") from None

    def _check(self, name: str, metadata: Mapping[str, str]) -> None:
        for key, told in (
            ("format", "in another format"),
            ("page_size", "with pages of another size"),
            ("fingerprint", "by another model, draft or arithmetic"),
        ):
            found = metadata.get(key)
            if found != self._identity[key]:
                raise SlotFileRefused(
                    f"{name} was saved {told}: {str(found)[:_SHOWN]}, here {self._identity[key]}"
                )


def state_fingerprint(folders: Iterable[Path], cache: Cache, *, rounds: bool = False) -> str:
    """Changes with the weights and configs of the networks whose state is cached, and with how it is laid out.

    rounds: whether inputs of products were rounded (`--round-activations`); else it is that of earlier versions.

    Weights are sampled, evenly over each file: reading all of them takes too long.
    """
    digest = hashlib.sha256()
    for folder in folders:
        config, weights = checkpoint_files(folder)
        digest.update(b"".join(file.read_bytes() for file in config))
        for file in weights:
            size = file.stat().st_size
            digest.update(f"{file.name} {size}".encode())
            with file.open("rb") as stream:
                for n in range(_N_SAMPLES):
                    stream.seek(size * n // _N_SAMPLES)
                    digest.update(stream.read(_SAMPLE_BYTES))
    for name, store in cache.stores.items():
        held = store.held
        shapes = (*held.page_shapes("full"), *held.page_shapes("window"), *held.slot_shapes)
        kinds = [(shape, str(dtype)) for shape, dtype in shapes]
        digest.update(repr((name, store.device.type, kinds)).encode())
    if rounds:
        digest.update(b"rounded activations")
    return digest.hexdigest()[:32]


def _same(file: BinaryIO) -> str:
    """A name of an open file, also where another has taken its place by now."""
    return f"/dev/fd/{file.fileno()}"


def _read_tensors(file: BinaryIO, header: Any) -> dict[str, Tensor]:
    """The tensors of a file, read and not mapped: touching a mapped file that was cut short ends the process.

    They lie one behind the other, as `safe_open` has checked. Raises KeyError for a dtype that no cache has.
    """
    file.seek(0)
    file.seek(int.from_bytes(file.read(8), "little"), os.SEEK_CUR)
    tensors: dict[str, Tensor] = {}
    for key in header.offset_keys():
        told = header.get_slice(key)
        tensors[key] = torch.empty(told.get_shape(), dtype=_DTYPES[told.get_dtype()])
        # What a file that was cut short lacks stays what it was, and the checksum tells.
        file.readinto(tensors[key].reshape(-1).view(torch.uint8).numpy().data)  # type: ignore[attr-defined]
    return tensors


def _tensors(saved: Saved) -> dict[str, Tensor]:
    """The prefix under names; of a list of tensors each has its number at the end."""
    tensors = {"tokens": torch.tensor(saved.tokens, dtype=torch.int32)}
    if saved.images:
        tensors["images"] = torch.tensor([(one.start, one.end) for one in saved.images], dtype=torch.int32)
        keys = b"".join(one.key for one in saved.images)
        tensors["image_keys"] = torch.frombuffer(bytearray(keys), dtype=torch.uint8).view(
            len(saved.images), -1
        )

    def put(name: str, parts: Sequence[Tensor]) -> None:
        tensors.update({f"{name}.{i}": part for i, part in enumerate(parts)})

    for store, pages in saved.complete.items():
        tensors[f"complete.{store}"] = torch.tensor([pages.start, pages.stop], dtype=torch.int32)
        put(f"rows.{store}", saved.rows[store])
    for store, window in saved.windows.items():
        tensors[f"window_numbers.{store}"] = torch.tensor(window.numbers, dtype=torch.int32)
        put(f"window_rows.{store}", window.rows)
    for (store, n_tokens), states in saved.states.items():
        put(f"states.{store}.{n_tokens}", states)
    return tensors


def _saved(tensors: Mapping[str, Tensor]) -> Saved:
    """The opposite of `_tensors`. Raises KeyError or ValueError for other names."""
    tensors = dict(tensors)

    def take(name: str) -> list[Tensor]:
        parts: list[Tensor] = []
        while (part := tensors.pop(f"{name}.{len(parts)}", None)) is not None:
            parts.append(part)
        return parts

    def stores(name: str) -> list[str]:
        return [key.removeprefix(f"{name}.") for key in tensors if key.startswith(f"{name}.")]

    complete: dict[str, range] = {}
    for store in stores("complete"):
        start, stop = tensors.pop(f"complete.{store}").tolist()
        complete[store] = range(start, stop)
    rows = {store: take(f"rows.{store}") for store in complete}
    windows = {
        store: SavedWindow(tensors.pop(f"window_numbers.{store}").tolist(), take(f"window_rows.{store}"))
        for store in stores("window_numbers")
    }
    states = {}
    for place in {key.rpartition(".")[0] for key in tensors if key.startswith("states.")}:
        _, store, n_tokens = place.split(".")
        states[store, int(n_tokens)] = take(place)
    images = _images(tensors)
    saved = Saved(tensors.pop("tokens").tolist(), complete, rows, windows, states, images)
    if tensors:
        raise ValueError(f"unknown tensors: {', '.join(tensors)}")
    return saved


def _images(tensors: dict[str, Tensor]) -> list[ImageMark]:
    """The images of a saved prefix, taken out of its tensors. Raises KeyError or ValueError for what is none."""
    if "images" not in tensors:
        return []
    places, keys = tensors.pop("images").tolist(), tensors.pop("image_keys")
    return [
        ImageMark(start, end, bytes(key.tolist())) for (start, end), key in zip(places, keys, strict=True)
    ]


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(repr((name, tuple(tensor.shape), str(tensor.dtype))).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
