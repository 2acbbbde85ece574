"""From the images that a request shows to their pixels: what may be shown, from where, how many, how large together."""

from __future__ import annotations

import asyncio
import itertools
import re
import weakref
from collections.abc import Mapping, Sequence

from slipstream.engine.api import Image, ModelInfo
from slipstream.engine.errors import Overloaded
from slipstream.engine.settings import Settings
from slipstream.server.http.body import shown
from slipstream.server.http.error_table import Refused, bad_field, unsupported
from slipstream.server.images.decoders import Decoders
from slipstream.server.images.image_part import ImageRefused, Placed
from slipstream.server.images.media_folder import read_file
from slipstream.server.images.remote_image import Remote
from slipstream.server.report.meter import record

SEES = "image"  # among a model's modalities
DATA = re.compile(r"data:image/(png|jpe?g|webp|gif);base64,", re.IGNORECASE)
SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
MOST_READ = 16  # files that are fetched or read at once, by all requests: each has up to 32 MiB
MOST_OF_A_REQUEST = 4  # images of it that are read at once
TIMES_PIXELS = 4  # pixels of a request's images together, in those that one image may have
LEAST_HELD = 2 << 30  # bytes of pixels that requests may hold together
RETRY_S = 5.0


class Looking:
    """What the server does about images in requests. `settings`: how much it allows."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.most_pixels = settings.image_pixels * 1_000_000
        self._decoders = Decoders(self.most_pixels, settings.image_timeout)
        self._remote = Remote(settings)
        self._reading = asyncio.Semaphore(MOST_READ)
        # The pixels that any request still has. A request of the largest images fits twice.
        self._held: weakref.WeakValueDictionary[int, Image] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()
        self._most_held = max(LEAST_HELD, 2 * 3 * TIMES_PIXELS * self.most_pixels)

    async def at(self, placed: Sequence[Placed], info: ModelInfo) -> Mapping[str, Image]:
        """The images of a request by their addresses. Raises `Refused`, and `Overloaded` while others hold too many."""
        if not placed:
            return {}
        self._check(placed, info)
        record().n_images = len(placed)
        fields: dict[str, str] = {}
        for field, part in placed:
            fields.setdefault(part.url, field)  # shown twice, it is read once
        turns, room = asyncio.Semaphore(MOST_OF_A_REQUEST), _Room(TIMES_PIXELS * self.most_pixels)
        tasks = [asyncio.create_task(self._image(url, field, turns, room)) for url, field in fields.items()]
        try:
            return dict(zip(fields, await asyncio.gather(*tasks), strict=True))
        finally:
            for one in tasks:
                one.cancel()

    def _check(self, placed: Sequence[Placed], info: ModelInfo) -> None:
        """Raises `Refused` for a model that sees no images, and for too many of them."""
        if SEES not in info.modalities:
            why = "" if self.settings.vision else ": it was started without what sees them (--no-vision)"
            raise unsupported(placed[0][0], f"the model {info.name} sees no images{why}")
        most = self.settings.image_limit
        if len(placed) > most:
            field = placed[most][0]
            raise bad_field(
                field, f"a request may show {most} images (--image-limit), this one has {len(placed)}"
            )

    async def _image(self, url: str, field: str, turns: asyncio.Semaphore, room: _Room) -> Image:
        async with turns:
            try:
                image = await self._read(url)
                room.take(image)
            except ImageRefused as error:
                raise _refused(field, url, error) from None
        if sum(len(one.pixels) for one in list(self._held.values())) + len(image.pixels) > self._most_held:
            raise Overloaded("the requests that run hold as many images as there is memory for", RETRY_S)
        self._held[next(self._numbers)] = image
        return image

    async def _read(self, url: str) -> Image:
        """Raises `ImageRefused`."""
        scheme = (SCHEME.match(url) or [""])[0].lower()
        if scheme == "data:":
            return await self._decoders.decode("base64", _base64_of(url))
        if scheme not in ("http:", "https:", "file:"):
            raise ImageRefused("an image should be given as a data:, http:, https: or file: address")
        async with self._reading:
            if scheme == "file:":
                data = await asyncio.to_thread(read_file, url, self.settings.media_path)
            else:
                data = await self._remote.read(url)
            return await self._decoders.decode("raw", data)


class _Room:
    """How many pixels more a request may show."""

    def __init__(self, most: int) -> None:
        self.most = self.left = most

    def take(self, image: Image) -> None:
        """Raises `ImageRefused` if there is no room for the image."""
        self.left -= image.width * image.height
        if self.left < 0:
            reason = f"the request's images have more than {self.most / 1e6:g} million pixels together"
            raise ImageRefused(f"{reason} ({TIMES_PIXELS} times --image-pixels)")


def _base64_of(url: str) -> bytes:
    """What a `data:` address has of base64. Raises `ImageRefused`."""
    head = DATA.match(url)
    if head is None:
        raise ImageRefused(
            "a data: address should begin with data:image/png;base64, or the same of jpeg, webp or gif"
        )
    try:
        return url[head.end() :].encode("ascii")
    except UnicodeEncodeError:
        raise ImageRefused("what follows 'base64,' is not valid base64") from None


def _refused(field: str, url: str, error: ImageRefused) -> Refused:
    """The error for the image at `url`, which `field` of the request names. Data and queries are not repeated."""
    name = re.split(r"[,?#]", url, maxsplit=1)[0]
    end = "…" if len(name) < len(url) else ""
    return bad_field(field, f"{error} ({shown(name)}{end})", code="invalid_image")
