"""A store of responses (SQLite) whose file does not do what it should."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from pathlib import Path

import pytest

from slipstream.engine.errors import SettingError
from slipstream.server.responses.kept import KeptResponses
from tests.http.serving import served

PATH = "/v1/responses"
LONG_S = 4.0  # more than one wait for a lock, and less than one for each request


def test_what_is_kept_is_read_where_nothing_can_be_written(tmp_path: Path) -> None:
    place = tmp_path / "responses.db"
    with served(responses_store=str(place)) as server:
        made = server.post(PATH, {"input": "one"}).json()["id"]
        assert server.http.get(f"{PATH}/{made}").status_code == 200
        place.unlink()  # SQLite refuses to write then, as on a full disk
        lost = server.post(PATH, {"input": "two", "previous_response_id": made})
        assert lost.status_code == 200
        assert server.http.get(f"{PATH}/{made}").json()["id"] == made
        assert server.http.get(f"{PATH}/{lost.json()['id']}").status_code == 404


def test_a_store_of_other_columns_is_refused_at_start(tmp_path: Path) -> None:
    place = tmp_path / "responses.db"
    with sqlite3.connect(place) as database:
        database.execute("create table responses (tenant text, id text, body blob)")
    database.close()
    with pytest.raises(SettingError, match="no such column"):
        KeptResponses(str(place), 10)
    os.unlink(place)
    KeptResponses(str(place), 10)


def test_a_file_that_was_cut_short_has_an_error_of_its_own(tmp_path: Path) -> None:
    place = tmp_path / "responses.db"
    with served(responses_store=str(place)) as server:
        made = [server.post(PATH, {"input": "one" * 400}).json()["id"] for _ in range(10)]
        assert server.http.get(f"{PATH}/{made[-1]}").status_code == 200
        os.truncate(place, 5000)
        for answer in (
            server.http.get(f"{PATH}/{made[0]}"),
            server.http.get(f"{PATH}/{made[0]}/input_items"),
            server.http.delete(f"{PATH}/{made[0]}"),
            server.post(PATH, {"input": "two", "previous_response_id": made[0]}),
        ):
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "responses_store_failed"
            assert "malformed" in answer.json()["error"]["message"]
        assert server.post(PATH, {"input": "three"}).status_code == 200, "nothing is read for it"


def test_a_lock_holds_up_one_request_and_not_each(tmp_path: Path) -> None:
    place = tmp_path / "responses.db"
    with served(responses_store=str(place)) as server:
        made = server.post(PATH, {"input": "one"}).json()["id"]
        assert server.http.get(f"{PATH}/{made}").status_code == 200
        with contextlib.closing(sqlite3.connect(place)) as other:
            other.execute("begin exclusive")
            started = time.monotonic()
            answers = [server.http.get(f"{PATH}/{made}") for _ in range(6)]
            assert time.monotonic() - started < LONG_S
        assert [one.json()["error"]["code"] for one in answers] == ["responses_store_failed"] * 6
        assert server.http.get(f"{PATH}/{made}").json()["id"] == made
