"""A store of responses (SQLite) whose file does not do what it should."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest

from slipstream.engine.errors import SettingError
from slipstream.server.responses.kept import KeptResponses
from tests.http.serving import served

PATH = "/v1/responses"


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
