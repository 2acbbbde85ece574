"""Images fetched from other hosts: from a real server on the loopback, which stands for a public one where the check of
addresses is told so; and what hosts and addresses do that lead elsewhere.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import httpx
import pytest

from slipstream.engine.settings import Settings
from slipstream.server.images import addresses, remote_image
from slipstream.server.images.image_part import ImageRefused
from slipstream.server.images.remote_image import MOST_REDIRECTS, Remote
from tests.image_files import plain

PATIENCE_S = 30.0
FILE = plain()
NOT_PUBLIC = "its host has no public address (see --remote-image-hosts)"
FAILED = "it could not be fetched: the connection failed"
SCHEMES = "only http and https addresses are fetched"
Answering = Callable[[asyncio.StreamWriter], Awaitable[None]]


def answer(status: str = "200 OK", body: bytes = FILE, **headers: str) -> bytes:
    named = {
        "content-length": str(len(body)),
        **{name.replace("_", "-"): one for name, one in headers.items()},
    }
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {one}" for name, one in named.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def moved(location: str, status: str = "302 Found") -> bytes:
    return answer(status, b"", location=location)


class Host:
    """An HTTP server on 127.0.0.1 and 127.0.0.2. `asked`: who was asked for which path, and the headers."""

    def __init__(self) -> None:
        self.answers: dict[str, bytes | Answering] = {"/a.png": answer()}
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        self.left = asyncio.Event()  # a client closed its connection
        self.port = 0
        self.servers: tuple[asyncio.Server, ...] = ()
        self.tasks: list[asyncio.Task[None]] = []

    async def serve(self) -> None:
        first = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.port = first.sockets[0].getsockname()[1]
        self.servers = first, await asyncio.start_server(self._answer, "127.0.0.2", self.port)

    async def close(self) -> None:
        for one in self.servers:
            one.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def at(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.append(task)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                await self._tell(reader, writer)
            self.left.set()
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def _tell(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (begin := await reader.readexactly(1)) != b"G":
            writer.write(answer("400 Bad Request"))  # to a client that would speak TLS
            return
        first, *lines = (begin + await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines if line)
        path = first.split(" ")[1]
        self.asked.append((writer.get_extra_info("sockname")[0], path, headers))
        told = self.answers.get(path, answer("404 Not Found", b""))
        if isinstance(told, bytes):
            writer.write(told)
            await writer.drain()
        else:
            await told(writer)


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    one = Host()
    await one.serve()
    yield one
    await one.close()


@pytest.fixture
def public(monkeypatch: pytest.MonkeyPatch) -> None:
    """127.0.0.1 passes for a public address; 127.0.0.2 stays what it is."""
    really = addresses.is_open
    monkeypatch.setattr(
        addresses, "is_open", lambda text, *, listed: text == "127.0.0.1" or really(text, listed=listed)
    )


def remote(hosts: str | None = None, *, allowed: bool = True, timeout_s: float = 20.0) -> Remote:
    return Remote(
        Settings(model="m", allow_remote_images=allowed, remote_image_hosts=hosts, image_timeout=timeout_s)
    )


async def refused(one: Remote, url: str) -> str:
    with pytest.raises(ImageRefused) as error:
        async with asyncio.timeout(PATIENCE_S):
            await one.read(url)
    return str(error.value)


def resolving(monkeypatch: pytest.MonkeyPatch, names: dict[str, list[str]]) -> list[str]:
    """Let names mean addresses, each time another one of the list, and the last from then on. Returns what is asked."""
    asked: list[str] = []

    async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        found = names[host]
        texts = (found.pop(0) if len(found) > 1 else found[0]).split()
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in texts]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    return asked


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """No connection is made; tells whom there would have been one to."""
    tried: list[str] = []

    async def ask(self: Remote, url: httpx.URL, address: str, trust: object) -> bytes:
        tried.append(address)
        return b""

    monkeypatch.setattr(Remote, "_ask_at", ask)
    return tried


# --- addresses ---


async def test_nothing_is_fetched_unless_it_is_allowed(host: Host, public: None) -> None:
    reason = "images are not fetched from other hosts here (--allow-remote-images)"
    assert await refused(remote(allowed=False), host.at("/a.png")) == reason
    assert await refused(remote("127.0.0.1", allowed=False), host.at("/a.png")) == reason
    assert not host.asked


@pytest.mark.parametrize(
    "name",
    [
        "127.0.0.1",
        "127.0.0.1.",
        "127.1",
        "127.0.1",
        "2130706433",
        "0x7f000001",
        "0X7F.0.0.1",
        "0177.0.0.01",
        "017700000001",
        "１２７.０.０.１",
        "①②⑦.⓪.⓪.①",
        "localhost",
        "LocalHost.",
        "[::1]",
        "[0:0:0:0:0:0:0:1]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[64:ff9b::7f00:1]",
        "[2002:7f00:1::]",
        "0",
        "0.0.0.0",
        "[::]",
        "10.0.0.1",
        "0x0a000001",
        "192.168.257",
        "169.254.169.254",
        "2852039166",
        "0xa9fea9fe",
        "0251.0376.0251.0376",
        "[::ffff:a9fe:a9fe]",
        "[fe80::1%25lo]",
        "[fe80::1%lo]",
        "[fd00:ec2::254]",
        "224.0.0.1",
        "[ff02::1]",
        "255.255.255.255",
        "trusted.example@127.0.0.1",
        "127.0.0.1#@trusted.example",
        "127.0.0.1?@trusted.example",
        "127.0.0.1\\@trusted.example",
        "127.0.0.1%2f@trusted.example",
        "%31%32%37.0.0.1",
    ],
)
async def test_inner_addresses_in_all_spellings(offline: list[str], name: str) -> None:
    told = await refused(remote(), f"http://{name}/a.png")
    assert told in (NOT_PUBLIC, "its address is not valid", "its address has a user name in it")
    assert not offline


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http:", SCHEMES),
        ("http://", SCHEMES),
        ("http:///a.png", SCHEMES),
        ("http:a.png", SCHEMES),
        ("https://?a", SCHEMES),
        ("ftp://8.8.8.8/a.png", SCHEMES),
        ("gopher://8.8.8.8/a.png", SCHEMES),
        ("http+unix://8.8.8.8/a.png", SCHEMES),
        ("http://me@8.8.8.8/a.png", "its address has a user name in it"),
        ("http://me:word@8.8.8.8/a.png", "its address has a user name in it"),
        ("http://8.8.8.8:99999/a.png", "its address is not valid"),
        ("http://8.8.8.8:0/a.png", "its address is not valid"),
        ("http://8.8.8.8:-1/a.png", "its address is not valid"),
        ("http://8.8.8.8:a/a.png", "its address is not valid"),
        ("http://[::1/a.png", "its address is not valid"),
        ("http://8.8.8.8/a\r\nx: y", "its address is not valid"),
        ("http://8.8.8.8/\0", "its address is not valid"),
        ("http://\ud800/", "its address is not valid"),
        (f"http://8.8.8.8/{'a' * 70_000}", "its address is not valid"),
        (f"http://{'a' * 64}.example/", NOT_PUBLIC),
        ("http://a..example/", None),
        ("http://.example/", None),
        ("https://xn--/", None),
        ("http://*/", None),
    ],
    ids=lambda one: repr(one)[:40],
)
async def test_addresses_that_are_none(offline: list[str], url: str, reason: str | None) -> None:
    told = await refused(remote(), url)
    assert told == reason if reason else told in (NOT_PUBLIC, "its address is not valid")
    assert not offline


async def test_what_a_name_means_is_checked(
    host: Host, public: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolving(monkeypatch, {"inner.example": ["127.0.0.2"], "meta.example": ["169.254.169.254"]})
    assert await refused(remote(), host.at("/a.png", "inner.example")) == NOT_PUBLIC
    assert await refused(remote(), host.at("/a.png", "meta.example")) == NOT_PUBLIC
    assert await refused(remote("meta.example"), host.at("/a.png", "meta.example")) == NOT_PUBLIC
    assert not host.asked


async def test_a_name_that_means_an_inner_address_later(
    host: Host, public: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked for once, and the connection goes to what was checked."""
    asked = resolving(monkeypatch, {"rebound.example": ["127.0.0.1", "127.0.0.2"]})
    assert await remote().read(host.at("/a.png", "rebound.example")) == FILE
    assert asked == ["rebound.example"]
    ((address, path, headers),) = host.asked
    assert (address, path, headers["host"]) == ("127.0.0.1", "/a.png", f"rebound.example:{host.port}")


async def test_of_the_addresses_of_a_name_the_open_ones_are_tried(
    host: Host, public: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolving(monkeypatch, {"both.example": ["127.0.0.2 169.254.169.254 127.0.0.1"]})
    assert await remote().read(host.at("/a.png", "both.example")) == FILE
    assert [address for address, _, _ in host.asked] == ["127.0.0.1"]


async def test_a_name_that_there_is_not_looks_like_an_inner_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def getaddrinfo(*_: Any, **__: Any) -> list[Any]:
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    assert await refused(remote(), "http://nowhere.example/a.png") == NOT_PUBLIC


async def test_listed_hosts(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be in inner networks; all others are refused, public ones too."""
    resolving(monkeypatch, {"files.example": ["127.0.0.2"], "127.0.0.1": ["127.0.0.1"]})
    one = remote("Files.Example., 127.0.0.1")
    assert await one.read(host.at("/a.png", "FILES.example")) == FILE
    assert await one.read(host.at("/a.png", "files.example.")) == FILE
    assert await one.read(host.at("/a.png")) == FILE
    told = "its host is not among those that images are fetched from (--remote-image-hosts)"
    for name in ("127.0.0.2", "8.8.8.8", "evil.files.example", "files.example.evil.example", "2130706433"):
        assert await refused(one, host.at("/a.png", name)) == told
    assert [address for address, _, _ in host.asked] == ["127.0.0.2", "127.0.0.2", "127.0.0.1"]


async def test_an_empty_list_of_hosts_allows_none(host: Host, public: None) -> None:
    assert "not among those" in await refused(remote(""), host.at("/a.png"))


# --- redirects ---


@pytest.mark.parametrize("status", ["301 a", "302 a", "303 a", "307 a", "308 a"])
async def test_redirects_are_followed(host: Host, public: None, status: str) -> None:
    host.answers["/old/b.png"] = moved("../a.png", status)
    assert await remote().read(host.at("/old/b.png")) == FILE
    assert [path for _, path, _ in host.asked] == ["/old/b.png", "/a.png"]


@pytest.mark.parametrize(
    "name", ["127.0.0.2", "127.2", "0x7f000002", "169.254.169.254", "[::1]", "[::ffff:127.0.0.2]"]
)
async def test_a_redirect_to_an_inner_address(host: Host, public: None, name: str) -> None:
    host.answers["/b"] = moved(host.at("/a.png", name))
    assert await refused(remote(), host.at("/b")) == NOT_PUBLIC
    assert [path for _, path, _ in host.asked] == ["/b"]


async def test_a_redirect_to_a_name_that_means_an_inner_address(
    host: Host, public: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolving(monkeypatch, {"a.example": ["127.0.0.1", "127.0.0.2"]})
    host.answers["/b"] = moved("/a.png")
    assert await refused(remote(), host.at("/b", "a.example")) == NOT_PUBLIC
    assert [path for _, path, _ in host.asked] == ["/b"]


async def test_a_redirect_to_a_host_that_is_not_listed(host: Host) -> None:
    host.answers["/b"] = moved(host.at("/a.png", "127.0.0.2"))
    assert "not among those" in await refused(remote("127.0.0.1"), host.at("/b"))
    assert [address for address, _, _ in host.asked] == ["127.0.0.1"]


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("file:///etc/hostname", SCHEMES),
        ("ftp://127.0.0.1/a.png", SCHEMES),
        ("data:image/png;base64,AAAA", None),
        ("javascript:0", None),
        ("https://xn--/", None),
        ("http://8.8.8.8:0/", "its address is not valid"),
        ("http://me:word@127.0.0.1/a.png", "its address has a user name in it"),
        ("http://127.0.0.1:99999/", None),
        ("http://[::1/", None),
        ("\xff\xfe://", "its host answered with the status 404"),  # a path
    ],
)
async def test_redirects_to_what_is_not_fetched(
    host: Host, public: None, location: str, reason: str | None
) -> None:
    host.answers["/b"] = moved(location)
    told = await refused(remote(), host.at("/b"))
    assert told == reason if reason else told in ("its address is not valid", FAILED, SCHEMES, NOT_PUBLIC)
    assert {address for address, _, _ in host.asked} == {"127.0.0.1"}


@pytest.mark.parametrize("location", ["/b", "", "?", "#a"])
async def test_loops(host: Host, public: None, location: str) -> None:
    host.answers["/b"] = moved(location)
    assert await refused(remote(), host.at("/b")) == f"its host redirects more than {MOST_REDIRECTS} times"
    assert len(host.asked) == MOST_REDIRECTS + 1


async def test_as_many_redirects_as_there_may_be(host: Host, public: None) -> None:
    for index in range(MOST_REDIRECTS):
        host.answers[f"/{index}"] = moved(f"/{index + 1}")
    host.answers[f"/{MOST_REDIRECTS}"] = answer()
    assert await remote().read(host.at("/0")) == FILE


async def test_a_host_learns_nothing(host: Host, public: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No cookies of its own or of others, no credentials of a file or an address, no proxy of the environment."""
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.3:9")
    host.answers["/b"] = answer("302 Found", b"", location="/a.png", set_cookie="a=b; Path=/")
    assert await remote().read(host.at("/b#secret")) == FILE
    for _, _, headers in host.asked:
        assert set(headers) == {"host", "accept", "accept-encoding", "user-agent", "connection"}
        assert headers["accept-encoding"] == "identity"


# --- answers ---


@pytest.mark.parametrize("status", [201, 204, 206, 300, 304, 400, 401, 404, 500, 503])
async def test_other_statuses(host: Host, public: None, status: int) -> None:
    host.answers["/b"] = answer(f"{status} a", b"" if status in (204, 304) else FILE)
    assert await refused(remote(), host.at("/b")) == f"its host answered with the status {status}"


@pytest.mark.parametrize("coding", ["gzip", "br", "GZIP", "deflate, identity", "zstd"])
async def test_compressed_answers(host: Host, public: None, coding: str) -> None:
    host.answers["/b"] = answer(content_encoding=coding)
    assert await refused(remote(), host.at("/b")) == "its host sent it compressed"


async def test_a_body_in_chunks(host: Host, public: None) -> None:
    body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (FILE[:5], FILE[5:])) + b"0\r\n\r\n"
    host.answers["/b"] = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + body
    assert await remote().read(host.at("/b")) == FILE


async def test_a_body_that_says_it_is_long(host: Host, public: None) -> None:
    host.answers["/b"] = answer(content_length=str((32 << 20) + 1))
    assert await refused(remote(), host.at("/b")) == "its file has more than 32 MiB"


@pytest.mark.parametrize("head", [b"", b"transfer-encoding: chunked\r\n"])
async def test_a_body_without_end(
    host: Host, public: None, monkeypatch: pytest.MonkeyPatch, head: bytes
) -> None:
    monkeypatch.setattr(remote_image, "MOST_BYTES", 1 << 20)

    async def endless(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n")
        part = bytes(65_536)
        for _ in range(1024):  # so that little happens where nobody minds
            writer.write(b"%x\r\n%b\r\n" % (len(part), part) if head else part)
            await writer.drain()

    host.answers["/b"] = endless
    assert await refused(remote(), host.at("/b")) == "its file has more than 1 MiB"
    await asyncio.wait_for(host.left.wait(), PATIENCE_S)


async def test_headers_without_end(host: Host, public: None) -> None:
    async def endless(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")
        while True:
            writer.write(b"a: " + b"b" * 65_536 + b"\r\n")
            await writer.drain()

    host.answers["/b"] = endless
    assert await refused(remote(), host.at("/b")) == FAILED


@pytest.mark.parametrize("begin", [b"", b"HTTP/1.1 200 OK\r\n\r\n"], ids=["headers", "body"])
async def test_slow_answers(host: Host, public: None, begin: bytes) -> None:
    """All of it has its time; a byte now and then wins none."""

    async def slow(writer: asyncio.StreamWriter) -> None:
        writer.write(begin)
        while True:
            writer.write(b"H")
            await writer.drain()
            await asyncio.sleep(0.02)

    host.answers["/b"] = slow
    assert (
        await refused(remote(timeout_s=0.3), host.at("/b"))
        == "fetching it took longer than 0.3 s (--image-timeout)"
    )
    await asyncio.wait_for(host.left.wait(), PATIENCE_S)


async def test_slow_redirects_share_the_time(host: Host, public: None) -> None:
    async def slow(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.4)
        writer.write(moved("/b"))
        await writer.drain()

    host.answers["/b"] = slow
    assert "took longer than 0.5 s" in await refused(remote(timeout_s=0.5), host.at("/b"))


@pytest.mark.parametrize(
    "told",
    [
        b"",
        b"<html>",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\ncontent-length: " + b"9" * 5000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: a\r\nconnection: upgrade\r\n\r\n",
    ],
    ids=lambda one: repr(one)[2:40],
)
async def test_answers_that_are_not_http(host: Host, public: None, told: bytes) -> None:
    host.answers["/b"] = told
    reason = await refused(remote(), host.at("/b"))
    assert reason in (FAILED, "its host answered with the status 101", "its file has more than 32 MiB")
    assert await remote().read(host.at("/a.png")) == FILE


async def test_a_host_that_is_not_there(host: Host, public: None) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        assert await refused(remote(), f"http://127.0.0.1:{free.getsockname()[1]}/") == FAILED


async def test_https_of_a_host_without_it(host: Host, public: None) -> None:
    assert await refused(remote(), host.at("/a.png").replace("http:", "https:")) == FAILED
