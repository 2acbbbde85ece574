"""The process that decodes images: what a file makes a decoder do happens here, with little memory and time.

    python -m slipstream.server.images.pillow_process MOST_PIXELS SECONDS FD

It reads pairs of frames from a socket, the file's coding (`raw` or `base64`) and the file; it answers with JSON
(`{"width", "height"}` or `{"reason"}`), and in the first case a frame of the pixels, three bytes each.
"""

from __future__ import annotations

import binascii
import contextlib
import io
import json
import os
import resource
import sys
import time
import warnings
from multiprocessing.connection import Connection

from PIL import GifImagePlugin, Image, JpegImagePlugin, MpoImagePlugin, PngImagePlugin, WebPImagePlugin

from slipstream.kernels.child_process import limit_memory

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")  # MPO is a JPEG with more pictures behind it
# Their readers, loaded before memory is limited.
_READERS = (PngImagePlugin, JpegImagePlugin, WebPImagePlugin, GifImagePlugin, MpoImagePlugin)
# Of memory beyond what the process has when it starts: the file and its coding; the pixels in the decoder (WebP's has
# three copies of four bytes), in the mode of the file, and as they are given back.
BYTES_FOR_ALL = 256 << 20
BYTES_PER_PIXEL = 24
_ORIENTATION = 0x0112  # of EXIF
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_NICE = 5


class Unusable(Exception):
    """A file that is no image to be shown; says why."""


def decoded(data: bytes, most_pixels: int) -> Image.Image:
    """The first picture of a file, upright, red, green and blue, over white. Raises `Unusable`.

    Its size is checked before its pixels are read.
    """
    image = _opened(data)
    width, height = image.size
    if not width or not height:
        raise Unusable("it has no pixels")
    if width * height > most_pixels:
        size = f"{width * height / 1e6:.1f} million pixels ({width} × {height})"
        raise Unusable(f"it has {size}; at most {most_pixels / 1e6:g} million are read (--image-pixels)")
    try:
        image.load()
    except MemoryError:
        raise
    except Exception as error:  # readers raise what they like about damaged files
        raise Unusable("its file is damaged or cut short") from error
    return _over_white(_turned(image))


def _opened(data: bytes) -> Image.Image:
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except MemoryError:
        raise
    except Exception as error:  # readers raise what they like about damaged files
        raise Unusable("it is no PNG, JPEG, WebP or GIF image, or damaged") from error


def _turned(image: Image.Image) -> Image.Image:
    """The image as a camera that was held askew says that it is meant."""
    try:
        orientation = image.getexif().get(_ORIENTATION)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - what is beside the pixels may be damaged
        orientation = None
    return image.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else image


def _over_white(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits of grey, which `convert` would cut off at 255
        image.info.pop("transparency", None)  # a value of 16 bits too
        image = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    if not image.has_transparency_data:
        return image.convert("RGB")
    seen = image.convert("RGBA")
    white = Image.new("RGB", seen.size, "white")
    white.paste(seen, mask=seen.getchannel("A"))
    return white


def _file(coding: bytes, data: bytes) -> bytes:
    if coding == b"raw":
        return data
    try:
        return binascii.a2b_base64(data, strict_mode=True)
    except ValueError as error:
        raise Unusable("what follows 'base64,' is not valid base64") from error


def _answer(pipe: Connection, coding: bytes, data: bytes, most_pixels: int) -> None:
    try:
        image = decoded(_file(coding, data), most_pixels)
        size, pixels = image.size, image.tobytes()
    except Unusable as error:
        pipe.send_bytes(json.dumps({"reason": str(error)}).encode())
        return
    except MemoryError:
        reason = "decoding it takes more memory than an image of as many pixels may (--image-pixels)"
        pipe.send_bytes(json.dumps({"reason": reason}).encode())
        return
    pipe.send_bytes(json.dumps({"width": size[0], "height": size[1]}).encode())
    pipe.send_bytes(pixels)


def limit_time(seconds: float) -> None:
    """Let the kernel end the process once it has computed for so long from now on, in whole seconds."""
    most = int(time.process_time() + seconds) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def main(most_pixels: int, timeout_s: float, fd: int) -> None:
    os.nice(_NICE)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what decoders say of damaged files
    warnings.simplefilter("ignore")
    Image.MAX_IMAGE_PIXELS = None  # it warns where `decoded` refuses
    limit_memory(BYTES_FOR_ALL + BYTES_PER_PIXEL * most_pixels)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # and no files
    pipe = Connection(fd)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            coding, data = pipe.recv_bytes(), pipe.recv_bytes()
            limit_time(timeout_s)
            _answer(pipe, coding, data, most_pixels)
            del data


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
