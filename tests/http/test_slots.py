"""Saving, restoring and erasing slots over HTTP: replies with llama-server's keys, and what is refused how."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from slipstream.engine.errors import SlotFileRefused
from tests.http.fake import FakeEngine
from tests.http.serving import Served, chat, served

NAME = {"filename": "a slot.bin"}


@pytest.fixture(scope="module")
def saving() -> Iterator[Served]:
    with served(slot_save_path="/unused by the fake", api_key="alpha,beta") as one:
        one.http.headers["x-api-key"] = "alpha"
        yield one


@pytest.fixture
def used(saving: Served) -> Served:
    """A server whose slot 0 has had a request of four tokens."""
    saving.engine.last.clear()
    saving.engine.files.clear()
    assert saving.chat(max_tokens=3).status_code == 200
    return saving


def act(server: Served, action: str, body: Any = NAME, slot: object = 0, **more: Any) -> Any:
    return server.post(f"/slots/{slot}?action={action}", body, **more)


def refused(server: Served, *given: Any, **more: Any) -> tuple[int, str, str | None]:
    answer = act(server, *given, **more)
    assert list(answer.json()) == ["error"]
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return answer.status_code, error["type"], error["param"]


BAD = (400, "invalid_request_error")


def test_save_restore_erase(used: Served) -> None:
    n_tokens = len(used.engine.streams[-1].prompt_ids)
    assert act(used, "save").json() == {
        "id_slot": 0,
        "filename": "a slot.bin",
        "n_saved": n_tokens,
        "n_written": 100 * n_tokens,
        "timings": {"save_ms": 12.5},
    }
    assert act(used, "restore", slot=3).json() == {
        "id_slot": 3,
        "filename": "a slot.bin",
        "n_restored": n_tokens,
        "n_read": 100 * n_tokens,
        "timings": {"restore_ms": 12.5},
    }
    assert act(used, "erase", body={}, slot=3).json() == {"id_slot": 3, "n_erased": n_tokens}
    assert used.http.post("/slots/0?action=erase").json() == {"id_slot": 0, "n_erased": n_tokens}
    assert act(used, "erase", body={}).json() == {"id_slot": 0, "n_erased": 0}


def test_another_key_and_another_salt_see_nothing(used: Served) -> None:
    assert act(used, "save").status_code == 200
    for headers, more in (({"x-api-key": "beta"}, {}), ({}, {"cache_salt": "other"})):
        body = {**NAME, **more}
        assert refused(used, "save", body, headers=headers) == (*BAD, "id_slot")
        assert refused(used, "restore", body, headers=headers) == (*BAD, "filename")
        assert act(used, "erase", body, headers=headers).json()["n_erased"] == 0
    assert act(used, "restore").status_code == 200
    assert used.chat(cache_salt="other").status_code == 200
    assert refused(used, "save") == (*BAD, "id_slot")
    assert act(used, "save", {**NAME, "cache_salt": "other"}).status_code == 200


def test_no_key_no_slots(used: Served) -> None:
    assert act(used, "save", headers={"x-api-key": "wrong"}).status_code == 401


@pytest.mark.parametrize("action", ["save", "restore"])
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "filename"),
        ({"filename": None}, "filename"),
        ({"filename": 1}, "filename"),
        ({"filename": ["a"]}, "filename"),
        ({"filename": "x" * 257}, "filename"),
        ({"filename": "../x"}, "filename"),
        ({"filename": "a/b"}, "filename"),
        ({"filename": ""}, "filename"),
        ({"filename": "a", "cache_salt": 5}, "cache_salt"),
        ([], None),
        ("a", None),
        (None, None),
    ],
    ids=repr,
)
def test_malformed_bodies(used: Served, action: str, body: Any, param: str | None) -> None:
    content = json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    answer = used.http.post(f"/slots/0?action={action}", content=content, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert not used.engine.files


def test_bodies_that_are_not_json(used: Served) -> None:
    for action in ("save", "restore", "erase"):
        form = used.http.post(f"/slots/0?action={action}", data=NAME)
        assert form.status_code == 415, "a plain form of another site must not get through"
        cut = used.http.post(
            f"/slots/0?action={action}", content=b'{"a', headers={"content-type": "application/json"}
        )
        assert cut.status_code == 400
    assert used.http.post("/slots/0?action=save").status_code == 415


@pytest.mark.parametrize("slot", ["x", "-1", "0.5", "²", "%20", "9" * 10, "4", "1e1"])
def test_slots_that_are_not_there(used: Served, slot: str) -> None:
    for action in ("save", "restore", "erase"):
        assert refused(used, action, slot=slot) == (*BAD, "id_slot")


@pytest.mark.parametrize("query", ["", "?action=", "?action=copy", "?action=SAVE", "?a=save"])
def test_unknown_actions(used: Served, query: str) -> None:
    answer = used.post(f"/slots/0{query}", NAME)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "action"


def test_a_file_that_does_not_fit(used: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    async def restore(*given: object) -> None:
        raise SlotFileRefused("a slot.bin was saved by another model")

    monkeypatch.setattr(used.engine, "restore_slot", restore)
    error = act(used, "restore").json()["error"]
    assert (error["type"], error["param"], error["code"]) == (
        "invalid_request_error",
        "filename",
        "slot_file_refused",
    )
    assert "another model" in error["message"]


def test_a_failing_disk_is_a_500_that_tells_nothing(used: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    async def save(*given: object) -> None:
        raise OSError("no space left on /secret/folder")

    monkeypatch.setattr(used.engine, "save_slot", save)
    answer = act(used, "save")
    assert (answer.status_code, answer.headers["x-should-retry"]) == (500, "false")
    assert "secret" not in answer.text


def test_busy_slots_are_told(used: Served) -> None:
    engine: FakeEngine = used.engine
    stream = used.engine.streams[-1]
    engine.running.add(stream)
    try:
        assert act(used, "save").status_code == 200
        assert refused(used, "restore") == (*BAD, "id_slot")
        assert refused(used, "erase") == (*BAD, "id_slot")
    finally:
        engine.running.discard(stream)


def test_without_a_folder(server: Served) -> None:
    assert server.chat().status_code == 200
    for action in ("save", "restore", "erase", "else"):
        answer = act(server, action)
        error = answer.json()["error"]
        assert answer.status_code == 404  # clients repeat a request after a 501
        assert (error["type"], error["code"]) == ("not_found_error", "not_supported")
        assert "--slot-save-path" in error["message"]


def test_while_loading_and_draining() -> None:
    with served(loaded=False, slot_save_path="x") as server:
        assert act(server, "save").status_code == 503
    with served(slot_save_path="x") as server:
        server.engine.status = "draining"
        assert act(server, "save").status_code == 503
        assert server.post("/v1/chat/completions", chat()).status_code == 503


def test_strict_servers_refuse_unknown_fields() -> None:
    with served(slot_save_path="x", strict_api=True) as server:
        assert server.chat().status_code == 200
        assert refused(server, "save", {**NAME, "id": 1}) == (*BAD, "id")
        assert refused(server, "erase", {"id": 1}) == (*BAD, "id")
