"""Images by `file:` addresses: what is read below the folder, and that nothing beside it is, however it is named."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from slipstream.engine.errors import SettingError
from slipstream.server.images.image_part import ImageRefused
from slipstream.server.images.media_folder import check_folder, read_file
from slipstream.server.images.remote_image import MOST_BYTES

PATIENCE_S = 30.0
ABSENT = "there is no image file of this name below --media-path"
CAT, DOG, SECRET = b"a cat", b"a dog", b"a secret"


@pytest.fixture
def media(tmp_path: Path) -> Path:
    """The folder `media` with files; what is beside it is secret."""
    folder = tmp_path / "media"
    (folder / "pets" / "dogs").mkdir(parents=True)
    (folder / "cat.png").write_bytes(CAT)
    (folder / "pets" / "dogs" / "dog.png").write_bytes(DOG)
    (tmp_path / "media-secret").mkdir()
    for name in ("secret.png", "media-secret/secret.png"):
        (tmp_path / name).write_bytes(SECRET)
    return folder


def refused(address: str, folder: Path | str | None) -> str:
    with pytest.raises(ImageRefused) as error:
        read_file(address, None if folder is None else str(folder))
    return str(error.value)


def test_the_folder_must_be_there(media: Path) -> None:
    for one in (None, "", str(media)):
        check_folder(one)
    for absent in (media / "no", media / "cat.png"):
        with pytest.raises(SettingError, match=f"^--media-path {absent}: must be a folder that can be read$"):
            check_folder(str(absent))


@pytest.mark.parametrize(
    "address",
    [
        "file:cat.png",
        "file://cat.png",
        "FILE:cat.png",
        "file:./cat.png",
        "file://./cat.png",
        "file:cat%2Epng",
        "file:%63at.png",
        "file:cat.png?size=large",
        "file:cat.png#ears",
    ],
)
def test_relative_paths(media: Path, address: str) -> None:
    assert read_file(address, str(media)) == CAT


@pytest.mark.parametrize("begin", ["file://", "file:", "file://localhost"])
def test_absolute_paths(media: Path, begin: str) -> None:
    assert read_file(f"{begin}{media}/cat.png", str(media)) == CAT
    assert read_file(f"{begin}{media}/pets/dogs/dog.png", str(media)) == DOG


def test_deeper_folders_and_names_with_signs(media: Path) -> None:
    (media / "pets" / "café & 100%.png").write_bytes(CAT)
    assert read_file("file:pets/dogs/dog.png", str(media)) == DOG
    assert read_file("file://pets/dogs/dog.png", str(media)) == DOG
    assert read_file("file:pets%2Fdogs%2fdog.png", str(media)) == DOG
    assert read_file("file:pets/caf%C3%A9%20%26%20100%25.png", str(media)) == CAT
    assert read_file("file:pets/café & 100%25.png", str(media)) == CAT


def test_without_a_folder_nothing_is_read(media: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(media)
    told = "files are not read here (--media-path)"
    for folder in (None, ""):
        assert refused("file:cat.png", folder) == told
        assert refused(f"file://{media}/cat.png", folder) == told


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert refused("file:cat.png", tmp_path / "nowhere") == ABSENT


@pytest.mark.parametrize(
    "path",
    [
        "../secret.png",
        "./../secret.png",
        "pets/../../secret.png",
        "pets/../cat.png",  # to a file that is there, by a way that need not be walked
        "nowhere/../../secret.png",
        "%2e%2e/secret.png",
        "%2E%2E%2Fsecret.png",
        "..%2fsecret.png",
        "pets%2f..%2f..%2fsecret.png",
        "%252e%252e/secret.png",
        "..%c0%afsecret.png",
        "%c0%ae%c0%ae/secret.png",
        "..\\secret.png",
        "..%5csecret.png",
        ".\t./secret.png",
        "..//secret.png",
        "....//secret.png",
        "../media-secret/secret.png",
        "secret.png",
        "cat.png%00",
        "cat.png%00.jpg",
        "cat.png/",
        "cat.png/x",
        "cat.png/..",
        "%FF.png",
        "",
        ".",
        "/",
        "..",
        "pets",
        "pets/",
        "~/secret.png",
        "a" * 5000,
        "a/" * 5000,
        "\ud800",
    ],
)
def test_ways_out(media: Path, path: str) -> None:
    """All are told alike, so that nobody learns what there is."""
    is_slashed = path == "cat.png/"  # Python's paths leave a last slash out
    for begin in ("file:", "file://"):
        if is_slashed:
            assert read_file(begin + path, str(media)) == CAT
        else:
            assert refused(begin + path, media) == ABSENT


def test_absolute_paths_beside_the_folder(media: Path) -> None:
    beside = media.parent
    for path in (
        f"{beside}/secret.png",
        f"{media}/../secret.png",
        f"{media}/%2e%2e/secret.png",
        f"{media}-secret/secret.png",
        f"{media}secret.png",
        f"/{media}/cat.png",
        str(media),
        str(beside),
        "/",
        "/etc/passwd",
        "/proc/self/environ",
        "/dev/zero",
    ):
        for begin in ("file:", "file://", "file://localhost"):
            if begin == "file:" and path.startswith("//"):
                continue  # another host
            assert refused(begin + path, media) == ABSENT


@pytest.mark.parametrize(
    "address", ["file://[::1/cat.png", "file://other.example/cat.png", "file://127.0.0.1/cat.png"]
)
def test_other_hosts(media: Path, address: str) -> None:
    assert refused(address, media) == ABSENT


def test_links_out_of_the_folder(media: Path) -> None:
    beside = media.parent
    (media / "file.png").symlink_to(beside / "secret.png")
    (media / "relative.png").symlink_to("../secret.png")
    (media / "folder").symlink_to(beside)
    (media / "pets" / "up").symlink_to("../..")
    (media / "chain.png").symlink_to("relative.png")
    (media / "root").symlink_to("/")
    (media / "zero.png").symlink_to("/dev/zero")
    (media / "loop.png").symlink_to("loop.png")
    (media / "dangling.png").symlink_to("nowhere.png")
    os.link(beside / "secret.png", media / "hard.png")
    for path in (
        "file.png",
        "relative.png",
        "folder/secret.png",
        "folder/media-secret/secret.png",
        "pets/up/secret.png",
        "chain.png",
        f"root{beside}/secret.png",
        "zero.png",
        "loop.png",
        "dangling.png",
    ):
        assert refused(f"file:{path}", media) == ABSENT
        assert refused(f"file://{media}/{path}", media) == ABSENT
    assert read_file("file:hard.png", str(media)) == SECRET  # who can make one could copy the file too


def test_links_within_the_folder(media: Path) -> None:
    (media / "kitten.png").symlink_to("cat.png")
    (media / "dogs").symlink_to(media / "pets" / "dogs")
    (media / "pets" / "up").symlink_to("..")
    assert read_file("file:kitten.png", str(media)) == CAT
    assert read_file("file:dogs/dog.png", str(media)) == DOG
    assert read_file("file:pets/up/cat.png", str(media)) == CAT


def test_a_folder_that_is_a_link(media: Path) -> None:
    link = media.parent / "link"
    link.symlink_to(media)
    for path in ("cat.png", f"{link}/cat.png", f"{media}/cat.png"):
        assert read_file(f"file:{path}", str(link)) == CAT
    assert refused(f"file:{link}/../secret.png", link) == ABSENT


@pytest.mark.parametrize("swapped", ["pets/dogs/dog.png", "pets/dogs", "pets"])
def test_a_link_that_is_put_there_after_the_check(
    media: Path, monkeypatch: pytest.MonkeyPatch, swapped: str
) -> None:
    outside = media.parent / "outside"
    (outside / "pets" / "dogs").mkdir(parents=True)
    (outside / "pets" / "dogs" / "dog.png").write_bytes(SECRET)
    really = os.path.realpath

    def realpath(path: str) -> str:
        found = really(path)
        if found.endswith("dog.png"):
            (media / swapped).rename(media.parent / "taken")
            (media / swapped).symlink_to(outside / swapped)
        return found

    monkeypatch.setattr(os.path, "realpath", realpath)
    assert refused("file:pets/dogs/dog.png", media) == ABSENT
    assert (media / swapped).is_symlink()


def test_what_is_no_file(media: Path) -> None:
    fifo = media / "fifo.png"
    os.mkfifo(fifo)
    # Lets a reader go on that waits for a writer.
    patience = threading.Timer(PATIENCE_S, lambda: os.close(os.open(fifo, os.O_RDWR | os.O_NONBLOCK)))
    patience.start()
    assert refused("file:fifo.png", media) == ABSENT
    patience.cancel()
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(os.path.relpath(media / "socket.png"))
        assert refused("file:socket.png", media) == ABSENT
    for name in ("zero", "null", "random", "tty"):
        assert refused(f"file:{name}", "/dev") == ABSENT


def test_long_files(media: Path) -> None:
    for name, n_bytes in (("most.png", MOST_BYTES), ("more.png", MOST_BYTES + 1), ("huge.png", 1 << 40)):
        with open(media / name, "wb") as file:
            file.truncate(n_bytes)  # takes no room on the disk
    assert len(read_file("file:most.png", str(media))) == MOST_BYTES
    for name in ("more.png", "huge.png"):
        assert refused(f"file:{name}", media) == "its file has more than 32 MiB"


def test_no_descriptor_is_left_open(media: Path) -> None:
    os.mkfifo(media / "fifo.png")
    (media / "out.png").symlink_to("/etc/passwd")
    before = len(os.listdir("/proc/self/fd"))
    for path in (
        "fifo.png",
        "out.png",
        "pets",
        "pets/dogs",
        "pets/dogs/none.png",
        "cat.png/x",
        "../secret.png",
    ):
        refused(f"file:{path}", media)
        read_file("file:pets/dogs/dog.png", str(media))
    assert len(os.listdir("/proc/self/fd")) == before
