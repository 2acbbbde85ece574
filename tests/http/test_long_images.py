"""Images of many megabytes: what a body may have, what is kept of them, and that conversations go on with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image

from slipstream.engine.api import Chat
from tests.http.fake import INFO, SEEING, FakeEngine
from tests.http.serving import Served, served
from tests.image_files import data_url, saved

RESPONSES, CHAT = "/v1/responses", "/v1/chat/completions"
TEXT_MIB, IMAGES_MIB = 8, 48


@pytest.fixture
def seeing(server: Served) -> Iterator[Served]:
    server.engine.info = SEEING
    yield server
    server.engine.info = INFO


def of_length(mib: int) -> dict[str, Any]:
    """A request with an image whose address has so many MiB and says nothing."""
    url = "data:image/png;base64," + "A" * (mib << 20)
    return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": url}]}]}


def test_bodies_may_be_longer_where_images_are_seen(seeing: Served) -> None:
    answer = seeing.post(CHAT, of_length(TEXT_MIB + 1))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_image")
    assert seeing.post(CHAT, of_length(IMAGES_MIB)).status_code == 413
    seeing.engine.info = INFO
    assert seeing.post(CHAT, of_length(TEXT_MIB)).status_code == 413


def test_what_is_set_holds_for_models_that_see_images_too() -> None:
    engine = FakeEngine()
    engine.info = SEEING
    with served(engine, max_body=1) as one:
        assert one.post(CHAT, of_length(1)).status_code == 413


def test_conversations_go_on_with_long_images_and_not_with_long_texts(seeing: Served) -> None:
    """An image of 9 MiB in a kept response is no reason to refuse the next; as much text is."""
    picture = data_url(saved(Image.new("RGB", (2200, 2200)), compress_level=0))
    assert len(picture) > TEXT_MIB << 20
    content = [{"type": "input_image", "image_url": picture}]
    first = seeing.post(RESPONSES, {"input": [{"role": "user", "content": content}]}).json()["id"]
    assert seeing.post(RESPONSES, {"input": "a", "previous_response_id": first}).status_code == 200
    prompt = seeing.engine.requests[-1].prompt
    assert isinstance(prompt, Chat)
    assert [one.width for one in prompt.images] == [2200]
    first = seeing.post(RESPONSES, {"input": "a" * (9 << 20)}).json()["id"]
    answer = seeing.post(RESPONSES, {"input": "a", "previous_response_id": first})
    assert answer.status_code == 400
    assert "is longer than 8 MiB" in answer.json()["error"]["message"]


def test_more_images_than_are_kept_of_a_key(seeing: Served) -> None:
    """The oldest make room: a conversation that needs them is refused, and says so."""
    picture = data_url(saved(Image.new("RGB", (3000, 3000)), compress_level=0))  # 36 MB of base64
    ids: list[str] = []
    for _ in range(2):
        content = [{"type": "input_image", "image_url": picture}]
        body = {
            "input": [{"role": "user", "content": content}],
            "previous_response_id": ids[-1] if ids else None,
        }
        ids.append(seeing.post(RESPONSES, body).json()["id"])
    answer = seeing.post(RESPONSES, {"input": "a", "previous_response_id": ids[-1]})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "previous_response_not_found"
    assert seeing.post(RESPONSES, {"input": "a"}).status_code == 200
