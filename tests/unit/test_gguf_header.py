"""GGUF headers: what is read, and a refusal by name on one line for everything that no writer would write."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import pytest

from slipstream.engine.checkpoint.gguf.header import MOST_ELEMENTS, Header, read_header
from slipstream.engine.errors import LoadError, UnsupportedModel
from tests import gguf_bytes as made
from tests.gguf_bytes import ARRAY, BOOL, F32, STRING, U8, U32, array, file, info, key

KEYS = (
    key("a.text", STRING, "größer"),
    key("a.number", U32, 2**32 - 1),
    key("a.flag", BOOL, True),
    key("a.real", F32, 0.5),
    key("a.far", 12, -1e300),
    key("a.small", 1, -128),
    array("a.list", 5, [1, -2, 3]),
    array("a.texts", STRING, ["x", "", "漢字"]),
    array("a.nothing", F32, []),
)
INFOS = (info("second", [2, 32], kind=8, offset=64), info("first", [3, 4]), info("scalar", [1], offset=160))
DATA = bytes(164)
VALID = file(KEYS, INFOS, DATA)


def read(tmp_path: Path, data: bytes) -> Header:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    return read_header(path)


def refusal(tmp_path: Path, data: bytes, error: type[LoadError] = LoadError) -> str:
    """The message of the refusal, which names the file and is one line of bearable length."""
    with pytest.raises(LoadError) as caught:
        read(tmp_path, data)
    assert type(caught.value) is error
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'model.gguf'}: ")
    assert message.isprintable()
    assert len(message) < 600
    return message


def test_what_a_header_says(tmp_path: Path) -> None:
    header = read(tmp_path, VALID)
    assert dict(header.metadata) == {
        "a.text": "größer",
        "a.number": 2**32 - 1,
        "a.flag": True,
        "a.real": 0.5,
        "a.far": -1e300,
        "a.small": -128,
        "a.list": [1, -2, 3],
        "a.texts": ["x", "", "漢字"],
        "a.nothing": [],
    }
    assert len(header.metadata) == 9
    assert "a.list" in header.metadata
    assert header.metadata.get("b") is None
    start = len(VALID) - len(DATA)
    found = {name: (one.kind, one.shape, one.start, one.n_bytes) for name, one in header.tensors.items()}
    assert found == {
        "first": ("F32", (3, 4), start, 48),
        "second": ("Q8_0", (2, 32), start + 64, 68),
        "scalar": ("F32", (1,), start + 160, 4),
    }
    assert header.tensors["first"].where == f"{tmp_path / 'model.gguf'}: tensor first"


def test_both_versions_and_another_alignment(tmp_path: Path) -> None:
    assert read(tmp_path, file(KEYS, version=2)).metadata["a.list"] == [1, -2, 3]
    wide = file([key("general.alignment", U32, 256)], [info("x", [2], offset=256)], bytes(264), alignment=256)
    assert read(tmp_path, wide).tensors["x"].start == 512
    assert read(tmp_path, file()).tensors == {}


def test_every_truncation(tmp_path: Path) -> None:
    """Whatever a file ends in, a length, a text, an array, a tensor."""
    path = tmp_path / "model.gguf"
    path.write_bytes(VALID)
    for size in range(len(VALID) - 1, 0, -1):
        os.truncate(path, size)
        with pytest.raises(LoadError, match=r"model\.gguf: damaged: truncated: .* the file has") as caught:
            read_header(path)
        assert str(caught.value).endswith(f"the file has {size}")


def test_what_is_no_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with pytest.raises(LoadError, match=r"model\.gguf: no such file"):
        read_header(path)
    path.touch()
    with pytest.raises(LoadError, match=r"model\.gguf: not readable \(cannot mmap an empty file\)"):
        read_header(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(LoadError, match=r"model\.gguf: not a regular file"):
        read_header(path)


HUGE = 2**64 - 1
WRONG: dict[str, tuple[bytes, str]] = {
    "magic": (file(magic=b"GGML"), "it does not begin as a GGUF file"),
    "pickle": (b"PK\3\4" + bytes(100), "it does not begin as a GGUF file"),
    "keys without end": (file(KEYS, n_keys=HUGE), "truncated"),
    "tensors without end": (file(KEYS, n_tensors=HUGE), "truncated"),
    "key twice": (file([key("a", U8, 1), key("a", U8, 2)]), "key 'a' is there twice"),
    "long key twice": (file([key("a" * 9999, U8, 1)] * 2), "aaaaaaaaaa' is there twice"),
    "key in latin-1": (file([key(b"gr\xf6\xdfe", U8, 1)]), r"b'gr\xf6\xdfe' is not valid UTF-8"),
    "text in latin-1": (file([key("a", STRING, b"\xff")]), r"b'\xff' is not valid UTF-8"),
    "text without end": (file([made.string("a") + struct.pack("<IQ", STRING, HUGE)]), "truncated"),
    "type of a value": (
        file([made.string("a") + struct.pack("<I", 13)]),
        "a value has type 13, which is not",
    ),
    "array without end": (file([array("a", U32, [1, 2], count=HUGE)]), "truncated"),
    "texts without end": (file([array("a", STRING, ["x", "y"], count=HUGE)]), "truncated"),
    "empty texts without end": (file([array("a", STRING, ["", ""], count=2**62)]), "truncated"),
    "a long text among texts": (
        file([made.string("a") + struct.pack("<IIQQ", ARRAY, STRING, 2, HUGE)]),
        "truncated",
    ),
    "arrays in arrays": (
        file([made.string("a") + struct.pack("<IIQ", ARRAY, ARRAY, 1) + bytes(99)]),
        "an array has elements of type 9: only single values and strings",
    ),
    "type of elements": (file([made.string("a") + struct.pack("<IIQ", ARRAY, 77, 0)]), "elements of type 77"),
    "no dimension": (file((), [info("x", [])]), "tensor 'x' has 0 dimensions, must have 1 to 4"),
    "five dimensions": (file((), [info("x", [1] * 5)]), "tensor 'x' has 5 dimensions, must have 1 to 4"),
    "dimensions without end": (file((), [made.string("x") + b"\xff" * 4]), "has 4294967295 dimensions"),
    "empty": (file((), [info("x", [4, 0])]), "tensor 'x' has shape [4, 0], no dimension may be 0"),
    "endless": (file((), [info("x", [HUGE, HUGE])]), "truncated: tensor 'x' ends at byte 136"),
    "name over two lines": (
        file((), [info("x\ny", [1])]),
        r"tensor name 'x\ny': must be at most 256 printable",
    ),
    "long name": (file((), [info("x" * 257, [1])]), "must be at most 256 printable characters"),
    "rows of half a block": (
        file((), [info("x", [2, 48], kind=2)]),
        "tensor 'x' has rows of 48 values, no multiple of Q4_0's 32",
    ),
    "tensor twice": (
        file((), [info("x", [8]), info("x", [8], offset=32)], bytes(64)),
        "tensor 'x' is there twice",
    ),
    "between": (
        file((), [info("x", [1], offset=16)], bytes(64)),
        "tensor 'x' is at 16, no multiple of 32",
    ),
    "one over another": (
        file((), [info("x", [9]), info("y", [1], offset=32)], bytes(64)),
        "tensor 'y' overlaps another",
    ),
    "one in another": (
        file((), [info("x", [1], offset=32), info("y", [99])], bytes(999)),
        "tensor 'x' overlaps another",
    ),
    "the same place": (file((), [info("x", [1]), info("y", [1])], bytes(64)), "overlaps another"),
    "behind the end": (
        file((), [info("x", [9])], bytes(35)),
        "truncated: tensor 'x' ends at byte 100, the file has 99",
    ),
    "far behind the end": (file((), [info("x", [1], offset=2**64 - 32)], bytes(4)), "truncated: tensor 'x'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_no_writer_writes(tmp_path: Path, case: str) -> None:
    data, message = WRONG[case]
    assert message in refusal(tmp_path, data)


@pytest.mark.parametrize("version", [0, 1, 4, 3 << 24])
def test_versions_and_byte_orders(tmp_path: Path, version: int) -> None:
    message = refusal(tmp_path, file(KEYS, version=version), UnsupportedModel)
    assert f"GGUF version {version} is not read, only 2 and 3" in message
    assert "of the other byte order" in message


@pytest.mark.parametrize("kind", [4, 5, 36, 99, 2**32 - 1])
def test_types_of_tensors(tmp_path: Path, kind: int) -> None:
    message = refusal(tmp_path, file((), [info("x", [32], kind=kind)]), UnsupportedModel)
    assert f"tensor 'x' has type {kind}, which is not known" in message


@pytest.mark.parametrize(
    ("kind", "value"),
    [(U32, 0), (U32, 1), (U32, 4), (U32, 48), (5, -32), (F32, 32.0), (STRING, "32"), (BOOL, True)],
)
def test_alignments(tmp_path: Path, kind: int, value: Any) -> None:
    message = refusal(tmp_path, file([key("general.alignment", kind, value)]))
    assert f"general.alignment = {value!r} is no power of two of at least 8" in message


def test_arrays_are_read_when_they_are_asked_for(tmp_path: Path) -> None:
    """Up to more elements than any vocabulary has; nothing is made of those that are not asked for."""
    data = file([array("a", U8, [1], count=MOST_ELEMENTS + 1)]) + bytes(MOST_ELEMENTS)
    metadata = read(tmp_path, data).metadata
    assert "a" in metadata
    with pytest.raises(
        LoadError, match=rf"model\.gguf: damaged: an array has {MOST_ELEMENTS + 1} elements, at most"
    ):
        metadata.get("a")
    texts = file([array("a", STRING, [b"\xff\xfe", "x"])])
    metadata = read(tmp_path, texts).metadata
    with pytest.raises(LoadError, match=r"model\.gguf: damaged: b'\\xff\\xfe' is not valid UTF-8"):
        metadata.get("a")


def test_where_fields_lie() -> None:
    """The fields that fuzzing changes are all there are: they cover a header without a gap."""
    found = made.places(VALID)
    ends = [one.start + one.n_bytes for one in found]
    assert [one.start for one in found] == [0, *ends[:-1]]
    assert ends[-1] == len(file(KEYS, INFOS)) - -len(b"".join([*KEYS, *INFOS, bytes(24)])) % 32
    assert {one.what for one in found} >= {
        "key length",
        "count",
        "type",
        "element type",
        "dimension",
        "offset",
    }
