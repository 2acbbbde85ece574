"""Where images may come from: addresses of the network, files, and how much of either is read."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.engine.errors import Overloaded
from slipstream.engine.settings import Settings
from slipstream.server.http.error_table import Refused
from slipstream.server.images import looking, media_folder, remote_image
from slipstream.server.images.addresses import is_open
from slipstream.server.images.image_part import ImagePart, ImageRefused
from slipstream.server.images.looking import Looking
from slipstream.server.images.media_folder import read_file
from slipstream.server.images.remote_image import Remote
from tests.http.fake import INFO, SEEING
from tests.image_files import data_url, saved, two

PUBLIC = ("8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "2a00:1450:4001:830::200e")
INNER = (
    *("127.0.0.1", "127.9.9.9", "10.0.0.1", "172.16.0.1", "192.168.1.1", "100.64.0.1", "198.18.0.1"),
    *("::1", "fd00::1", "fec0::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::a00:1", "2002:a00:1::"),
    *("192.0.2.1", "240.0.0.1", "2001:db8::1", "64:ff9b:1::808:808"),
)
NEVER = (
    *("169.254.169.254", "169.254.0.1", "fe80::1", "fe80::1%eth0", "::ffff:169.254.169.254"),
    *("64:ff9b::a9fe:a9fe", "2002:a9fe:a9fe::", "0.0.0.0", "::", "224.0.0.1", "ff02::1", "::ffff:0.0.0.0"),
    *("168.63.129.16", "100.100.100.200", "fd00:ec2::254", "192.0.0.192", "no address", ""),
)


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses(address: str) -> None:
    assert is_open(address, listed=False)
    assert is_open(address, listed=True)


@pytest.mark.parametrize("address", INNER)
def test_inner_addresses_are_for_listed_hosts(address: str) -> None:
    assert not is_open(address, listed=False)
    assert is_open(address, listed=True)


@pytest.mark.parametrize("address", NEVER)
def test_what_is_never_asked(address: str) -> None:
    assert not is_open(address, listed=False)
    assert not is_open(address, listed=True)


Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Host:
    """A web server that answers each path as it is told to, and counts the connections."""

    def __init__(self) -> None:
        self.answers: dict[str, bytes | Answer] = {}
        self.asked: list[str] = []
        self.heads: list[str] = []
        self.n_connections = 0
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.n_connections += 1
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await self._answer(reader, writer)
        finally:
            writer.transport.abort() if writer.transport.get_write_buffer_size() else writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        path = head.split(" ")[1]
        self.asked.append(path)
        answer = self.answers[path.partition("?")[0]]
        if callable(answer):
            await answer(reader, writer)
        else:
            writer.write(answer)
        await writer.drain()
        while writer.transport.get_write_buffer_size():
            await asyncio.sleep(0.001)


@pytest.fixture
def host() -> Iterator[Host]:
    """A host on a thread of its own."""
    one, started = Host(), threading.Event()
    stop: list[Callable[[], object]] = []

    async def run() -> None:
        server = await asyncio.start_server(one.serve, "127.0.0.1", 0)
        one.port = server.sockets[0].getsockname()[1]
        asked, loop = asyncio.Event(), asyncio.get_running_loop()
        stop.append(lambda: loop.call_soon_threadsafe(asked.set))
        started.set()
        async with server:
            await asked.wait()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            await asyncio.sleep(0.01)  # for the transports to close

    thread = threading.Thread(target=asyncio.run, args=[run()])
    thread.start()
    assert started.wait(60)
    yield one
    stop[0]()
    thread.join(60)
    assert not thread.is_alive()


def whole(body: bytes, *more: str, status: str = "200 OK") -> bytes:
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", "connection: close", *more]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def to(address: str) -> bytes:
    return whole(b"", f"location: {address}", status="302 Found")


def allowed(**changes: Any) -> Remote:
    """Fetching, with the host of these tests listed unless told otherwise."""
    given = {"remote_image_hosts": "pictures.example, 127.0.0.1", "image_timeout": 60.0, **changes}
    return Remote(Settings(model="m", allow_remote_images=True, **given))


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """What names resolve to, on every event loop: others as they do."""
    known: dict[str, list[str]] = {"pictures.example": ["127.0.0.1"]}
    really = asyncio.BaseEventLoop.getaddrinfo

    async def resolve(loop: Any, host: str, port: Any, **more: Any) -> Any:
        if host not in known:
            return await really(loop, host, port, **more)
        if not known[host]:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in known[host]]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", resolve)
    return known


async def test_nothing_is_fetched_unless_it_is_allowed(host: Host) -> None:
    with pytest.raises(ImageRefused, match="--allow-remote-images"):
        await Remote(Settings(model="m")).read(f"http://127.0.0.1:{host.port}/a.png")
    assert not host.n_connections


@pytest.mark.usefixtures("names")
async def test_a_listed_host_is_asked_under_its_name(host: Host) -> None:
    host.answers["/a.png"] = whole(b"file")
    address = f"http://Pictures.Example.:{host.port}/a.png?size=2#top"
    assert await allowed().read(address.replace(".:", ":")) == b"file"
    assert host.asked == ["/a.png?size=2"]
    assert f"\r\nhost: pictures.example:{host.port}\r\n" in host.heads[0].lower()
    assert "accept-encoding: identity" in host.heads[0].lower()


INWARD = (
    "http://127.0.0.1:{port}/a.png",
    "http://localhost:{port}/a.png",
    "http://2130706433:{port}/a.png",
    "http://0x7f000001:{port}/a.png",
    "http://0x7f.1:{port}/a.png",
    "http://017700000001:{port}/a.png",
    "http://127.1:{port}/a.png",
    "http://0:{port}/a.png",
    "http://0.0.0.0:{port}/a.png",
    "http://[::1]:{port}/a.png",
    "http://[::ffff:127.0.0.1]:{port}/a.png",
    "http://[::ffff:7f00:1]:{port}/a.png",
    "http://[::]:{port}/a.png",
    "http://public.example@127.0.0.1:{port}/a.png",
    "http://public.example:80@127.0.0.1:{port}/a.png",
    "http://127.0.0.1:{port}#@public.example/a.png",
    "http://127.0.0.1:{port}\\@public.example/a.png",
    "http://public.example\\@127.0.0.1:{port}/a.png",
    "http://①②⑦.⓪.⓪.①:{port}/a.png",
    "http://inner.example:{port}/a.png",
    "http://169.254.169.254/latest/meta-data/",
    "http://[fe80::1]/a.png",
    "http://nowhere.example/a.png",
    "http:///a.png",
    "http://",
    "ftp://public.example/a.png",
    "gopher://127.0.0.1:{port}/a.png",
)


@pytest.mark.parametrize("address", INWARD)
async def test_nothing_leads_inward(host: Host, names: dict[str, list[str]], address: str) -> None:
    """No connection is made, and the refusal says nothing of what is there."""
    names |= {"inner.example": ["127.0.0.1"], "nowhere.example": []}
    host.answers["/a.png"] = whole(b"file")
    with pytest.raises(ImageRefused) as refused:
        await allowed(remote_image_hosts=None).read(address.format(port=host.port))
    assert not host.n_connections
    assert "127.0.0.1" not in str(refused.value)


async def test_inner_names_and_none_are_told_alike(names: dict[str, list[str]]) -> None:
    names |= {"inner.example": ["10.0.0.1"], "nowhere.example": []}
    told = []
    for name in ("inner.example", "nowhere.example"):
        with pytest.raises(ImageRefused) as refused:
            await allowed(remote_image_hosts=None).read(f"http://{name}/a.png")
        told.append(str(refused.value))
    assert told[0] == told[1]


async def test_the_connection_goes_to_the_address_that_was_checked(
    host: Host, names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that is public when it is checked, and loopback when it would be asked for again (DNS rebinding)."""
    asked: list[str] = []

    async def rebinding(loop: Any, name: str | bytes, port: Any, **more: Any) -> Any:
        asked.append(name if isinstance(name, str) else name.decode())
        address = "192.0.2.1" if asked.count("rebinding.example") == 1 else "127.0.0.1"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    async def connect(self: Any, url: Any, address: str, trust: Any) -> bytes:
        connected.append(address)
        return await really(self, url, address, trust)

    connected: list[str] = []
    really = Remote._ask_at
    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", rebinding)
    monkeypatch.setattr(Remote, "_ask_at", connect)
    host.answers["/a.png"] = whole(b"file")
    with pytest.raises(ImageRefused):
        await allowed(remote_image_hosts="rebinding.example", image_timeout=0.5).read(
            f"http://rebinding.example:{host.port}/a.png"
        )
    assert (connected, host.n_connections) == (["192.0.2.1"], 0)
    assert asked.count("rebinding.example") == 1


@pytest.mark.usefixtures("names")
async def test_redirects_are_followed_by_hand(host: Host) -> None:
    host.answers = {
        "/1": to("/2"),
        "/2": to("3?x=1"),
        "/3": to(f"http://127.0.0.1:{host.port}/4"),
        "/4": whole(b"file"),
    }
    assert await allowed().read(f"http://pictures.example:{host.port}/1") == b"file"
    assert host.asked == ["/1", "/2", "/3?x=1", "/4"]
    host.answers["/4"] = to("/1")
    host.asked.clear()
    with pytest.raises(ImageRefused, match="redirects more than 3 times"):
        await allowed().read(f"http://pictures.example:{host.port}/1")
    assert len(host.asked) == 4


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("http://169.254.169.254/latest/", "hosts that|--remote-image-hosts|public address"),
        ("http://localhost:{port}/secret", "--remote-image-hosts"),
        ("//[::1]:{port}/secret", "--remote-image-hosts"),
        ("http://a:b@pictures.example:{port}/secret", "user name"),
        ("file:///etc/passwd", "only http and https"),
        ("data:image/png;base64,AAAA", "only http and https|connection failed"),
        ("ftp://pictures.example/secret", "only http and https"),
        ("http://[bad", "not valid|--remote-image-hosts"),
    ],
)
@pytest.mark.usefixtures("names")
async def test_redirects_lead_nowhere_else(host: Host, target: str, reason: str) -> None:
    host.answers = {"/1": to(target.format(port=host.port)), "/secret": whole(b"secret")}
    with pytest.raises(ImageRefused, match=reason):
        await allowed(remote_image_hosts="pictures.example").read(f"http://pictures.example:{host.port}/1")
    assert host.asked == ["/1"]


async def test_a_redirect_of_a_public_host_to_an_inner_one(
    host: Host, names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a list: the first address counts as public, the second is loopback."""
    names["public.example"] = ["127.0.0.1"]
    really = remote_image.those_open
    n_checked = 0

    def once(addresses: Any, *, listed: bool) -> Any:
        nonlocal n_checked
        n_checked += 1
        return ["127.0.0.1"] if n_checked == 1 else really(addresses, listed=listed)

    monkeypatch.setattr(remote_image, "those_open", once)
    host.answers = {"/1": to("/secret"), "/secret": whole(b"secret")}
    with pytest.raises(ImageRefused, match="no public address"):
        await allowed(remote_image_hosts=None).read(f"http://public.example:{host.port}/1")
    assert (host.asked, n_checked) == (["/1"], 2)


async def endless(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n")
    while True:
        writer.write(bytes(1 << 16))
        await writer.drain()


async def dripping(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Never silent for long, so that no limit on silence ends it."""
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
    for _ in range(1000):
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.02)


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def dripping_head(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"x: y\r\n")
        await writer.drain()
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("answer", [dripping, silent, dripping_head])
@pytest.mark.usefixtures("names")
async def test_hosts_that_take_their_time(host: Host, answer: Answer) -> None:
    host.answers["/a"] = answer
    with pytest.raises(ImageRefused, match=r"took longer than 0.3 s \(--image-timeout\)"):
        await allowed(image_timeout=0.3).read(f"http://pictures.example:{host.port}/a")


@pytest.mark.usefixtures("names")
async def test_endless_bytes_and_long_ones(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_image, "MOST_BYTES", 1 << 20)
    host.answers = {"/endless": endless, "/long": whole(bytes((1 << 20) + 1)), "/most": whole(bytes(1 << 20))}
    host.answers["/lies"] = whole(b"x").replace(b"length: 1\r", b"length: 9999999999\r")
    for path in ("endless", "long", "lies"):
        with pytest.raises(ImageRefused, match="more than 1 MiB"):
            await allowed().read(f"http://pictures.example:{host.port}/{path}")
    assert len(await allowed().read(f"http://pictures.example:{host.port}/most")) == 1 << 20


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (whole(b"no", status="404 Not Found"), "answered with the status 404"),
        (whole(b"x", "content-encoding: gzip"), "compressed"),
        (whole(b"", status="302 Found"), "redirects more than 3"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "connection failed"),
        (b"", "connection failed"),
        (whole(b"x" * 10)[:-5], "connection failed"),
    ],
)
@pytest.mark.usefixtures("names")
async def test_hosts_that_answer_otherwise(host: Host, answer: bytes, reason: str) -> None:
    host.answers["/a"] = answer
    with pytest.raises(ImageRefused, match=reason) as refused:
        await allowed().read(f"http://pictures.example:{host.port}/a")
    assert "SSH" not in str(refused.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of pictures beside a secret."""
    (tmp_path / "secret.png").write_bytes(b"secret")
    inside = tmp_path / "pictures"
    (inside / "deep er").mkdir(parents=True)
    (inside / "a.png").write_bytes(b"a")
    (inside / "deep er" / "b.png").write_bytes(b"b")
    (inside / "within.png").symlink_to("a.png")
    (inside / "out.png").symlink_to("../secret.png")
    (inside / "up").symlink_to("..")
    (inside / "loop.png").symlink_to("loop.png")
    os.mkfifo(inside / "pipe.png")
    (tmp_path / "pictures-of-others").mkdir()
    (tmp_path / "pictures-of-others" / "c.png").write_bytes(b"secret")
    return inside


def test_files_below_the_folder(folder: Path) -> None:
    assert read_file("file://a.png", str(folder)) == b"a"
    assert read_file("file:a.png", str(folder)) == b"a"
    assert read_file("file://deep%20er/b.png", str(folder)) == b"b"
    assert read_file(f"file://{folder}/a.png", str(folder)) == b"a"
    assert read_file(f"file://localhost{folder}/a.png", f"{folder}/") == b"a"
    assert read_file("file://within.png", str(folder)) == b"a"


OUTWARD = (
    *(
        "file://../secret.png",
        "file://..%2fsecret.png",
        "file://%2e%2e/secret.png",
        "file://deep%20er/../../secret.png",
    ),
    *(
        "file://{parent}/secret.png",
        "file://{folder}/../secret.png",
        "file:///etc/passwd",
        "file:////etc/passwd",
    ),
    *(
        "file://{parent}/pictures-of-others/c.png",
        "file://out.png",
        "file://up/secret.png",
        "file://loop.png",
    ),
    *(
        "file://pipe.png",
        "file://deep%20er",
        "file://",
        "file:///",
        "file://.",
        "file://{folder}",
        "file://no.png",
    ),
    *("file://a.png%00.txt", "file://%ff.png", "file:///dev/zero", "file://a.png/b", "file://[x/a.png"),
)


@pytest.mark.parametrize("address", OUTWARD)
def test_nothing_leads_out_of_the_folder(folder: Path, address: str) -> None:
    """Whatever is wrong, the refusal is the same."""
    with pytest.raises(ImageRefused, match="there is no image file of this name below --media-path"):
        read_file(address.format(parent=folder.parent, folder=folder), str(folder))


def test_a_link_put_there_after_the_check(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really = media_folder._read

    def later(root: str, steps: tuple[str, ...]) -> bytes:
        (folder / "a.png").unlink()
        (folder / "a.png").symlink_to("../secret.png")
        return really(root, steps)

    monkeypatch.setattr(media_folder, "_read", later)
    with pytest.raises(ImageRefused, match="no image file"):
        read_file("file://a.png", str(folder))


def test_without_a_folder_and_long_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ImageRefused, match="--media-path"):
        read_file("file://a.png", None)
    monkeypatch.setattr(media_folder, "MOST_BYTES", 100)
    (folder / "long.png").write_bytes(bytes(101))
    with pytest.raises(ImageRefused, match="more than"):
        read_file("file://long.png", str(folder))


def shown(*urls: str) -> list[tuple[str, ImagePart]]:
    return [(f"part[{index}]", ImagePart(url)) for index, url in enumerate(urls)]


async def test_an_image_shown_twice_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = data_url(saved(two())), data_url(saved(two(width=6)))
    known = Looking(Settings(model="m"))
    read: list[str] = []
    really = Looking._read

    async def counted(self: Looking, url: str) -> Any:
        read.append(url)
        return await really(self, url)

    monkeypatch.setattr(Looking, "_read", counted)
    images = await known.at(shown(one, other, one), SEEING)
    assert [(url, image.width) for url, image in images.items()] == [(one, 4), (other, 6)]
    assert sorted(read) == sorted([one, other])


async def test_what_all_of_a_requests_images_may_have() -> None:
    """Four times the pixels of one: four of 600 × 1000 fit within four million, seven do not."""
    known = Looking(Settings(model="m", image_pixels=1))
    urls = [data_url(saved(two(width=600, height=1000, left=(one, 0, 0)))) for one in range(7)]
    assert len(await known.at(shown(*urls[:4]), SEEING)) == 4
    with pytest.raises(Refused, match=r"more than 4 million pixels together \(4 times --image-pixels\)"):
        await known.at(shown(*urls), SEEING)


async def test_what_all_requests_hold_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as somebody has them: images that nobody has are forgotten."""
    known = Looking(Settings(model="m"))
    monkeypatch.setattr(known, "_most_held", 3 * 600 * 1000)
    url, other = (data_url(saved(two(width=600, height=one))) for one in (1000, 1))
    held = await known.at(shown(url), SEEING)
    with pytest.raises(Overloaded, match="as many images"):
        await known.at(shown(other), SEEING)
    del held
    assert len(await known.at(shown(other), SEEING)) == 1


async def test_one_that_is_refused_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    async def read(self: Looking, url: str) -> Any:
        if url == "bad":
            raise ImageRefused("it is bad")
        try:
            await asyncio.sleep(600)
        finally:
            ended.append(url)

    monkeypatch.setattr(Looking, "_read", read)
    with pytest.raises(Refused, match="it is bad"):
        await Looking(Settings(model="m")).at(shown("slow", "bad"), SEEING)
    await asyncio.sleep(0)
    assert ended == ["slow"]


async def test_few_files_are_read_at_once(host: Host, names: dict[str, list[str]]) -> None:
    """Of all requests together; images that are data wait for none of them."""
    go = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def held(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(go.wait(), loop))
        writer.write(whole(saved(two())))

    host.answers["/a"] = held
    settings = Settings(
        model="m", allow_remote_images=True, remote_image_hosts="pictures.example", image_timeout=60
    )
    known = Looking(settings)
    url = f"http://pictures.example:{host.port}/a?"
    work = [asyncio.create_task(known.at(shown(f"{url}{i}"), SEEING)) for i in range(looking.MOST_READ + 3)]
    while len(host.asked) < looking.MOST_READ:
        await asyncio.sleep(0.01)
    assert await known.at(shown(data_url(saved(two()))), SEEING)
    assert len(host.asked) == looking.MOST_READ
    go.set()
    assert all(await asyncio.gather(*work))


async def test_models_that_see_nothing_fetch_nothing(host: Host) -> None:
    known = Looking(Settings(model="m", allow_remote_images=True, remote_image_hosts="127.0.0.1"))
    with pytest.raises(Refused, match=r"part\[0\]: the model fake/model sees no images"):
        await known.at(shown(f"http://127.0.0.1:{host.port}/a"), INFO)
    assert not host.n_connections
