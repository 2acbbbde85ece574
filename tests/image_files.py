"""Files of small images, sound and damaged, for tests of how requests' images are read."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Iterable
from typing import Any

from PIL import Image

Colour = tuple[int, int, int]
RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)
SIGNATURE = b"\x89PNG\r\n\x1a\n"


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The bytes of an image's file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def plain(colour: Colour = RED, size: tuple[int, int] = (4, 3), kind: str = "PNG", **options: Any) -> bytes:
    """The file of an image of one colour."""
    return saved(Image.new("RGB", size, colour), kind, **options)


def data_url(file: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(file).decode()}"


def chunk(name: bytes, data: bytes) -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, rows: bytes, *, depth: int = 8, kind: int = 2, more: bytes = b"") -> bytes:
    """A PNG whose header says what it is told. rows: each a 0 and its pixels; kind: 0 grey, 2 colours; more: chunks."""
    header = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0)
    ends = chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return SIGNATURE + chunk(b"IHDR", header) + more + ends


def gif(screen: tuple[int, int], frames: Iterable[tuple[int, int]]) -> bytes:
    """A GIF of two colours whose frames say that they have these sizes; none has more than a few pixels."""
    begin = b"GIF89a" + struct.pack("<HHBBB", *screen, 0x80, 0, 0) + bytes((*RED, *BLUE))
    pixels = b"\x02\x02\x4c\x01\x00"  # one pixel, and the end
    return (
        begin + b"".join(b"\x2c" + struct.pack("<HHHHB", 0, 0, *one, 0) + pixels for one in frames) + b"\x3b"
    )


def webp_canvas(width: int, height: int) -> bytes:
    """An animated WebP of small frames on a canvas that its header says is of this size."""
    frames = [Image.new("RGB", (4, 3), one) for one in (RED, BLUE)]
    file = saved(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True)
    begin = file.index(b"VP8X") + 12
    size = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return file[:begin] + size + file[begin + 6 :]


def jpeg_saying(width: int, height: int) -> bytes:
    """A JPEG of a few pixels whose header says another size."""
    file = plain(kind="JPEG")
    begin = file.index(b"\xff\xc0") + 5
    return file[:begin] + struct.pack(">HH", height, width) + file[begin + 4 :]
