"""The images of a request and of all requests together: read once, a few at a time, given up together."""

from __future__ import annotations

import asyncio

import pytest

from slipstream.engine.api import Image
from slipstream.engine.errors import Overloaded
from slipstream.engine.settings import Settings
from slipstream.server.http.error_table import Refused
from slipstream.server.images import looking
from slipstream.server.images.image_part import ImagePart, ImageRefused
from slipstream.server.images.looking import Looking
from slipstream.server.images.remote_image import Remote
from tests.http.fake import SEEING
from tests.http.serving import PATIENCE_S
from tests.image_files import BLUE, RED, data_url, plain

REMOTE = Settings(model="m", allow_remote_images=True, image_timeout=60.0)


def shown(*urls: str) -> list[tuple[str, ImagePart]]:
    return [(f"part[{index}]", ImagePart(url)) for index, url in enumerate(urls)]


async def test_an_image_shown_twice_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = data_url(plain(RED)), data_url(plain(BLUE, (6, 2)))
    read: list[str] = []
    really = Looking._read

    async def counted(self: Looking, url: str) -> Image:
        read.append(url)
        return await really(self, url)

    monkeypatch.setattr(Looking, "_read", counted)
    images = await Looking(Settings(model="m")).at(shown(one, other, one), SEEING)
    assert [(url, image.width) for url, image in images.items()] == [(one, 4), (other, 6)]
    assert sorted(read) == sorted([one, other])


async def test_what_requests_hold_counts_while_they_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Looking(Settings(model="m"))
    monkeypatch.setattr(known, "_most_held", 3 * 600 * 1000)
    url, other = data_url(plain(RED, (600, 1000))), data_url(plain(RED, (600, 1)))
    held = await known.at(shown(url), SEEING)
    with pytest.raises(Overloaded, match="as many images"):
        await known.at(shown(other), SEEING)
    del held
    assert len(await known.at(shown(other), SEEING)) == 1


async def test_one_that_is_refused_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    async def read(self: Looking, url: str) -> Image:
        if url == "bad":
            raise ImageRefused("it is bad")
        try:
            await asyncio.sleep(600)
        finally:
            ended.append(url)
        raise AssertionError

    monkeypatch.setattr(Looking, "_read", read)
    with pytest.raises(Refused, match=r"part\[1\]: it is bad"):
        await Looking(Settings(model="m")).at(shown("slow", "bad"), SEEING)
    await asyncio.sleep(0)
    assert ended == ["slow"]


async def test_slow_hosts_hold_up_no_images_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few files are fetched at once, by all requests together; images that are data wait for none of them."""
    asked: list[str] = []
    go = asyncio.Event()

    async def read(self: Remote, address: str) -> bytes:
        asked.append(address)
        await go.wait()
        return plain(RED)

    monkeypatch.setattr(Remote, "read", read)
    known = Looking(REMOTE)
    urls = [f"http://pictures.example/{index}" for index in range(looking.MOST_READ + 3)]
    work = [asyncio.create_task(known.at(shown(one), SEEING)) for one in urls]
    async with asyncio.timeout(PATIENCE_S):
        while len(asked) < looking.MOST_READ:
            await asyncio.sleep(0)
        assert await known.at(shown(data_url(plain(BLUE))), SEEING)
    assert asked == urls[: looking.MOST_READ]
    go.set()
    assert all(await asyncio.gather(*work))
    assert asked == urls


async def test_a_request_reads_few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    running, most = 0, 0

    async def read(self: Looking, url: str) -> Image:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(3):
            await asyncio.sleep(0)
        running -= 1
        return Image(1, 1, b"abc")

    monkeypatch.setattr(Looking, "_read", read)
    assert len(await Looking(Settings(model="m")).at(shown(*"abcdefghij"), SEEING)) == 10
    assert most == looking.MOST_OF_A_REQUEST


async def test_addresses_are_told_without_what_may_be_secret_in_them() -> None:
    for url, told in (
        ("http://pictures.example/a.png?signature=secret", "(http://pictures.example/a.png…)"),
        ("data:image/png;base64,secret", "(data:image/png;base64…)"),
        ("ftp://" + "a" * 1000, "(ftp://" + "a" * 58 + ")"),
    ):
        with pytest.raises(Refused) as refused:
            await Looking(Settings(model="m")).at(shown(url), SEEING)
        assert str(refused.value).endswith(told)
        assert "secret" not in str(refused.value)
