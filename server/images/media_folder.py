"""Images in files below the folder that `--media-path` names; no path and no link leads out of it."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

from slipstream.engine.errors import SettingError
from slipstream.server.images.image_part import ImageRefused
from slipstream.server.images.remote_image import MOST_BYTES

_ABSENT = "there is no image file of this name below --media-path"  # whatever the reason: nobody learns what there is
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC  # nobody waits for a pipe's writer


def check_folder(folder: str | None) -> None:
    """Raises `SettingError` for a folder that is not there or cannot be read; None and an empty name are none."""
    if folder and not (os.path.isdir(folder) and os.access(folder, os.R_OK | os.X_OK)):
        raise SettingError("media_path", folder, "must be a folder that can be read")


def read_file(address: str, folder: str | None) -> bytes:
    """The bytes of the file that a `file:` address means, in `folder`. Raises `ImageRefused`.

    The path is relative to the folder, as in `file://cat.png` (llama-server's form), or absolute (vLLM's).
    """
    if not folder:  # an empty name would be the folder that the server was started in
        raise ImageRefused("files are not read here (--media-path)")
    try:
        root = os.path.realpath(folder)
        steps = _steps(_path_of(address), folder, root)
        return _read(root, steps)
    except (OSError, ValueError):
        raise ImageRefused(_ABSENT) from None


def _path_of(address: str) -> str:
    """Raises ValueError."""
    parts = urlsplit(address)
    host = "" if parts.netloc == "localhost" else parts.netloc
    return unquote(host + parts.path, errors="strict")


def _steps(path: str, folder: str, root: str) -> tuple[str, ...]:
    """The names that lead from the folder to what the path means, links followed. Raises ValueError outside of it."""
    if os.path.isabs(path):
        inside = (one for one in (os.path.abspath(folder), root) if Path(path).is_relative_to(one))
        path = str(Path(path).relative_to(next(inside, folder)))
    if ".." in Path(path).parts:
        raise ValueError("a step out of a folder")
    return Path(os.path.realpath(os.path.join(root, path))).relative_to(root).parts


def _read(root: str, steps: tuple[str, ...]) -> bytes:
    """The file at the end of the steps, each of which is taken without following links, so that none can be put there
    between the check and now. Raises OSError, ValueError, and `ImageRefused` for a file that is too long.
    """
    *folders, name = steps
    place = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for step in folders:
            inner = os.open(step, _FOLDER, dir_fd=place)
            os.close(place)
            place = inner
        file = os.open(name, _FILE, dir_fd=place)
    finally:
        os.close(place)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise ValueError("not a regular file")
        with open(file, "rb", closefd=False) as opened:  # of a folder, it would raise and leave it open
            data = opened.read(MOST_BYTES + 1)
    finally:
        os.close(file)
    if len(data) > MOST_BYTES:
        raise ImageRefused(f"its file has more than {MOST_BYTES >> 20} MiB")
    return data
