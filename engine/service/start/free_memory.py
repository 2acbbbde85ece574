"""Host memory that a process may still take: what the system has available, within the limits of its control groups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

# Per version of control groups, the files with the limit, with what is used, and in `memory.stat` the key of pages of
# files, which the system takes back when there is need.
_FILES = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def free_memory(root: Path = Path("/")) -> int:
    """Bytes. root: where the system's files are, for tests."""
    return min([_available(root), *_within_groups(root)])


def _available(root: Path) -> int:
    """`MemAvailable`: unlike `MemFree` it counts the page cache, which fills all memory in time."""
    known = _numbers(root / "proc/meminfo")
    if "MemAvailable:" in known:
        return known["MemAvailable:"] * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _within_groups(root: Path) -> Iterator[int]:
    """What each control group leaves: the process's own and all above. In a container its own is often the root."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        version, base = (1, root / "sys/fs/cgroup/memory") if kinds else (2, root / "sys/fs/cgroup")
        folder = base / path.lstrip("/")
        for one in (folder, *folder.parents):
            yield from _left(one, *_FILES[version])
            if one == base:
                break


def _left(folder: Path, most: str, used: str, given_back: str) -> Iterator[int]:
    """The limit less what is used, if there is a limit."""
    try:
        limit, n_used = int((folder / most).read_text()), int((folder / used).read_text())
    except (OSError, ValueError):  # no such group here, or "max"
        return
    yield max(0, limit - n_used + _numbers(folder / "memory.stat").get(given_back, 0))


def _numbers(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    try:
        words = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {one[0]: int(one[1]) for one in words if len(one) > 1 and one[1].isdecimal()}
