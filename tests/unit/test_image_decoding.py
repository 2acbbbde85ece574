"""Images' files through the process that decodes them: what is seen of good ones, what bad ones come to."""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import re
import signal
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image as Pillow

from slipstream.engine.api import Image
from slipstream.server.images.decoders import Decoder, Decoders
from slipstream.server.images.image_part import ImageRefused
from slipstream.server.images.pillow_process import BYTES_FOR_ALL, BYTES_PER_PIXEL
from tests.image_files import (
    BLUE,
    GREEN,
    RED,
    SIGNATURE,
    WHITE,
    Colour,
    chunk,
    gif,
    jpeg_saying,
    plain,
    png,
    saved,
    webp_canvas,
)

ABOUT = ("server/images/*.py",)
MOST_PIXELS = 2_000_000
PATIENCE_S = 30.0  # after which a test ends what it waits for in vain
NOT_AN_IMAGE, DAMAGED = (
    "it is no PNG, JPEG, WebP or GIF image, or damaged",
    "its file is damaged or cut short",
)
OF_16_BITS = (0, 255, 256, 257, 20_000, 32_768, 65_279, 65_280, 65_535)


@pytest.fixture(scope="module")
def warm() -> Iterator[Decoder]:
    one = Decoder(MOST_PIXELS, 60.0)
    yield one
    one.close()


@pytest.fixture
def decoder(warm: Decoder) -> Iterator[Decoder]:
    """A child that a test does not end: the same serves the next image."""
    warm.decode("raw", plain())
    before = warm.pid
    yield warm
    assert warm.decode("raw", plain(BLUE)).pixels == bytes(BLUE) * 12
    assert warm.pid == before


@pytest.fixture
def brittle() -> Iterator[Decoder]:
    """A child of the test's own that has started and is given little time."""
    one = Decoder(MOST_PIXELS, 60.0)
    one.decode("raw", plain())
    one.timeout_s = 0.2
    yield one
    one.close()


def array(image: Image) -> NDArray[np.uint8]:
    return np.frombuffer(image.pixels, np.uint8).reshape(image.height, image.width, 3)


def colours(image: Image) -> set[Colour]:
    return {(int(r), int(g), int(b)) for r, g, b in array(image).reshape(-1, 3)}


def refused(decoder: Decoder, data: bytes, coding: str = "raw") -> str:
    with pytest.raises(ImageRefused) as error:
        decoder.decode(coding, data)
    return str(error.value)


def outcome(decoder: Decoder, data: bytes) -> Image | str:
    """The image, or why there is none."""
    try:
        return decoder.decode("raw", data)
    except ImageRefused as error:
        return str(error)


def noise(size: tuple[int, int] = (64, 48), mode: str = "RGB") -> Pillow.Image:
    rng = np.random.default_rng(1)
    return Pillow.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).convert(mode)


# --- what is seen ---


@pytest.mark.parametrize(("kind", "options"), [("PNG", {}), ("GIF", {}), ("WEBP", {"lossless": True})])
@pytest.mark.parametrize("coding", ["raw", "base64"])
def test_formats_without_loss(decoder: Decoder, kind: str, options: dict[str, bool], coding: str) -> None:
    file = plain(kind=kind, **options)
    image = decoder.decode(coding, base64.b64encode(file) if coding == "base64" else file)
    assert (image.width, image.height, image.pixels) == (4, 3, bytes(RED) * 12)


@pytest.mark.parametrize(("kind", "options"), [("JPEG", {"quality": 95}), ("WEBP", {"quality": 95})])
def test_formats_with_loss(decoder: Decoder, kind: str, options: dict[str, int]) -> None:
    seen = array(decoder.decode("raw", plain((200, 40, 90), (32, 16), kind, **options)))
    assert seen.shape == (16, 32, 3)
    assert np.abs(seen.astype(int) - (200, 40, 90)).max() < 12


def test_every_pixel_in_its_place(decoder: Decoder) -> None:
    image = noise()
    seen = decoder.decode("raw", saved(image))
    assert (seen.width, seen.height) == (64, 48)
    assert seen.pixels == image.tobytes()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_one_pixel(decoder: Decoder, kind: str) -> None:
    assert colours(decoder.decode("raw", plain(WHITE, (1, 1), kind))) == {WHITE}


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_the_first_picture_of_an_animation(decoder: Decoder, kind: str) -> None:
    first, *others = (Pillow.new("RGB", (4, 3), one) for one in (RED, GREEN, BLUE))
    lossless = {"lossless": True} if kind == "WEBP" else {}
    file = saved(first, kind, save_all=True, append_images=others, duration=50, **lossless)
    assert decoder.decode("raw", file).pixels == bytes(RED) * 12


def test_a_jpeg_in_printing_inks(decoder: Decoder) -> None:
    file = saved(Pillow.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG", quality=95)
    assert np.abs(array(decoder.decode("raw", file)).astype(int) - RED).max() < 12


def test_grey_of_16_bits_is_scaled(decoder: Decoder) -> None:
    row = b"\0" + b"".join(one.to_bytes(2, "big") for one in OF_16_BITS)
    seen = array(decoder.decode("raw", png(len(OF_16_BITS), 1, row, depth=16, kind=0)))
    assert seen[0].tolist() == [[one >> 8] * 3 for one in OF_16_BITS]


def test_colours_of_16_bits(decoder: Decoder) -> None:
    row = b"\0" + b"".join(one.to_bytes(2, "big") for one in (65_535, 32_768, 255, 256, 20_000, 0))
    assert array(decoder.decode("raw", png(2, 1, row, depth=16)))[0].tolist() == [[255, 128, 0], [1, 78, 0]]


@pytest.mark.parametrize(("depth", "row", "seen"), [(1, b"\0\x80", (255, 0)), (4, b"\0\xf3", (255, 51))])
def test_grey_of_few_bits(decoder: Decoder, depth: int, row: bytes, seen: tuple[int, int]) -> None:
    image = decoder.decode("raw", png(2, 1, row, depth=depth, kind=0))
    assert array(image)[0].tolist() == [[one] * 3 for one in seen]


def test_what_is_transparent_shows_white(decoder: Decoder) -> None:
    palette = Pillow.new("P", (2, 1))
    palette.putpalette([*RED, *BLUE])
    palette.putpixel((1, 0), 1)
    for options in ({"transparency": 0}, {"transparency": b"\0\xff"}):
        seen = array(decoder.decode("raw", saved(palette, **options)))
        assert seen[0].tolist() == [list(WHITE), list(BLUE)]
    seen = array(decoder.decode("raw", saved(palette, "GIF", transparency=1)))
    assert seen[0].tolist() == [list(RED), list(WHITE)]
    half = array(decoder.decode("raw", saved(palette, transparency=b"\x80\xff")))[0, 0]
    assert np.abs(half.astype(int) - (255, 127, 127)).max() <= 1


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_half_transparent_colours_over_white(decoder: Decoder, kind: str) -> None:
    lossless = {"lossless": True, "exact": True} if kind == "WEBP" else {}
    file = saved(Pillow.new("RGBA", (4, 3), (*RED, 128)), kind, **lossless)
    assert np.abs(array(decoder.decode("raw", file)).astype(int) - (255, 127, 127)).max() <= 1


def test_transparent_grey(decoder: Decoder) -> None:
    assert colours(decoder.decode("raw", saved(Pillow.new("LA", (4, 3), (0, 0))))) == {WHITE}


# Of EXIF's orientations: at which side of what is meant the file's first row is, and its first column.
SIDES = {
    1: ("top", "left"),
    2: ("top", "right"),
    3: ("bottom", "right"),
    4: ("bottom", "left"),
    5: ("left", "top"),
    6: ("right", "top"),
    7: ("right", "bottom"),
    8: ("left", "bottom"),
}


@pytest.mark.parametrize("orientation", SIDES)
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_cameras_held_askew(decoder: Decoder, orientation: int, kind: str) -> None:
    meant = np.repeat(np.repeat(np.array(noise((3, 2))), 16, 0), 16, 1)  # blocks that JPEG keeps
    stored = meant.swapaxes(0, 1) if SIDES[orientation][0] in ("left", "right") else meant
    for axis, side in enumerate(SIDES[orientation]):
        stored = np.flip(stored, axis) if side in ("bottom", "right") else stored
    exif = Pillow.Exif()
    exif[0x0112] = orientation
    options = {"JPEG": {"quality": 100, "subsampling": 0}, "WEBP": {"lossless": True}}.get(kind, {})
    seen = array(decoder.decode("raw", saved(Pillow.fromarray(stored), kind, exif=exif, **options)))
    assert seen.shape == meant.shape
    assert np.abs(seen.astype(int) - meant).max() < 12


@pytest.mark.parametrize("value", [0, 9, 65_535])
def test_an_orientation_that_there_is_not(decoder: Decoder, value: int) -> None:
    exif = Pillow.Exif()
    exif[0x0112] = value
    assert decoder.decode("raw", plain(exif=exif)).pixels == bytes(RED) * 12


def test_damaged_notes_beside_the_pixels(decoder: Decoder) -> None:
    rows = (b"\0" + bytes(RED)) * 2
    file = png(1, 2, rows, more=chunk(b"eXIf", b"II*\0\xff\xff\xff\xff"))
    assert decoder.decode("raw", file).pixels == bytes(RED) * 2


# --- what is refused, before memory is spent on it ---


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_cut_short_anywhere(decoder: Decoder, kind: str) -> None:
    """No cut leads to more than a refusal or an image of the size that the header says."""
    file = saved(noise(), kind)
    n_refused = 0
    for length in range(0, len(file) - 16, max(1, len(file) // 40)):
        found = outcome(decoder, file[:length])
        if isinstance(found, Image):
            assert (found.width, found.height) == (64, 48)
        else:
            n_refused += 1
            assert found in (NOT_AN_IMAGE, DAMAGED)
    assert n_refused > 30


@pytest.mark.parametrize("size", [(100_000, 100_000), (2**31 - 1, 1), (2_000_001, 1)])
def test_a_png_that_says_it_is_large(decoder: Decoder, size: tuple[int, int]) -> None:
    """By its header alone: there are no such pixels in it to be read, which would be damage."""
    told = f"it has {size[0] * size[1] / 1e6:.1f} million pixels ({size[0]} × {size[1]}); at most 2 million"
    assert refused(decoder, png(*size, b"\0\0")).startswith(told)


def test_others_that_say_they_are_large(decoder: Decoder) -> None:
    assert "(65535 × 65535)" in refused(decoder, gif((65_535, 65_535), [(1, 1)]))
    assert "(65535 × 65535)" in refused(decoder, gif((1, 1), [(65_535, 65_535)]))
    assert "(60000 × 50000)" in refused(decoder, jpeg_saying(60_000, 50_000))
    assert "million pixels" in refused(decoder, plain(size=(2_000, 1_001), kind="WEBP"))
    # WebP's reader takes room for its canvas when it opens a file; there is not as much.
    assert refused(decoder, webp_canvas(16_384, 16_383)) == NOT_AN_IMAGE
    assert decoder.decode("raw", plain(size=(2_000, 1_000), kind="WEBP")).width == 2_000


def test_a_later_frame_that_says_it_is_large(decoder: Decoder) -> None:
    image = decoder.decode("raw", gif((1, 1), [(1, 1), (65_535, 65_535)]))
    assert (image.width, image.height) == (1, 1)


@pytest.mark.sampled(keep=1, together=True)
def test_a_hundred_megapixels(decoder: Decoder) -> None:
    file = saved(Pillow.new("1", (10_000, 10_000)))
    assert len(file) < 100_000
    assert "it has 100.0 million pixels (10000 × 10000)" in refused(decoder, file)
    large = Decoder(100_000_000, 60.0)
    try:
        image = large.decode("raw", file)
        assert (image.width, image.height, len(image.pixels)) == (10_000, 10_000, 300_000_000)
        assert not any(image.pixels[::9973])
    finally:
        large.close()


@pytest.mark.sampled(keep=1, together=True)
def test_as_many_pixels_as_there_may_be_find_their_memory() -> None:
    """The most that any reader takes: an animated WebP with transparency, to be turned."""
    exif = Pillow.Exif()
    exif[0x0112] = 6
    first, second = (Pillow.new("RGBA", (16_000, 2_500), (*one, 128)) for one in (RED, BLUE))
    options = {"save_all": True, "append_images": [second], "lossless": True, "quality": 0, "method": 0}
    large = Decoder(40_000_000, 60.0)
    try:
        image = large.decode("raw", saved(first, "WEBP", exif=exif, **options))
        assert (image.width, image.height) == (2_500, 16_000)
        assert max(abs(one - want) for one, want in zip(image.pixels[:3], (255, 127, 127), strict=True)) <= 1
    finally:
        large.close()


def test_pixels_that_go_on_behind_the_last(decoder: Decoder) -> None:
    """A file of 1 MiB unpacks to 1 GiB; its header speaks of four pixels."""
    stream, zeros = zlib.compressobj(9), bytes(1 << 20)
    first, again = (stream.compress(zeros) + stream.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    # An empty last block, and the sum of a gigabyte of zeros (RFC 1950).
    packed = first + 1023 * again + b"\3\0" + struct.pack(">HH", (1 << 30) % 65521, 1)
    header = chunk(b"IHDR", b"\0\0\0\2\0\0\0\2\x08\x02\0\0\0")
    file = SIGNATURE + header + chunk(b"IDAT", packed) + chunk(b"IEND", b"")
    assert colours(decoder.decode("raw", file)) == {(0, 0, 0)}
    assert peak(decoder) < BYTES_FOR_ALL + BYTES_PER_PIXEL * MOST_PIXELS


@pytest.mark.sampled(keep=1, together=True)
@pytest.mark.parametrize("name", [b"zTXt", b"iCCP", b"iTXt"])
def test_texts_that_unpack_to_very_much(decoder: Decoder, name: bytes) -> None:
    begin = {b"zTXt": b"a\0\0", b"iCCP": b"a\0\0", b"iTXt": b"a\0\1\0\0\0"}[name]
    more = chunk(name, begin + zlib.compress(bytes(400 << 20), 1))
    found = outcome(decoder, png(1, 1, b"\0" + bytes(RED), more=more))
    assert found == NOT_AN_IMAGE or (isinstance(found, Image) and found.pixels == bytes(RED))
    assert peak(decoder) < BYTES_FOR_ALL + BYTES_PER_PIXEL * MOST_PIXELS


@pytest.mark.parametrize(
    "file",
    [
        b"",
        b"\0",
        b"<svg xmlns='http://www.w3.org/2000/svg' width='4' height='3'/>",
        b"<!doctype html><title>Not found</title>",
        b"%PDF-1.7\n",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        SIGNATURE,
        png(0, 0, b""),
        png(1, 0, b""),
        *(plain(kind=kind) for kind in ("BMP", "TIFF", "PPM", "TGA", "ICO", "PCX", "EPS")),
    ],
    ids=lambda one: repr(one[:12]),
)
def test_what_is_no_image_of_the_four_kinds(decoder: Decoder, file: bytes) -> None:
    assert refused(decoder, file) in (NOT_AN_IMAGE, "it has no pixels")


def test_a_size_that_the_pixels_do_not_have(decoder: Decoder) -> None:
    assert refused(decoder, png(100, 100, (b"\0" + bytes(RED)) * 2)) == DAMAGED
    assert refused(decoder, png(1, 1, b"\0" + bytes(RED), depth=3)) == NOT_AN_IMAGE


def test_bytes_that_were_changed(decoder: Decoder) -> None:
    rng = np.random.default_rng(2)
    for kind, _ in itertools.product(("PNG", "JPEG", "WEBP", "GIF"), range(40)):
        file = bytearray(saved(noise((16, 12)), kind))
        for place in rng.integers(0, len(file), 4):
            file[place] = rng.integers(0, 256)
        found = outcome(decoder, bytes(file))
        if isinstance(found, Image):
            assert len(found.pixels) == 3 * found.width * found.height <= 3 * MOST_PIXELS
        else:
            assert re.match(r"it is no PNG|its file is|it has ([\d.]+ million|no) pixels|decoding", found)


@pytest.mark.parametrize("text", [b"????", b"QUJD\n", b"QUJ", b"QU JD", b"=QUJ", b"\xff\xfe\xfd\xfc"])
def test_wrong_base64(decoder: Decoder, text: bytes) -> None:
    assert refused(decoder, text, "base64") == "what follows 'base64,' is not valid base64"


def test_base64_of_nothing(decoder: Decoder) -> None:
    assert refused(decoder, b"", "base64") == NOT_AN_IMAGE


# --- the child ---


def limits(pid: int) -> dict[str, list[str]]:
    """The soft and the hard limit by name."""
    lines = Path(f"/proc/{pid}/limits").read_text().splitlines()[1:]
    return {line[:26].strip(): line[26:].split()[:2] for line in lines}


def peak(decoder: Decoder) -> int:
    """Bytes of memory that the child has had at most beyond what it is itself, some 64 MiB."""
    told = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{decoder.pid}/status").read_text())
    assert told is not None
    return max(0, int(told[1]) * 1024 - (64 << 20))


def test_the_childs_limits(decoder: Decoder) -> None:
    assert decoder.pid is not None
    found = limits(decoder.pid)
    soft, hard = map(int, found["Max address space"])
    assert soft == hard
    assert 0 < soft - BYTES_FOR_ALL - BYTES_PER_PIXEL * MOST_PIXELS < 1 << 30
    assert found["Max file size"] == found["Max core file size"] == ["0", "0"]
    spent_s = sum(map(int, Path(f"/proc/{decoder.pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]))
    spent_s //= os.sysconf("SC_CLK_TCK")
    assert spent_s < int(found["Max cpu time"][0]) <= spent_s + 60 + 3


@pytest.mark.sampled(keep=1, together=True)
def test_the_childs_time_is_counted_anew_for_each_image() -> None:
    """Its limit is of all that it has computed."""
    decoder = Decoder(MOST_PIXELS, 60.0)
    try:
        file, told = saved(noise((1_400, 1_400)), compress_level=1), set()
        end = time.monotonic() + PATIENCE_S
        while len(told) < 2 and time.monotonic() < end:
            decoder.decode("raw", file)
            told.add(limits(decoder.pid or 0)["Max cpu time"][0])
        assert len(told) == 2
    finally:
        decoder.close()


def test_the_child_has_none_of_the_servers_files(decoder: Decoder) -> None:
    """Beside its output and what it talks through."""
    links = {int(one.name): os.readlink(one) for one in Path(f"/proc/{decoder.pid}/fd").iterdir()}
    assert links[0] == links[2] == "/dev/null"
    others = [links[one] for one in sorted(links) if one > 2 and links[one] != "/dev/null"]
    assert len(others) == 1
    assert others[0].startswith("socket:")


def test_a_child_that_died_is_replaced(brittle: Decoder) -> None:
    brittle.timeout_s, before = 60.0, brittle.pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    assert refused(brittle, plain()) == "the process that decodes images was lost over it"
    assert brittle.decode("raw", plain(GREEN)).pixels == bytes(GREEN) * 12
    assert brittle.pid not in (None, before)


def test_a_child_that_the_kernel_ended_was_too_slow(brittle: Decoder) -> None:
    assert brittle.pid is not None
    os.kill(brittle.pid, signal.SIGXCPU)
    assert refused(brittle, plain()) == "decoding it took longer than 0.2 s (--image-timeout)"
    brittle.timeout_s = 60.0
    assert brittle.decode("raw", plain(GREEN)).pixels == bytes(GREEN) * 12


def test_a_child_whose_time_is_over_is_replaced(brittle: Decoder) -> None:
    before = brittle.pid
    assert before is not None
    os.kill(before, signal.SIGSTOP)
    patience = threading.Timer(PATIENCE_S, os.kill, (before, signal.SIGKILL))
    patience.start()
    try:
        assert refused(brittle, plain()) == "decoding it took longer than 0.2 s (--image-timeout)"
    finally:
        patience.cancel()
    assert not Path(f"/proc/{before}").exists()
    brittle.timeout_s = 60.0
    assert brittle.decode("raw", plain(GREEN)).pixels == bytes(GREEN) * 12
    assert brittle.pid != before


def test_a_decoder_without_use_ends_its_child() -> None:
    decoder = Decoder(MOST_PIXELS, 60.0)
    decoder.decode("raw", plain())
    folder = Path(f"/proc/{decoder.pid}")
    assert folder.exists()
    del decoder
    assert not folder.exists()


# --- several at once ---


async def test_many_images_at_once() -> None:
    decoders = Decoders(MOST_PIXELS, 60.0)
    sides = [*range(1, 17)]
    broken = [decoders.decode("raw", b"no image") for _ in sides]
    good = [decoders.decode("raw", saved(noise((one, 3)))) for one in sides]
    mixed = [one for pair in zip(broken, good, strict=True) for one in pair]
    told = await asyncio.gather(*mixed, return_exceptions=True)
    assert all(isinstance(one, ImageRefused) for one in told[::2])
    for side, image in zip(sides, told[1::2], strict=True):
        assert isinstance(image, Image)
        assert image.pixels == noise((side, 3)).tobytes()


async def test_waiting_for_an_image_holds_nothing_up() -> None:
    decoders, n_turns = Decoders(MOST_PIXELS, 60.0), 0
    task = asyncio.create_task(decoders.decode("raw", saved(noise((1_000, 1_000)))))
    while not task.done():
        await asyncio.sleep(0)
        n_turns += 1
    assert (await task).width == 1_000
    assert n_turns > 1


def test_an_images_key_is_its_pixels_and_size(decoder: Decoder) -> None:
    first = decoder.decode("raw", plain())
    assert first.key == decoder.decode("base64", base64.b64encode(plain(kind="GIF"))).key
    assert first.key != decoder.decode("raw", plain(size=(3, 4))).key
    assert first.key != decoder.decode("raw", plain(BLUE)).key
