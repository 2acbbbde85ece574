"""Decoding images in processes of their own: every kind of file, files that lie, and limits."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import re
import resource
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pictures

from slipstream.engine.api import Image
from slipstream.server.images.decoders import AT_ONCE, Decoder, Decoders
from slipstream.server.images.image_part import ImageRefused
from slipstream.server.images.pillow_process import BYTES_FOR_ALL, BYTES_PER_PIXEL
from tests.image_files import BLUE, HONEST, HOSTILE, RED, saved, turned, two

MOST, TIMEOUT_S = 40_000_000, 60.0


@pytest.fixture(scope="module")
def shared() -> Iterator[Decoder]:
    one = Decoder(MOST, TIMEOUT_S)
    yield one
    one.close()


def at(image: Image, x: int, y: int) -> tuple[int, ...]:
    start = 3 * (y * image.width + x)
    return tuple(image.pixels[start : start + 3])


def limits(pid: int | None) -> dict[str, str]:
    """What the kernel allows a process, by the name of the limit: the soft limit."""
    lines = Path(f"/proc/{pid}/limits").read_text().splitlines()[1:]
    return {one[:26].strip(): one[26:47].strip() for one in lines}


def peak(pid: int | None) -> int:
    """Most bytes of memory that a process ever had."""
    (line,) = [one for one in Path(f"/proc/{pid}/status").read_text().splitlines() if one.startswith("VmHWM")]
    return int(line.split()[1]) << 10


@pytest.mark.parametrize("name", HONEST)
def test_every_kind_of_file(shared: Decoder, name: str) -> None:
    make, left, right = HONEST[name]
    image = shared.decode("raw", make())
    assert (at(image, 0, 0), at(image, image.width - 1, 0)) == (left, right)
    assert len(image.pixels) == 3 * image.width * image.height


@pytest.mark.parametrize("name", HOSTILE)
def test_files_that_lie(shared: Decoder, name: str) -> None:
    """Each is refused with a reason, by a process that goes on and needed hardly any memory."""
    make, reason = HOSTILE[name]
    shared.decode("raw", saved(two()))
    pid = shared.pid
    with pytest.raises(ImageRefused, match=re.compile(reason)):
        shared.decode("raw", make())
    image = shared.decode("raw", saved(two()))
    assert (at(image, 0, 0), shared.pid) == (RED, pid)


def test_what_lies_about_its_size_takes_no_memory() -> None:
    decoder = Decoder(MOST, TIMEOUT_S)
    for make, _ in (HOSTILE[one] for one in HOSTILE if "pixels" in one or "bomb" in one or "gif" in one):
        with contextlib.suppress(ImageRefused):
            decoder.decode("raw", make())
    assert peak(decoder.pid) < 200 << 20
    decoder.close()


@pytest.mark.parametrize(
    ("orientation", "size", "first", "last"),
    [
        (1, (64, 32), RED, BLUE),
        (2, (64, 32), BLUE, RED),
        (3, (64, 32), BLUE, RED),
        (4, (64, 32), RED, BLUE),
        (5, (32, 64), RED, BLUE),
        (6, (32, 64), RED, BLUE),
        (7, (32, 64), BLUE, RED),
        (8, (32, 64), BLUE, RED),
        (9, (64, 32), RED, BLUE),
    ],
)
def test_cameras_held_askew(shared: Decoder, orientation: int, size: Any, first: Any, last: Any) -> None:
    image = shared.decode("raw", turned(orientation))
    assert (image.width, image.height) == size
    ends = at(image, 2, 2), at(image, image.width - 3, image.height - 3)
    assert [max(range(3), key=one.__getitem__) for one in ends] == [first.index(255), last.index(255)]


def test_printers_colours(shared: Decoder) -> None:
    """Adobe's JPEGs have them inverted; Pillow writes them so and has to read them back."""
    image = shared.decode("raw", saved(Pictures.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG", quality=95))
    red, green, blue = at(image, 8, 8)
    assert red > 240
    assert max(green, blue) < 15


@pytest.mark.parametrize(
    "text", ["", "====", "YQ", "YQ==YQ==", " aGFsbG8=", "aGFs\nbG8=", "aGFsbG8", "_-8=", "a%3D%3D", "YR==x"]
)
def test_base64_is_read_strictly(shared: Decoder, text: str) -> None:
    with pytest.raises(ImageRefused, match=r"base64|no PNG"):
        shared.decode("base64", text.encode())
    assert at(shared.decode("base64", base64.b64encode(saved(two()))), 0, 0) == RED


def test_the_process_has_little() -> None:
    """Memory for an image of the largest size, computing time for one, no files to write, low priority."""
    decoder = Decoder(2_000_000, 3.0)
    decoder.decode("raw", saved(two()))
    told = limits(decoder.pid)
    allowed = BYTES_FOR_ALL + BYTES_PER_PIXEL * 2_000_000
    assert allowed < int(told["Max address space"]) < allowed + (1 << 30)
    assert 4 <= int(told["Max cpu time"]) <= 30
    assert (told["Max core file size"], told["Max file size"]) == ("0", "0")
    assert os.getpriority(os.PRIO_PROCESS, decoder.pid or 0) > 0
    assert os.getsid(decoder.pid or 0) == decoder.pid
    decoder.close()


def test_too_much_memory_is_a_refusal() -> None:
    decoder = Decoder(MOST, TIMEOUT_S)
    decoder.decode("raw", saved(two()))
    assert decoder.pid is not None
    size = int(Path(f"/proc/{decoder.pid}/statm").read_text().split()[0]) * resource.getpagesize()
    resource.prlimit(decoder.pid, resource.RLIMIT_AS, (size + (8 << 20), size + (8 << 20)))
    with pytest.raises(ImageRefused, match="memory"):
        decoder.decode("raw", HONEST["a bomb within the limit"][0]())
    decoder.close()


def test_one_that_takes_too_long_is_ended() -> None:
    """The process is stopped, which is what a decoder that never ends looks like from outside."""
    decoder = Decoder(MOST, TIMEOUT_S)
    decoder.decode("raw", saved(two()))
    pid, decoder.timeout_s = decoder.pid, 0.2
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    going_on = threading.Timer(30.0, os.kill, (pid, signal.SIGCONT))  # for those that wait for it
    going_on.start()
    with pytest.raises(ImageRefused, match=r"longer than 0.2 s \(--image-timeout\)"):
        decoder.decode("raw", saved(two()))
    going_on.cancel()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    decoder.timeout_s = TIMEOUT_S
    assert at(decoder.decode("raw", saved(two())), 0, 0) == RED
    assert decoder.pid != pid
    decoder.close()


@pytest.mark.parametrize(("sent", "reason"), [(signal.SIGKILL, "was lost"), (signal.SIGXCPU, "longer than")])
def test_one_that_is_lost_ends_its_image_alone(sent: signal.Signals, reason: str) -> None:
    decoder = Decoder(MOST, TIMEOUT_S)
    decoder.decode("raw", saved(two()))
    assert decoder.pid is not None
    os.kill(decoder.pid, signal.SIGSTOP)
    timer = threading.Timer(0.2, os.kill, (decoder.pid, sent))
    timer.start()
    if sent is signal.SIGXCPU:
        threading.Timer(0.3, os.kill, (decoder.pid, signal.SIGCONT)).start()
    with pytest.raises(ImageRefused, match=reason):
        decoder.decode("raw", saved(two()))
    timer.join()
    assert at(decoder.decode("raw", saved(two())), 0, 0) == RED
    decoder.close()


async def test_a_few_at_a_time_and_the_event_loop_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    running, most, go = [], [], threading.Event()

    def slowly(decoder: Decoder, coding: str, data: bytes) -> Image:
        running.append(decoder)
        most.append(len(running))
        go.wait(60)
        running.remove(decoder)
        return Image(1, 1, b"abc")

    monkeypatch.setattr(Decoder, "decode", slowly)
    decoders = Decoders(MOST, TIMEOUT_S)
    work = asyncio.gather(*(decoders.decode("raw", b"") for _ in range(3 * AT_ONCE)))
    while len(running) < AT_ONCE:
        await asyncio.sleep(0.01)
    go.set()
    assert len(await work) == 3 * AT_ONCE
    assert max(most) == AT_ONCE
