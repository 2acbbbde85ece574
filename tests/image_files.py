"""Image files for tests: honest ones of every kind, and files that lie."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from PIL import Image

RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)
SIGNATURE = b"\x89PNG\r\n\x1a\n"


def two(
    mode: str = "RGB", width: int = 4, height: int = 2, left: Any = RED, right: Any = BLUE
) -> Image.Image:
    """A picture whose left half has another colour than its right half."""
    image = Image.new(mode, (width, height), left)
    image.paste(right, (width // 2, 0, width, height))
    return image


def saved(image: Image.Image, kind: str = "PNG", **more: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **more)
    return file.getvalue()


def data_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, rows: bytes, *, depth: int = 8, kind: int = 2) -> bytes:
    """A PNG that says its size is this, with these rows, compressed. kind: 0 is grey, 2 is red, green and blue."""
    head = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0)
    body = zlib.compress(rows, 9)
    return SIGNATURE + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def turned(orientation: int) -> bytes:
    """A JPEG that is red at the left and blue at the right, said to have been taken with the camera held askew."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(two(width=64, height=32), "JPEG", quality=95, exif=exif)


def gif(width: int, height: int) -> bytes:
    """A GIF of 43 bytes that says its screen and its frame have this size."""
    size = struct.pack("<HH", width, height)
    return (
        b"GIF89a" + size + b"\x80\x00\x00\xff\x00\x00\x00\x00\xff"
        b",\x00\x00\x00\x00" + size + b"\x00\x02\x02D\x01\x00;"
    )  # fmt: skip


def _cut(data: bytes) -> bytes:
    return data[: len(data) * 2 // 3]


def _noise(kind: str) -> bytes:
    """A picture whose file is long enough to be cut."""
    return saved(Image.effect_noise((200, 200), 90).convert("RGB"), kind)


def _lies_about_its_size() -> bytes:
    """A JPEG whose height is said to be 60,000 in place of 32, and which has no end.

    With its end it would be an image that is grey below, as every decoder of JPEGs makes it.
    """
    data = saved(two(width=64, height=32), "JPEG")
    at = data.index(b"\xff\xc0") + 5
    return data[:at] + struct.pack(">H", 60_000) + data[at + 2 : -2]


def _huge_frame() -> bytes:
    """A GIF whose screen is small and whose frame is not."""
    data = bytearray(gif(60_000, 60_000))
    data[6:10] = struct.pack("<HH", 2, 2)
    return bytes(data)


def _many_frames() -> bytes:
    frames = [two(left=(one, 0, 0)) for one in range(1, 256)]
    return saved(two(), "GIF", save_all=True, append_images=frames)


MEGA = 1_000_000
# By name: how the file is made, and what the refusal says.
HOSTILE: Mapping[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "no PNG, JPEG, WebP or GIF"),
    "html": (lambda: b"<!doctype html><html><img src=x></html>", "no PNG, JPEG, WebP or GIF"),
    "svg": (
        lambda: (
            b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
        ),
        "no PNG, JPEG, WebP or GIF",
    ),
    "another format": (lambda: saved(two(), "BMP"), "no PNG, JPEG, WebP or GIF"),
    "postscript": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no PNG, JPEG, WebP or GIF"),
    "signature alone": (lambda: SIGNATURE, "no PNG, JPEG, WebP or GIF"),
    "png cut short": (lambda: _cut(_noise("PNG")), "damaged or cut short"),
    "jpeg cut short": (lambda: _cut(_noise("JPEG")), "damaged or cut short"),
    "webp cut short": (lambda: _cut(_noise("WEBP")), "damaged"),
    "gif cut short": (lambda: _cut(_noise("GIF")), "damaged or cut short"),
    "png without pixels": (lambda: png(4, 4, b""), "damaged or cut short"),
    "png with a wrong checksum": (lambda: png(4, 4, b"").replace(b"IHDR\x00", b"IHDR\x01"), "damaged"),
    "png of no height": (lambda: png(4, 0, b""), "no PNG|no pixels|damaged"),
    "jpeg that lies": (_lies_about_its_size, "damaged or cut short"),
    "100 megapixels": (lambda: png(10_000, 10_000, bytes(1 << 20)), "100.0 million pixels .*--image-pixels"),
    "4 gigapixels": (lambda: png(65_535, 65_535, b""), "million pixels .*--image-pixels"),
    "a png of 2^31": (lambda: png(2**31 - 1, 2**31 - 1, b""), "million pixels|damaged"),
    "a large gif": (lambda: gif(65_535, 65_535), "million pixels .*--image-pixels"),
    "a gif with a larger frame": (_huge_frame, "million pixels .*--image-pixels"),
    "a text bomb": (
        lambda: png(1, 1, bytes(4)).replace(
            chunk(b"IEND", b""),
            chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(256 * MEGA), 9)) + chunk(b"IEND", b""),
        ),
        "damaged",
    ),
}
# By name: a file, and the colours of its left and its right.
HONEST: Mapping[str, tuple[Callable[[], bytes], Any, Any]] = {
    "png": (lambda: saved(two()), RED, BLUE),
    "webp": (lambda: saved(two(), "WEBP", lossless=True), RED, BLUE),
    "gif": (lambda: saved(two(), "GIF"), RED, BLUE),
    "animated gif": (_many_frames, RED, BLUE),
    "animated webp": (
        lambda: saved(two(), "WEBP", lossless=True, save_all=True, append_images=[two(left=WHITE)]),
        RED,
        BLUE,
    ),
    "palette": (lambda: saved(two().convert("P")), RED, BLUE),
    "grey": (lambda: saved(two("L", left=10, right=200)), (10, 10, 10), (200, 200, 200)),
    "black and white": (lambda: saved(two("1", left=0, right=1)), (0, 0, 0), WHITE),
    "grey of 16 bits": (
        lambda: png(2, 1, b"\x00\x0a\xff\xc8\x00", depth=16, kind=0),
        (10, 10, 10),
        (200, 200, 200),
    ),
    "colours of 16 bits": (
        lambda: png(2, 1, bytes([0, 255, 255, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255]), depth=16),
        RED,
        BLUE,
    ),
    "half transparent": (
        lambda: saved(two("RGBA", left=(255, 0, 0, 0), right=(0, 0, 255, 255))),
        WHITE,
        BLUE,
    ),
    "a transparent colour": (
        lambda: saved(two("RGBA", left=(0, 0, 0, 0), right=(0, 0, 255, 255)).quantize(4)),
        WHITE,
        BLUE,
    ),
    "a bomb within the limit": (lambda: png(5000, 4000, bytes((1 + 3 * 5000) * 4000)), (0, 0, 0), (0, 0, 0)),
    "more data than pixels": (lambda: png(1, 1, bytes(100 * MEGA)), (0, 0, 0), (0, 0, 0)),
    "one pixel": (lambda: saved(Image.new("RGB", (1, 1), RED)), RED, RED),
}
