"""Responses that are kept, so that a later request can read them, delete them or go on from them.

They lie in SQLite, in memory or in a file (`--responses-store`). Each API key has its own, and so many of them
(`--responses-kept`) of so many bytes; those not used for longest make room. All work is done by one thread, in the
order in which it was asked for: a response is there for the request that follows it.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson

from slipstream.engine.errors import SettingError
from slipstream.server.http.error_table import unavailable
from slipstream.server.report.logs import logger

log = logger(__name__)
T = TypeVar("T")

IN_MEMORY = "memory"
MOST_BYTES = 64 << 20  # of an API key's responses
# Bytes of a conversation without its images: reading them holds the interpreter, for some milliseconds per MiB.
MOST_CHAINED = 8 << 20
LOCKED_MS = 1000  # that another process's lock on the file is waited for
TABLE = """
create table if not exists responses (
    tenant text, id text, previous text, size integer, used integer, input blob, body blob, primary key (tenant, id)
)
"""
COLUMNS = "tenant, id, previous, size, used, input, body"
# The ids and sizes of a response and those before it.
CHAIN = """
with recursive chain(id, previous, size, n) as (
    select id, previous, size, 1 from responses where tenant = ?1 and id = ?2
    union all
    select one.id, one.previous, one.size, n + 1 from responses one join chain on one.id = chain.previous
    where one.tenant = ?1 and n < ?3
) select id, size from chain
"""


@dataclass(frozen=True, slots=True)
class Kept:
    """A response, the id of that before it, and the items that its request had as input."""

    previous: str | None
    input: Sequence[dict[str, Any]]
    body: dict[str, Any]


class KeptResponses:
    """The store. Responses of other tenants are treated as absent. What reads it raises `Refused` where it fails."""

    def __init__(self, place: str, most: int) -> None:
        """`place`: a file, or `IN_MEMORY`; `most`: responses per tenant. Raises `SettingError` for an unusable file."""
        self.most = most
        self._database = _opened(place)
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kept-responses")

    def put(self, tenant: str, kept: Kept) -> None:
        """Keep a response under its id, which must not be changed any more.

        It is written later, but before what is asked for behind it is read.
        """
        self._worker.submit(self._put, tenant, kept)

    async def get(self, tenant: str, response_id: str) -> Kept | None:
        return await self._do(lambda: self._get(tenant, response_id))

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Whether there was such a response."""
        statement = "delete from responses where tenant = ? and id = ? returning id"
        return bool(await self._do(lambda: self._run(statement, tenant, response_id)))

    async def chain(self, tenant: str, response_id: str) -> list[Kept]:
        """A response and those before it, the oldest first.

        Raises `LookupError` with the id of one that is missing, `OverflowError` if they are longer than `MOST_CHAINED`,
        or than `MOST_BYTES` with their images.
        """
        return await self._do(lambda: self._chain(tenant, response_id))

    def close(self) -> None:
        """Wait until all is written that was to be kept."""
        self._worker.shutdown()

    async def _do(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._worker, work)
        except sqlite3.Error as error:  # a file that is locked, cut short, on a disk that is gone
            log.warning("responses_store_failed", error=str(error))
            reason = f"the store of responses (--responses-store) fails: {error}"
            raise unavailable(reason, "responses_store_failed") from error

    def _run(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """The rows that a statement returns, run in a transaction of its own."""
        try:
            with self._database:
                rows = self._database.execute(statement, values).fetchall()
        except sqlite3.OperationalError:
            # Requests behind this one do not wait for the same lock: waits would add up.
            self._database.execute("pragma busy_timeout = 0")
            raise
        self._database.execute(f"pragma busy_timeout = {LOCKED_MS}")
        return rows

    def _put(self, tenant: str, kept: Kept) -> None:
        """Write a response. A store that cannot be written to is logged, and the response is not kept."""
        try:
            self._write(tenant, kept)
        except sqlite3.Error as error:
            log.warning("response_not_kept", error=str(error))

    def _write(self, tenant: str, kept: Kept) -> None:
        items, body = orjson.dumps(kept.input), orjson.dumps(kept.body)
        size = len(items) + len(body)
        self._run(
            "insert or replace into responses values"
            " (?, ?, ?, ?, (select coalesce(max(used), 0) + 1 from responses), ?, ?)",
            *(tenant, kept.body["id"], kept.previous, size, items, body),
        )
        # The newest whose sizes and numbers, added up from the newest, are within the limits stay.
        self._run(
            """
            delete from responses where tenant = ?1 and id in (
                select id from (
                    select id, row_number() over latest as n, sum(size) over latest as bytes
                    from responses where tenant = ?1 window latest as (order by used desc)
                ) where n > ?2 or bytes > ?3
            )
            """,
            *(tenant, self.most, MOST_BYTES),
        )

    def _get(self, tenant: str, response_id: str) -> Kept | None:
        rows = self._run(
            "select previous, input, body from responses where tenant = ? and id = ?", tenant, response_id
        )
        if not rows:
            return None
        self._note_use(tenant, response_id)
        previous, items, body = rows[0]
        return Kept(previous, orjson.loads(items), orjson.loads(body))

    def _note_use(self, tenant: str, response_id: str) -> None:
        """So that others make room first. What is kept can be read where nothing can be written, as on a full disk."""
        try:
            self._run(
                "update responses set used = (select max(used) + 1 from responses) where tenant = ? and id = ?",
                *(tenant, response_id),
            )
        except sqlite3.Error as error:
            log.warning("use_of_response_not_noted", error=str(error))

    def _chain(self, tenant: str, response_id: str) -> list[Kept]:
        sizes = dict(self._run(CHAIN, tenant, response_id, self.most))
        if sum(sizes.values()) > MOST_BYTES:
            raise OverflowError
        chain: list[Kept] = []
        n_bytes = 0
        next_id: str | None = response_id
        while next_id is not None:
            kept = self._get(tenant, next_id)
            if kept is None:
                raise LookupError(next_id)
            n_bytes += sizes[next_id] - _image_bytes(kept.input)
            if n_bytes > MOST_CHAINED:
                raise OverflowError
            chain.append(kept)
            next_id = kept.previous
        return chain[::-1]


def _image_bytes(items: Sequence[dict[str, Any]]) -> int:
    """Bytes of the images that items have."""
    contents = [
        one[name] for one in items for name in ("content", "output") if isinstance(one.get(name), list)
    ]
    return sum(len(part.get("image_url", "")) for content in contents for part in content)


def _opened(place: str) -> sqlite3.Connection:
    try:
        if place != IN_MEMORY:
            # They hold what people wrote: for this user's eyes only.
            os.close(os.open(place, os.O_RDWR | os.O_CREAT, 0o600))
        database = sqlite3.connect(
            ":memory:" if place == IN_MEMORY else place, timeout=LOCKED_MS / 1000, check_same_thread=False
        )
        database.execute(TABLE)
        # A table of another version may be there.
        database.execute(f"select {COLUMNS} from responses limit 0")
    except (OSError, sqlite3.Error) as error:
        raise SettingError(
            "responses_store", place or "''", str(getattr(error, "strerror", None) or error)
        ) from error
    return database
