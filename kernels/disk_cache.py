"""numba's cache of machine code on disk, so made that no state of it can prevent a start.

Every file has a digest: what is truncated or damaged is compiled again, where numba would fail to read it or run it. A
folder that cannot be written to is read from if it has entries; what cannot be kept is compiled in each process. Either
is logged once.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from numba.core import caching

log = logging.getLogger(__name__)

_DIGEST_BYTES = 32
_told: set[str] = set()


def cache_on_disk(function: Any, stamp: str | None = None) -> None:
    """Keep the machine code of a numba function. stamp: what it is valid for; by default the file it is in."""
    try:
        cache = _Cache(function.__wrapped__)
    except RuntimeError:
        _tell("there is no folder that kernels could be kept in; they are compiled in each process")
        return
    if stamp is not None:
        cache._cache_file._source_stamp = stamp
    function._cache = cache


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


class _Results(caching.CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = [_Given, _Beside, caching.UserWideCacheLocator]  # noqa: RUF012 - numba's name and type


class _Cache(caching.FunctionCache):  # type: ignore[misc]
    _impl_class = _Results

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        plain = self._cache_file
        self._cache_file = _Files(self.cache_path, self._impl.filename_base, plain._source_stamp)

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
            _tell(f"kernels cannot be kept in {self.cache_path} ({error.strerror}); compiled in each process")

    def _drop(self) -> None:
        """An index that cannot be read could not be added to either."""
        try:
            self.flush()
        except OSError as error:
            _tell(f"kernels cannot be kept in {self.cache_path} ({error.strerror}); compiled in each process")
