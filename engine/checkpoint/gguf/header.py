"""The header of a GGUF file: its metadata, and where its tensors lie. All that it claims is checked against its size.

The `gguf` package reads headers too. It makes an array of every string, ten seconds for a vocabulary of 150 thousand
tokens, and believes the counts that it finds. Its tables of types are used here.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.engine.errors import LoadError, UnsupportedModel
from slipstream.engine.text.json_file import check_regular

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32  # of tensors, unless the file says otherwise
LEAST_ALIGNMENT = 8  # by the format; plain numbers are read where they lie
LONGEST_NAME = 256  # characters; the format allows 64 bytes
MOST_SHOWN = 60  # characters of a value in an error
MOST_DIMENSIONS = 4
# Types of values: how `struct` calls those of one size, and the two others.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
UINT32, UINT64 = SCALARS[4], SCALARS[10]
STRING, ARRAY = 8, 9
MOST_ELEMENTS = 1 << 22  # of an array; the largest vocabularies and their merges have half a million


def shown(value: Any) -> str:
    """A value of a file in an error: on one line, the beginning of what is long."""
    whole = repr(value[:MOST_SHOWN] if isinstance(value, str | bytes | list) else value)
    return whole if len(whole) <= 2 * MOST_SHOWN else f"{whole[: 2 * MOST_SHOWN]} …"


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file."""

    name: str
    kind: str  # a name of gguf.GGMLQuantizationType, as "Q4_K"
    shape: tuple[int, ...]  # values of the last dimension lie side by side
    path: Path
    start: int  # its first byte in the file
    n_bytes: int

    @property
    def where(self) -> str:
        """File and tensor, for messages."""
        return f"{self.path}: tensor {self.name}"


@dataclass(frozen=True, slots=True)
class Array:
    """An array in a file, which is read when it is asked for."""

    kind: int
    count: int
    start: int  # its first byte in the file


class Metadata(Mapping[str, Any]):
    """The keys of a file with their values as Python's own types."""

    def __init__(self, values: Mapping[str, Any], scanner: Scanner) -> None:
        self._values, self._scanner = values, scanner

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        return self._scanner.elements(value) if isinstance(value, Array) else value

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself."""

    path: Path
    metadata: Metadata
    tensors: Mapping[str, Stored]


def read_header(path: Path) -> Header:
    """The header of one file. Raises `LoadError` if it is damaged, `UnsupportedModel` for types that are not known."""
    scanner = Scanner(path, _mapped(path))
    if scanner.take(len(MAGIC)) != MAGIC:
        raise scanner.damaged("it does not begin as a GGUF file")
    version = scanner.scalar(UINT32)
    if version not in VERSIONS:
        raise UnsupportedModel(
            f"{path}: GGUF version {version} is not read, only {' and '.join(map(str, VERSIONS))};"
            " files for machines of the other byte order neither"
        )
    n_tensors, n_keys = scanner.scalar(UINT64), scanner.scalar(UINT64)
    values: dict[str, Any] = {}
    for _ in range(n_keys):
        key = scanner.string()
        if key in values:
            raise scanner.damaged(f"key {shown(key)} is there twice")
        values[key] = scanner.value()
    infos = [_read_info(scanner) for _ in range(n_tensors)]
    alignment = values.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or alignment < LEAST_ALIGNMENT or alignment & (alignment - 1):
        raise scanner.damaged(
            f"general.alignment = {shown(alignment)} is no power of two of at least {LEAST_ALIGNMENT}"
        )
    return Header(path, Metadata(values, scanner), _placed(scanner, infos, alignment))


@dataclass(frozen=True, slots=True)
class _Info:
    """What a header says of a tensor."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int  # behind the header


def _read_info(scanner: Scanner) -> _Info:
    name, n_dims = scanner.string(), scanner.scalar(UINT32)
    if len(name) > LONGEST_NAME or not name.isprintable():
        raise scanner.damaged(
            f"tensor name {shown(name)}: must be at most {LONGEST_NAME} printable characters"
        )
    if not 1 <= n_dims <= MOST_DIMENSIONS:
        raise scanner.damaged(f"tensor {name!r} has {n_dims} dimensions, must have 1 to {MOST_DIMENSIONS}")
    shape = tuple(scanner.scalar(UINT64) for _ in range(n_dims))[::-1]
    if 0 in shape:
        raise scanner.damaged(f"tensor {name!r} has shape {list(shape)}, no dimension may be 0")
    return _Info(name, shape, scanner.scalar(UINT32), scanner.scalar(UINT64))


def _placed(scanner: Scanner, infos: Sequence[_Info], alignment: int) -> dict[str, Stored]:
    """Tensors by name. Each lies within the file, and none on another: so together they take no more than the file."""
    base, end, tensors = -(-scanner.at // alignment) * alignment, 0, {}
    for info in sorted(infos, key=lambda info: info.offset):
        if info.name in tensors:
            raise scanner.damaged(f"tensor {info.name!r} is there twice")
        kind, n_bytes = _size(scanner, info)
        if info.offset % alignment:
            raise scanner.damaged(f"tensor {info.name!r} is at {info.offset}, no multiple of {alignment}")
        if info.offset < end:
            raise scanner.damaged(f"tensor {info.name!r} overlaps another")
        end = info.offset + n_bytes
        if base + end > scanner.size:
            raise scanner.damaged(
                f"truncated: tensor {info.name!r} ends at byte {base + end}, the file has {scanner.size}"
            )
        tensors[info.name] = Stored(info.name, kind, info.shape, scanner.path, base + info.offset, n_bytes)
    return tensors


def _size(scanner: Scanner, info: _Info) -> tuple[str, int]:
    """The name of a tensor's type, and its bytes."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # 0.2 s, for nothing where no GGUF file is read

    if info.kind not in GGMLQuantizationType._value2member_map_:
        raise UnsupportedModel(
            f"{scanner.path}: tensor {info.name!r} has type {info.kind}, which is not known"
        )
    kind = GGMLQuantizationType(info.kind)
    block, n_block_bytes = GGML_QUANT_SIZES[kind]
    if info.shape[-1] % block:
        raise scanner.damaged(
            f"tensor {info.name!r} has rows of {info.shape[-1]} values, no multiple of {kind.name}'s {block}"
        )
    return kind.name, math.prod(info.shape) // block * n_block_bytes


def _mapped(path: Path) -> mmap.mmap:
    if not path.exists():
        raise LoadError(f"{path}: no such file")
    check_regular(path)
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise LoadError(f"{path}: not readable ({error})") from None


class Scanner:
    """Reads a file from its beginning; whatever a length in it says, nothing behind its end is asked for."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.size, self.at = path, len(data), 0
        self._data = data

    def damaged(self, why: str) -> LoadError:
        """The error that names the file."""
        return LoadError(f"{self.path}: damaged: {why}")

    def take(self, n: int) -> bytes:
        """The next n bytes."""
        self._step(n)
        return self._data[self.at - n : self.at]

    def scalar(self, code: str) -> Any:
        """The next value of the type that `struct` calls so."""
        size = struct.calcsize(f"<{code}")
        self._step(size)
        return struct.unpack_from(f"<{code}", self._data, self.at - size)[0]

    def string(self) -> str:
        """The next string."""
        text = self.take(self.scalar(UINT64))
        try:
            return text.decode()
        except UnicodeDecodeError:
            raise self.damaged(f"{text[:40]!r} is not valid UTF-8") from None

    def value(self) -> Any:
        """The next value, before which its type stands. An array is stepped over."""
        kind = self.scalar(UINT32)
        if kind in SCALARS:
            return self.scalar(SCALARS[kind])
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            raise self.damaged(f"a value has type {kind}, which is not known")
        kind, count = self.scalar(UINT32), self.scalar(UINT64)
        array = Array(kind, count, self.at)
        if kind in SCALARS:
            self._step(struct.calcsize(SCALARS[kind]) * count)
        elif kind == STRING:
            self._skip_strings(count)
        else:
            raise self.damaged(
                f"an array has elements of type {kind}: only single values and strings are read"
            )
        return array

    def elements(self, array: Array) -> list[Any]:
        """What an array holds. Raises `LoadError` if that is more than any vocabulary has."""
        if array.count > MOST_ELEMENTS:
            raise self.damaged(f"an array has {array.count} elements, at most {MOST_ELEMENTS} are read")
        if array.kind in SCALARS:
            code = f"<{array.count}{SCALARS[array.kind]}"
            return list(struct.unpack_from(code, self._data, array.start))
        here, self.at = self.at, array.start
        strings = [self.string() for _ in range(array.count)]
        self.at = here
        return strings

    def _skip_strings(self, count: int) -> None:
        data, at, unpack = self._data, self.at, struct.Struct(f"<{UINT64}").unpack_from
        try:
            for _ in range(count):
                at += 8 + unpack(data, at)[0]
        except (struct.error, OverflowError):  # behind the end, or behind the end of all addresses
            at = self.size + 1
        self.at = at
        self._step(0)

    def _step(self, n: int) -> None:
        if self.at + n > self.size:
            raise self.damaged(f"truncated: byte {self.at + n} is asked for, the file has {self.size}")
        self.at += n
