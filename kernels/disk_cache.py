"""numba's cache of machine code on disk, so made that no state of it can prevent a start.

It lies in $NUMBA_CACHE_DIR; else below the user's cache, in a folder for each state of the sources, where all checkouts
and installations find it; else beside the source.

Every file has a digest: what is truncated or damaged is compiled again, where numba would fail to read it or run it. A
folder that cannot be written to is read from if it has entries; what cannot be kept is compiled in each process. Either
is logged once.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numba
from numba.core import caching

from slipstream.kernels import user_cache

log = logging.getLogger(__name__)

MOST_KEPT = 16  # states of sources in the user's cache: those used last
_DIGEST_BYTES = 32
_told: set[str] = set()


def digest(paths: Iterable[Path], *also: str) -> str:
    """Of sources that are compiled together, and of all else that their machine code depends on, as numba's version."""
    made = hashlib.sha256()
    for path in sorted(paths):
        made.update(path.read_bytes())
    made.update(" ".join((numba.__version__, *also)).encode())
    return made.hexdigest()


def cache_on_disk(function: Any, stamp: str | None = None) -> None:
    """Keep the machine code of a numba function.

    stamp: the `digest` it is valid for; by default the contents of the file it is in, beside which it is kept then.
    numba looks at that file alone, not at others with functions that it calls.
    """
    try:
        kept = _Cache(function.__wrapped__, stamp)
    except RuntimeError:
        user_cache.cannot_keep("kernels", "as there is no folder for them")
        return
    function._cache = kept


def _tell(message: str) -> None:
    """Log a warning once."""
    if message not in _told:
        _told.add(message)
        log.warning("%s", message)


class _Damaged(ValueError):
    """A file whose digest is wrong."""


class _Files(caching.IndexDataCacheFile):  # type: ignore[misc]
    """The files of one function, each with its digest at the end, where numba does not look."""

    @contextlib.contextmanager
    def _open_for_write(self, filepath: str) -> Iterator[io.BytesIO]:
        with super()._open_for_write(filepath) as file:
            content = io.BytesIO()
            yield content
            file.write(content.getvalue() + hashlib.sha256(content.getvalue()).digest())

    def _load_index(self) -> Any:
        _check(Path(self._index_path))
        return super()._load_index()

    def _load_data(self, name: str) -> Any:
        _check(Path(self._data_path(name)))
        return super()._load_data(name)


def _check(path: Path) -> None:
    """Raises `_Damaged` for a file that is there and not whole."""
    try:
        found = path.read_bytes()
    except FileNotFoundError:
        return
    if hashlib.sha256(found[:-_DIGEST_BYTES]).digest() != found[-_DIGEST_BYTES:]:
        raise _Damaged(path)


class _Locator(caching._CacheLocator):  # type: ignore[misc]
    """A folder that cannot be written to serves if it has entries."""

    def ensure_cache_path(self) -> None:
        try:
            super().ensure_cache_path()
        except OSError:
            if not any(Path(self.get_cache_path()).glob("*.nbi")):
                raise


class _Given(_Locator, caching.UserProvidedCacheLocator):  # type: ignore[misc]
    """$NUMBA_CACHE_DIR."""


class _Beside(_Locator, caching.InTreeCacheLocator):  # type: ignore[misc]
    """Beside the source."""


class _In(_Locator, caching.InTreeCacheLocator):  # type: ignore[misc]
    """A folder that is given."""

    def __init__(self, function: Any, file: str, folder: Path) -> None:
        super().__init__(function, file)
        self._cache_path = str(folder)


@dataclass(frozen=True, slots=True)
class _OfUser:
    """Makes locators below the user's cache, as numba's classes do, for the package's own functions."""

    stamp: str  # of their sources

    def from_function(self, function: Any, file: str) -> _In | None:
        states = user_cache.folder("kernels")
        if states is None or not function.__module__.startswith("slipstream."):
            return None
        made = _In(function, file, _state(states, self.stamp) / function.__module__)
        try:
            made.ensure_cache_path()
        except OSError:
            return None
        return made


@cache
def _state(states: Path, stamp: str) -> Path:
    """The folder for sources with that stamp, from now on the one used last; those of more than are kept go."""
    state = states / stamp[:16]
    with contextlib.suppress(OSError):
        state.mkdir(parents=True, exist_ok=True)
        os.utime(state)
        for old in sorted(states.iterdir(), key=lambda one: one.stat().st_mtime)[:-MOST_KEPT]:
            shutil.rmtree(old, ignore_errors=True)
    return state


class _Results(caching.CompileResultCacheImpl):  # type: ignore[misc]
    def __init__(self, function: Any, stamp: str | None) -> None:
        of_user = [] if stamp is None else [_OfUser(stamp)]
        self._locator_classes = [_Given, *of_user, _Beside, caching.UserWideCacheLocator]
        super().__init__(function)


class _Cache(caching.FunctionCache):  # type: ignore[misc]
    def __init__(self, function: Any, stamp: str | None) -> None:
        self._impl_class = partial(_Results, stamp=stamp)
        super().__init__(function)
        stamp = stamp or self._cache_file._source_stamp
        self._cache_file = _Files(self.cache_path, self._impl.filename_base, stamp)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # noqa: BLE001 - a pickle may raise anything
            _tell(f"a kept kernel in {self.cache_path} is damaged or another version's; compiled again")
            self._drop()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            user_cache.cannot_keep("kernels", f"in {self.cache_path} ({error.strerror})")

    def _drop(self) -> None:
        """An index that cannot be read could not be added to either."""
        try:
            self.flush()
        except OSError as error:
            user_cache.cannot_keep("kernels", f"in {self.cache_path} ({error.strerror})")
