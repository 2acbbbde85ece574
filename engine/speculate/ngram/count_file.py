"""Files of counted n-grams, in llama.cpp's format, so that files of either program serve the other.

A file is a row of records in native byte order: 4 x int32 n-gram (oldest token first, -1 padded), int32 number of
followers, then (int32 token, int32 count) each. Nothing in a file is trusted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slipstream.engine.errors import LoadError
from slipstream.engine.speculate.text.loops import compiled

_LONGEST = 4
_HEADER = _LONGEST + 1  # words of a record before its followers
_MOST_COUNT = 2**30

Words = NDArray[np.int32]
# N-grams [n_grams, 4]; followers [n_followers, 3]: row of the n-gram, token, count.
Records = tuple[Words, Words]

_PROBLEMS = {
    1: "ends within a record",
    2: "an n-gram is not 1 to 4 tokens of the vocabulary",
    3: "an n-gram has no followers",
    4: "a follower is not in the vocabulary",
    5: f"a count is not between 1 and {_MOST_COUNT}",
}


def read(path: str | Path, vocab_size: int) -> Records:
    """The n-grams in a file and their followers.

    Raises `LoadError` where the file cannot be read, is cut short or malformed, or has tokens outside the vocabulary.
    """
    try:
        file = Path(path)
        if file.exists() and not (file.is_file() or file.is_dir()):  # a pipe, which has no end
            raise OSError(errno.EINVAL, "not a regular file")
        data = file.read_bytes()
    except OSError as error:
        raise LoadError(f"{path}: counted n-grams cannot be read: {error.strerror}") from error
    words: Words = np.frombuffer(data, np.int32, len(data) // 4)
    # As many as there is room for: a record has one follower at least.
    grams = np.empty((len(words) // (_HEADER + 2), _LONGEST), np.int32)
    followers = np.empty((len(words) // 2, 3), np.int32)
    at, problem, n_grams, n_followers = _parse(words, vocab_size, grams, followers)
    if problem or len(data) % 4:
        reason = _PROBLEMS[problem or 1]
        raise LoadError(f"{path}: not a file of counted n-grams: {reason} (record at byte {4 * at})")
    return grams[:n_grams], followers[:n_followers]


def write(path: str | Path, records: Records) -> None:
    """Write a file, all of it or nothing: a reader finds the old file or the new file. Raises `OSError`.

    Only its owner may read what people wrote.
    """
    # A name of its own: a process in another container may have the same id.
    handle, name = tempfile.mkstemp(prefix=f"{Path(path).name}.", suffix=".part", dir=Path(path).parent)
    part = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # see `remove_parts`
            file.write(_words(records).tobytes())
            file.flush()
            os.fsync(file.fileno())
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def remove_parts(path: Path) -> None:
    """Remove what interrupted writes have left; what another server is writing is locked."""
    for part in path.parent.glob(f"{glob.escape(path.name)}.*.part"):
        with contextlib.suppress(OSError), part.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            part.unlink()


def _words(records: Records) -> Words:
    """[n_words] int32."""
    grams, followers = records
    followers = followers[np.argsort(followers[:, 0], kind="stable")]
    n_followers = np.bincount(followers[:, 0], minlength=len(grams))  # [n_grams]
    starts = np.cumsum(_HEADER + 2 * n_followers) - (_HEADER + 2 * n_followers)  # of records
    words = np.empty(grams.shape[0] * _HEADER + 2 * len(followers), np.int32)
    for column in range(_LONGEST):
        words[starts + column] = grams[:, column]
    words[starts + _LONGEST] = n_followers
    first = np.cumsum(n_followers) - n_followers  # of each n-gram's followers
    rows = followers[:, 0]
    places = starts[rows] + _HEADER + 2 * (np.arange(len(followers)) - first[rows])
    words[places], words[places + 1] = followers[:, 1], followers[:, 2]
    return words


@compiled
def _n_tokens(words: Words, at: np.int64, vocab_size: int) -> int:
    """Tokens of the n-gram at an index, 0 where it is malformed."""
    n_tokens = 0
    while n_tokens < _LONGEST and 0 <= words[at + n_tokens] < vocab_size:
        n_tokens += 1
    for i in range(n_tokens, _LONGEST):
        if words[at + i] != -1:
            return 0
    return n_tokens


@compiled
def _check_record(words: Words, at: np.int64, vocab_size: int) -> int:
    """What is wrong with the record at an index; 0: nothing."""
    if len(words) - at < _HEADER:
        return 1
    if _n_tokens(words, at, vocab_size) == 0:
        return 2
    n_followers = np.int64(words[at + _LONGEST])
    if n_followers < 1:
        return 3
    if (len(words) - at - _HEADER) // 2 < n_followers:
        return 1
    for i in range(at + _HEADER, at + _HEADER + 2 * n_followers, 2):
        if not 0 <= words[i] < vocab_size:
            return 4
        if not 1 <= words[i + 1] <= _MOST_COUNT:
            return 5
    return 0


@compiled
def _parse(words: Words, vocab_size: int, grams: Words, followers: Words) -> tuple[np.int64, int, int, int]:
    """Copy records up to the first bad record: (its index, problem), else (end, 0); then n-grams and followers."""
    at, n_grams, n_followers = np.int64(0), 0, 0
    while at < len(words):
        problem = _check_record(words, at, vocab_size)
        if problem:
            return at, problem, n_grams, n_followers
        grams[n_grams] = words[at : at + _LONGEST]
        end = at + _HEADER + 2 * np.int64(words[at + _LONGEST])
        for i in range(at + _HEADER, end, 2):
            followers[n_followers, 0] = n_grams
            followers[n_followers, 1] = words[i]
            followers[n_followers, 2] = words[i + 1]
            n_followers += 1
        n_grams += 1
        at = end
    return at, 0, n_grams, n_followers
