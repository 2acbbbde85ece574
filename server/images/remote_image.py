"""Fetching an image from another host, without being led into the server's own network.

Names are resolved here and the connection goes to an address that was checked: a name that means something else a
moment later (DNS rebinding) changes nothing. Redirects are followed by hand, each checked like the first address.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Sequence

import httpx

from slipstream.engine.settings import Settings
from slipstream.server.images.addresses import names_of, plain, those_open
from slipstream.server.images.image_part import ImageRefused

MOST_REDIRECTS = 3
MOST_BYTES = 32 << 20  # of an image's file
MOST_TRIES = 3  # addresses of a host
SCHEMES = ("http", "https")
REDIRECTS = (301, 302, 303, 307, 308)
_HEADERS = {
    "accept": "image/png, image/jpeg, image/webp, image/gif",
    "accept-encoding": "identity",  # a compressed answer could unpack to anything
    "user-agent": "slipstream",
}


class Remote:
    """Fetches images as the settings allow it."""

    def __init__(self, settings: Settings) -> None:
        self.is_allowed = settings.allow_remote_images
        self.timeout_s = settings.image_timeout
        self.hosts = names_of(settings.remote_image_hosts)
        self._trust: ssl.SSLContext | None = None

    async def read(self, address: str) -> bytes:
        """The bytes of an image's file. Raises `ImageRefused`."""
        if not self.is_allowed:
            raise ImageRefused("images are not fetched from other hosts here (--allow-remote-images)")
        if self._trust is None:
            self._trust = await asyncio.to_thread(ssl.create_default_context)
        try:
            async with asyncio.timeout(self.timeout_s):
                return await self._follow(_read(address), self._trust)
        except TimeoutError:
            reason = f"fetching it took longer than {self.timeout_s:g} s (--image-timeout)"
            raise ImageRefused(reason) from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError):  # the last: where a redirect leads
            raise ImageRefused("it could not be fetched: the connection failed") from None

    async def _follow(self, url: httpx.URL, trust: ssl.SSLContext) -> bytes:
        for _ in range(MOST_REDIRECTS + 1):
            found = await self._ask(url, await self._open_addresses(url), trust)
            if isinstance(found, bytes):
                return found
            url = found
        raise ImageRefused(f"its host redirects more than {MOST_REDIRECTS} times")

    async def _open_addresses(self, url: httpx.URL) -> Sequence[str]:
        """The addresses of the URL's host that may be connected to. Raises `ImageRefused` if there are none.

        A name that does not exist is told like one that means an inner address: nobody learns which there are.
        """
        host = plain(url.raw_host.decode("ascii"))
        if self.hosts is not None and host not in self.hosts:
            raise ImageRefused(
                "its host is not among those that images are fetched from (--remote-image-hosts)"
            )
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, url.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            found = []
        allowed = those_open((str(one[4][0]) for one in found), listed=self.hosts is not None)
        if not allowed:
            raise ImageRefused("its host has no public address (see --remote-image-hosts)")
        return allowed[:MOST_TRIES]

    async def _ask(
        self, url: httpx.URL, addresses: Sequence[str], trust: ssl.SSLContext
    ) -> bytes | httpx.URL:
        """The answer of the first address that takes a connection: the file, or where it is instead."""
        for index, address in enumerate(addresses):
            try:
                return await self._ask_at(url, address, trust)
            except httpx.ConnectError:
                if index + 1 == len(addresses):
                    raise
        raise ImageRefused("its host has no address")

    async def _ask_at(self, url: httpx.URL, address: str, trust: ssl.SSLContext) -> bytes | httpx.URL:
        # The certificate is that of the name. A client of its own: connections to an address are not shared by names.
        host = url.raw_host.decode("ascii")
        headers = {**_HEADERS, "host": url.netloc.decode("ascii")}
        async with (
            httpx.AsyncClient(verify=trust, trust_env=False, timeout=self.timeout_s) as client,
            client.stream(
                "GET", url.copy_with(host=address), headers=headers, extensions={"sni_hostname": host}
            ) as answer,
        ):
            if answer.status_code in REDIRECTS:
                return _read(answer.headers.get("location", ""), url)
            return await _file_of(answer)


def _read(address: str, base: httpx.URL | None = None) -> httpx.URL:
    """An address that images may be asked for at, which may be relative to another. Raises `ImageRefused`."""
    try:
        url = base.join(address) if base else httpx.URL(address)
    except (httpx.InvalidURL, UnicodeError):
        raise ImageRefused("its address is not valid") from None
    if (
        url.scheme not in SCHEMES or not url.raw_host
    ):  # `host` would be read as a name in Unicode, which may fail
        raise ImageRefused("only http and https addresses are fetched")
    if url.port is not None and not 0 < url.port < 1 << 16:
        raise ImageRefused("its address is not valid")
    if url.userinfo:
        raise ImageRefused("its address has a user name in it")
    return url.copy_with(fragment=None)


async def _file_of(answer: httpx.Response) -> bytes:
    """The body of an answer. Raises `ImageRefused`."""
    if answer.status_code != 200:
        raise ImageRefused(f"its host answered with the status {answer.status_code}")
    if answer.headers.get("content-encoding", "identity").lower() != "identity":
        raise ImageRefused("its host sent it compressed")
    too_long = ImageRefused(f"its file has more than {MOST_BYTES >> 20} MiB")
    announced = answer.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced[:20]) > MOST_BYTES:
        raise too_long
    parts, n_bytes = [], 0
    async for part in answer.aiter_raw():
        n_bytes += len(part)
        if n_bytes > MOST_BYTES:
            raise too_long
        parts.append(part)
    return b"".join(parts)
