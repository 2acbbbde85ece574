"""Images in requests of three dialects: what reaches the engine, in which order, and how bad ones are refused."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import os
import random
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from PIL import Image as Pillow

from slipstream.engine.api import Chat, Usage
from slipstream.server.images import looking
from slipstream.server.images.decoders import AT_ONCE
from tests.http.fake import INFO, SEEING, FakeEngine, delta, done, words
from tests.http.serving import Served, logged, send, served, until
from tests.http.test_tools import TEMPLATE
from tests.image_files import BLUE, GREEN, RED, Colour, data_url, plain, saved

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
URLS = {one: data_url(plain(one)) for one in (RED, GREEN, BLUE)}
IMAGE = {"type": "image"}
LIMIT = 4
WEATHER = {
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("media")
    (folder / "green.png").write_bytes(plain(GREEN))
    engine = FakeEngine()
    engine.info = SEEING
    with served(engine, image_limit=LIMIT, media_path=str(folder), image_pixels=1) as one:
        yield one


@pytest.fixture
def server(seeing: Served) -> Iterator[Served]:
    yield seeing
    seeing.engine.script, seeing.engine.info = words, SEEING
    seeing.engine.requests.clear()


@pytest.fixture
def hermes(server: Served) -> None:
    """A template that knows tools, so that nothing is written into the turns."""
    server.engine.info = dataclasses.replace(SEEING, chat_template=TEMPLATE)


def text(words: str, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": words}


def shows(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def input_image(url: str) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url}


def block(colour: Colour) -> dict[str, Any]:
    data = base64.b64encode(plain(colour)).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def ask(server: Served, content: Any, path: str = CHAT, **fields: Any) -> Chat:
    """The conversation that reached the engine from a user's turn of this content."""
    turn = {"role": "user", "content": content}
    body = {"input": [turn]} if path == RESPONSES else {"messages": [turn], "max_tokens": 50}
    return asked(server, path, **(body | fields))


def asked(server: Served, path: str, **body: Any) -> Chat:
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    prompt = server.engine.requests[-1].prompt
    assert isinstance(prompt, Chat)
    assert n_shown(prompt) == len(prompt.images)
    return prompt


def n_shown(chat: Chat) -> int:
    contents = [one["content"] for one in chat.messages if isinstance(one["content"], list)]
    return sum(part == IMAGE for content in contents for part in content)


def seen(chat: Chat) -> list[Colour]:
    """The colours of a conversation's images, each of which has one."""
    for one in chat.images:
        assert one.pixels == one.pixels[:3] * (one.width * one.height)
    return [(one.pixels[0], one.pixels[1], one.pixels[2]) for one in chat.images]


def refused(server: Served, path: str = CHAT, **body: Any) -> dict[str, Any]:
    """The error of a request that is refused; the next is served."""
    n_before = len(server.engine.requests)
    answer = server.post(path, {"max_tokens": 50, **body} if path == MESSAGES else body)
    assert answer.status_code == 400, (answer.status_code, answer.text)
    assert len(server.engine.requests) == n_before
    assert seen(ask(server, [shows(URLS[BLUE])])) == [BLUE]
    told: dict[str, Any] = answer.json()["error"]
    return told


# --- what reaches the engine ---


def test_chat_keeps_the_order_of_texts_and_images(server: Served) -> None:
    parts = [text("first"), shows(URLS[RED]), text("then"), text("and"), shows(URLS[GREEN]), text("last")]
    chat = ask(server, parts)
    assert chat.messages[-1]["content"] == [
        text("first"),
        IMAGE,
        text("then"),
        text("and"),
        IMAGE,
        text("last"),
    ]
    assert seen(chat) == [RED, GREEN]
    assert [(one.width, one.height) for one in chat.images] == [(4, 3), (4, 3)]


def test_an_image_without_text(server: Served) -> None:
    chat = ask(server, [shows(URLS[RED])])
    assert (chat.messages[-1]["content"], seen(chat)) == ([IMAGE], [RED])


@pytest.mark.parametrize("detail", [None, "auto", "low", "high"])
def test_both_forms_of_an_image_url(server: Served, detail: str | None) -> None:
    part = {"type": "image_url", "image_url": {"url": URLS[RED], "detail": detail}}
    assert seen(ask(server, [part, {"type": "image_url", "image_url": URLS[BLUE]}])) == [RED, BLUE]


def test_images_of_many_turns_and_of_tools(server: Served, hermes: None) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    chat = asked(
        server,
        CHAT,
        messages=[
            {"role": "system", "content": [text("Be short.")]},
            {"role": "user", "content": [shows(URLS[BLUE]), text("this?")]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "a", "content": [text("seen:"), shows(URLS[RED])]},
            {"role": "user", "content": [text("and"), shows(URLS[GREEN])]},
        ],
    )
    assert seen(chat) == [BLUE, RED, GREEN]
    assert [one["content"] for one in chat.messages] == [
        "Be short.",
        [IMAGE, text("this?")],
        None,
        [text("seen:"), IMAGE],
        [text("and"), IMAGE],
    ]


def test_parts_without_images_are_one_text_as_before(server: Served) -> None:
    chat = ask(server, [text("a"), text("b")])
    assert (chat.messages[-1]["content"], chat.images) == ("a\nb", ())


def test_an_image_that_is_shown_twice(server: Served) -> None:
    chat = ask(server, [shows(URLS[RED]), shows(URLS[GREEN]), shows(URLS[RED])])
    assert seen(chat) == [RED, GREEN, RED]
    assert chat.images[0].key == chat.images[2].key != chat.images[1].key


def test_every_format_and_an_orientation(server: Served) -> None:
    exif = Pillow.Exif()
    exif[0x0112] = 6
    urls = [
        data_url(plain(kind="GIF"), "gif"),
        data_url(plain(kind="WEBP", lossless=True), "webp"),
        data_url(saved(Pillow.new("RGB", (4, 3), RED), exif=exif)),
        data_url(plain(kind="GIF"), "jpeg"),  # what it is, its file says
    ]
    chat = ask(server, [shows(one) for one in urls])
    assert seen(chat) == [RED] * 4
    assert [(one.width, one.height) for one in chat.images] == [(4, 3), (4, 3), (3, 4), (4, 3)]


def test_the_head_of_a_data_address_in_capitals(server: Served) -> None:
    url = URLS[RED].replace("data:image/png;base64,", "DATA:Image/JPG;Base64,")
    assert seen(ask(server, [shows(url)])) == [RED]


def test_files_below_the_media_folder(server: Served) -> None:
    assert seen(ask(server, [shows("file://green.png")])) == [GREEN]


def test_each_choice_is_of_the_same_images(server: Served) -> None:
    ask(server, [text("a"), shows(URLS[RED]), shows(URLS[GREEN])], n=3)
    assert len(server.engine.requests) == 3
    assert [seen(one.prompt) for one in server.engine.requests] == [[RED, GREEN]] * 3


def test_a_stream_with_images(server: Served) -> None:
    turn = {"role": "user", "content": [text("a"), shows(URLS[RED])]}
    assert server.events(CHAT, messages=[turn])
    assert seen(server.engine.requests[-1].prompt) == [RED]


def test_tools_for_a_template_that_knows_none(server: Served) -> None:
    """Their instructions are written into the turns, beside the images."""
    chat = ask(
        server, [text("a"), shows(URLS[RED]), text("b")], tools=[{"type": "function", "function": WEATHER}]
    )
    assert seen(chat) == [RED]
    assert chat.messages[-1]["content"][-3:] == [text("a"), IMAGE, text("b")]


def test_results_of_tools_for_a_template_that_knows_none(server: Served) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    chat = asked(
        server,
        CHAT,
        messages=[
            {"role": "user", "content": [shows(URLS[BLUE])]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "a", "content": [text("seen:"), shows(URLS[RED]), text("end")]},
        ],
    )
    assert seen(chat) == [BLUE, RED]
    told = chat.messages[-1]["content"]
    assert [one for one in told if one in (text("seen:"), IMAGE, text("end"))] == [
        text("seen:"),
        IMAGE,
        text("end"),
    ]


def test_tools_for_a_template_that_knows_them(server: Served, hermes: None) -> None:
    chat = ask(server, [shows(URLS[RED]), text("b")], tools=[{"type": "function", "function": WEATHER}])
    assert (seen(chat), chat.messages[-1]["content"]) == ([RED], [IMAGE, text("b")])


def test_responses_keep_the_order(server: Served) -> None:
    parts = [
        input_image(URLS[GREEN]),
        text("what", "input_text"),
        {**input_image(URLS[RED]), "detail": "high"},
    ]
    chat = ask(server, parts, RESPONSES)
    assert chat.messages[-1]["content"] == [IMAGE, text("what"), IMAGE]
    assert seen(chat) == [GREEN, RED]


def test_responses_of_functions(server: Served, hermes: None) -> None:
    items = [
        {"type": "message", "role": "user", "content": [input_image(URLS[BLUE])]},
        {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "a",
            "output": [text("seen:", "input_text"), input_image(URLS[RED])],
        },
    ]
    chat = asked(server, RESPONSES, input=items)
    assert seen(chat) == [BLUE, RED]
    assert chat.messages[-1]["content"] == [text("seen:"), IMAGE]


def test_kept_responses_go_on_with_their_images(server: Served) -> None:
    first = server.post(
        RESPONSES,
        {"input": [{"role": "user", "content": [text("this?", "input_text"), input_image(URLS[RED])]}]},
    ).json()
    second = server.post(
        RESPONSES,
        {
            "input": [{"role": "user", "content": [input_image(URLS[GREEN])]}],
            "previous_response_id": first["id"],
        },
    ).json()
    chat = asked(server, RESPONSES, input="And now?", previous_response_id=second["id"])
    assert seen(chat) == [RED, GREEN]
    users = [one["content"] for one in chat.messages if one["role"] == "user"]
    assert users == [[text("this?"), IMAGE], [IMAGE], "And now?"]
    listed = server.http.get(f"{RESPONSES}/{first['id']}/input_items").json()["data"]
    assert listed[0]["content"][1] == {**input_image(URLS[RED]), "detail": "auto"}


def test_kept_images_do_not_count_as_text(server: Served) -> None:
    """Of text, a conversation that goes on has 8 MiB at most; these have more of images."""
    pixels = random.Random(1).randbytes(3_000_000)
    image = data_url(saved(Pillow.frombytes("RGB", (1_000, 1_000), pixels), compress_level=0))
    previous = None
    for _ in range(3):
        turn = {"role": "user", "content": [text("a", "input_text"), input_image(image)]}
        answer = server.post(RESPONSES, {"input": [turn], "previous_response_id": previous})
        assert answer.status_code == 200, answer.text
        previous = answer.json()["id"]
    chat = asked(server, RESPONSES, input="And now?", previous_response_id=previous)
    assert [one.pixels == pixels for one in chat.images] == [True] * 3


def test_truncation_takes_images_away_with_their_turns(server: Served) -> None:
    long = [text("word " * 400, "input_text"), input_image(URLS[RED])]
    items = [
        {"role": "user", "content": long},
        {"role": "assistant", "content": "word " * 200},
        {"role": "user", "content": [text("now", "input_text"), input_image(URLS[GREEN])]},
    ]
    assert seen(asked(server, RESPONSES, input=items, truncation="auto")) == [GREEN]


def test_messages_keep_the_order(server: Served) -> None:
    chat = ask(server, [text("a"), block(RED), text("b"), text("c"), block(BLUE)], MESSAGES)
    content = chat.messages[-1]["content"]
    assert [one["type"] for one in content if one["type"] == "image"] == ["image", "image"]
    assert [one.get("text") for one in content][:2] == ["a", None]
    assert "".join(one.get("text", "*") for one in content).replace("\n", "") == "a*bc*"
    assert seen(chat) == [RED, BLUE]


def test_messages_with_results_that_show_images(server: Served, hermes: None) -> None:
    chat = asked(
        server,
        MESSAGES,
        max_tokens=50,
        messages=[
            {"role": "user", "content": [block(GREEN), text("look")]},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "toolu_a", "name": "look", "input": {}}],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_a", "content": [text("seen:"), block(RED)]},
                    {"type": "image", "source": {"type": "url", "url": URLS[BLUE]}},
                    text("and this?"),
                ],
            },
        ],
    )
    assert seen(chat) == [GREEN, RED, BLUE]
    told = [(one["role"], one["content"]) for one in chat.messages if one["role"] != "assistant"]
    assert told == [
        ("user", [IMAGE, text("look")]),
        ("tool", [text("seen:"), IMAGE]),
        ("user", [IMAGE, text("and this?")]),
    ]


def test_what_counts_tokens_reads_images_too(server: Served) -> None:
    turn = {"role": "user", "content": [text("a b c"), shows(URLS[RED])]}
    for path, body in (
        (f"{CHAT}/input_tokens", {"messages": [turn]}),
        (f"{RESPONSES}/input_tokens", {"input": [{"role": "user", "content": [input_image(URLS[RED])]}]}),
        (f"{MESSAGES}/count_tokens", {"messages": [{"role": "user", "content": [block(RED)]}]}),
    ):
        answer = server.post(path, body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["input_tokens"] > 0
    broken = {"role": "user", "content": [shows("data:image/png;base64,AAAA")]}
    assert (
        server.post(f"{CHAT}/input_tokens", {"messages": [broken]}).json()["error"]["code"] == "invalid_image"
    )
    answer = server.post("/apply-template", {"messages": [turn]})
    assert answer.status_code == 200
    assert "'image'" in answer.json()["prompt"]


def test_the_sdks_types(server: Served) -> None:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        client.chat.completions.create(
            model="m",
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "a"},
                        {"type": "image_url", "image_url": {"url": URLS[RED], "detail": "auto"}},
                    ],
                }
            ],
        )
        assert seen(server.engine.requests[-1].prompt) == [RED]
        client.responses.create(
            model="m",
            input=[
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "a"},
                        {"type": "input_image", "image_url": URLS[GREEN], "detail": "auto"},
                    ],
                }
            ],
        )
        assert seen(server.engine.requests[-1].prompt) == [GREEN]


# --- what is told ---


def test_usage_tells_the_tokens_of_images(server: Served) -> None:
    count = Usage(n_prompt=20, n_cached=3, n_completion=1, n_image=12)
    server.engine.script = lambda request: [delta("a"), done(request, 1, usage=count)]
    turn = {"role": "user", "content": [shows(URLS[RED])]}
    told = server.post(CHAT, {"messages": [turn], "n": 2}).json()["usage"]
    assert told["prompt_tokens_details"] == {"cached_tokens": 3, "image_tokens": 12}
    *_, last = server.events(CHAT, messages=[turn], stream_options={"include_usage": True})
    assert last["usage"]["prompt_tokens_details"]["image_tokens"] == 12
    body = {"input": [{"role": "user", "content": [input_image(URLS[RED])]}]}
    assert server.post(RESPONSES, body).json()["usage"]["input_tokens_details"]["image_tokens"] == 12
    server.engine.script = words
    told = server.post(CHAT, {"messages": [{"role": "user", "content": "Hi"}]}).json()["usage"]
    assert "image_tokens" not in told["prompt_tokens_details"]


def test_what_the_model_sees_is_told(server: Served) -> None:
    props = server.http.get("/props").json()
    assert props["modalities"] == {"vision": True, "video": False, "audio": False}
    card = server.http.get("/v1/models").json()
    assert card["data"][0]["architecture"]["input_modalities"] == ["text", "image"]
    assert "vision" in card["models"][0]["capabilities"]
    server.engine.info = INFO
    assert server.http.get("/props").json()["modalities"]["vision"] is False
    card = server.http.get("/v1/models").json()
    assert card["data"][0]["architecture"]["input_modalities"] == ["text"]
    assert "vision" not in card["models"][0]["capabilities"]


def test_the_log_has_the_number_of_images_and_nothing_of_them(
    server: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", logger="slipstream")
    ask(server, [shows(URLS[RED]), shows(URLS[GREEN])])
    until(lambda: logged(caplog, "request"))
    assert [one["n_images"] for one in logged(caplog, "request")] == [2]
    assert URLS[RED][30:60] not in caplog.text


# --- what is refused ---


def test_a_model_that_sees_nothing_is_named(server: Served) -> None:
    server.engine.info = INFO
    for path, body, field in (
        (
            CHAT,
            {"messages": [{"role": "user", "content": [text("a"), shows(URLS[RED])]}]},
            "messages[0].content[1]",
        ),
        (
            RESPONSES,
            {"input": [{"role": "user", "content": [input_image(URLS[RED])]}]},
            "input[0].content[0]",
        ),
        (
            MESSAGES,
            {"messages": [{"role": "user", "content": [block(RED)]}], "max_tokens": 9},
            "messages.0.content.0.source",
        ),
    ):
        answer = server.post(path, body)
        assert answer.status_code == 400
        told = answer.json()["error"]["message"]
        assert told.startswith(field)
        assert "the model fake/model sees no images" in told
        assert "--no-vision" not in told
    assert not server.engine.requests
    assert server.chat().status_code == 200


def test_a_server_without_its_tower_says_so() -> None:
    with served(vision=False) as server:
        told = server.error(400, messages=[{"role": "user", "content": [shows(URLS[RED])]}])
        assert "it was started without what sees them (--no-vision)" in told["message"]
        assert told["code"] == "unsupported_value"


def test_too_many_images(server: Served) -> None:
    turns = [{"role": "user", "content": [shows(URLS[RED])] * 2} for _ in range(3)]
    told = refused(server, messages=turns)
    assert told["param"] == "messages[2].content[0].image_url"
    assert f"a request may show {LIMIT} images (--image-limit), this one has 6" in told["message"]
    assert len(ask(server, [shows(URLS[RED])] * LIMIT).images) == LIMIT


def test_a_limit_of_no_images() -> None:
    engine = FakeEngine()
    engine.info = SEEING
    with served(engine, image_limit=0) as server:
        told = server.error(400, messages=[{"role": "user", "content": [shows(URLS[RED])]}])
        assert "may show 0 images" in told["message"]


def test_the_images_of_kept_responses_count(server: Served) -> None:
    content = [input_image(URLS[RED])] * 3
    first = server.post(RESPONSES, {"input": [{"role": "user", "content": content}]}).json()
    told = refused(
        server,
        RESPONSES,
        input=[{"role": "user", "content": content[:2]}],
        previous_response_id=first["id"],
    )
    assert told["param"] == "input[0].content[1].image_url"


# What is shown, and what is said of it.
BROKEN = [
    ("data:image/png;base64,AAAA", "it is no PNG, JPEG, WebP or GIF image"),
    ("data:image/png;base64,", "it is no PNG, JPEG, WebP or GIF image"),
    ("data:image/png;base64,A*AA", "not valid base64"),
    ("data:image/png;base64,ÄÖÜ=", "not valid base64"),
    (data_url(b"<svg/>", "svg+xml"), "a data: address should begin with data:image/png;base64,"),
    ("data:text/html;base64,AAAA", "a data: address should begin with"),
    ("data:image/png,AAAA", "a data: address should begin with"),
    (data_url(b"<!doctype html>"), "it is no PNG"),
    (data_url(saved(Pillow.radial_gradient("L"))[:300]), "damaged or cut short"),
    (data_url(plain(size=(1001, 1000))), "it has 1.0 million pixels (1001 × 1000); at most 1 million"),
    ("https://example.com/a.png", "images are not fetched from other hosts here (--allow-remote-images)"),
    ("file://../green.png", "there is no image file of this name"),
    ("file:///etc/passwd", "there is no image file of this name"),
    ("ftp://example.com/a.png", "should be given as a data:, http:, https: or file: address"),
    ("green.png", "should be given as a data:, http:, https: or file: address"),
    ("/etc/passwd", "should be given as a data:, http:, https: or file: address"),
    (base64.b64encode(plain()).decode(), "should be given as a data:, http:, https: or file: address"),
]


@pytest.mark.parametrize(("url", "reason"), BROKEN, ids=lambda one: one[:40])
def test_broken_images_are_named(server: Served, url: str, reason: str) -> None:
    good = shows(URLS[RED])
    told = refused(server, messages=[{"role": "user", "content": [good, text("a"), shows(url)]}])
    assert told["code"] == "invalid_image"
    assert told["param"] == "messages[0].content[2].image_url"
    assert told["message"].startswith("messages[0].content[2].image_url: ")
    assert reason in told["message"]
    assert len(told["message"]) < 400  # no data of the image


def test_broken_images_of_other_dialects(server: Served) -> None:
    url = "data:image/png;base64,AAAA"
    items = [{"role": "user", "content": [text("a", "input_text"), input_image(url)]}]
    assert refused(server, RESPONSES, input=items)["param"] == "input[0].content[1].image_url"
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    bad = {"type": "image", "source": source}
    told = refused(server, MESSAGES, messages=[{"role": "user", "content": [text("a"), bad]}])
    assert told["message"].startswith("messages.0.content.1.source: it is no PNG")
    assert told["type"] == "invalid_request_error"
    result = {"type": "tool_result", "tool_use_id": "a", "content": [text("b"), bad]}
    told = refused(server, MESSAGES, messages=[{"role": "user", "content": [result]}])
    assert told["message"].startswith("messages.0.content.0.content.1.source: it is no PNG")


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image_url"}],
        [{"type": "image_url", "image_url": None}],
        [{"type": "image_url", "image_url": ""}],
        [{"type": "image_url", "image_url": {}}],
        [{"type": "image_url", "image_url": {"url": 1}}],
        [{"type": "image_url", "image_url": {"url": URLS[RED], "detail": "huge"}}],
        [{"type": "image_url", "image_url": [URLS[RED]]}],
        [{"type": "input_audio", "input_audio": {}}, shows(URLS[RED])],
        [shows(URLS[RED]), None],
    ],
    ids=lambda one: str(one)[:50],
)
def test_parts_that_are_no_images(server: Served, content: Any) -> None:
    assert refused(server, messages=[{"role": "user", "content": content}])["param"].startswith(
        "messages[0].content"
    )


@pytest.mark.parametrize(
    "source",
    [
        None,
        {},
        {"type": "file", "file_id": "a"},
        {"type": "base64", "media_type": "image/svg+xml", "data": "AAAA"},
        {"type": "base64", "media_type": "image/png"},
        {"type": "url"},
        {"type": "url", "url": 1},
    ],
    ids=lambda one: str(one)[:50],
)
def test_sources_that_are_none(server: Served, source: Any) -> None:
    turn = {"role": "user", "content": [{"type": "image", "source": source}]}
    assert "source" in refused(server, MESSAGES, messages=[turn])["message"]


@pytest.mark.parametrize(
    "part",
    [{}, {"image_url": 1}, {"file_id": "a"}, {"image_url": URLS[RED], "detail": "huge"}],
    ids=lambda one: str(one)[:50],
)
def test_input_images_that_are_none(server: Served, part: dict[str, Any]) -> None:
    items = [{"role": "user", "content": [{"type": "input_image", **part}]}]
    assert refused(server, RESPONSES, input=items)["param"].startswith("input[0]")


@pytest.mark.parametrize("role", ["system", "developer", "assistant"])
def test_turns_that_cannot_show_images(server: Served, role: str) -> None:
    told = refused(
        server, messages=[{"role": role, "content": [shows(URLS[RED])]}, {"role": "user", "content": "a"}]
    )
    assert f"a turn of the {role} cannot show images" in told["message"]
    items = [{"role": role, "content": [input_image(URLS[RED])]}, {"role": "user", "content": "a"}]
    assert refused(server, RESPONSES, input=items)["param"].startswith("input[0]")
    if role != "developer":
        turns = [{"role": role, "content": [block(RED)]}, {"role": "user", "content": "a"}]
        assert "image" in refused(server, MESSAGES, messages=turns)["message"]


def test_more_pixels_than_a_request_may_show() -> None:
    """Four times as many as an image may have."""
    engine = FakeEngine()
    engine.info = SEEING
    urls = [data_url(plain((0, 0, index), (1_000, 1_000))) for index in range(5)]
    with served(engine, image_pixels=1) as server:
        told = server.error(400, messages=[{"role": "user", "content": [shows(one) for one in urls]}])
        assert "the request's images have more than 4 million pixels together" in told["message"]
        assert told["code"] == "invalid_image"
        assert len(ask(server, [shows(one) for one in urls[:4]]).images) == 4
        assert len(ask(server, [shows(urls[0])] * 9).images) == 9  # the same pixels


def test_good_and_bad_images_together(server: Served) -> None:
    for _ in range(5):
        content = [
            shows(URLS[RED]),
            shows("data:image/png;base64,AAAA"),
            shows(URLS[GREEN]),
            shows("file:none.png"),
        ]
        assert refused(server, messages=[{"role": "user", "content": content}])["code"] == "invalid_image"


# --- over time ---


@pytest.fixture
def elsewhere() -> Iterator[str]:
    """The address of another host, which has `red.png` and `away`, a redirect to where nobody may be led."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/red.png":
                self.send_response(200)
                self.end_headers()
                self.wfile.write(plain(RED))
            else:
                self.send_response(302)
                self.send_header("location", "http://169.254.169.254/latest/meta-data/")
                self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as host:
        thread = threading.Thread(target=host.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{host.server_port}"
        host.shutdown()
        thread.join()


def test_images_of_other_hosts(elsewhere: str) -> None:
    engine = FakeEngine()
    engine.info = SEEING
    with served(engine, allow_remote_images=True, remote_image_hosts="127.0.0.1") as server:
        assert seen(ask(server, [shows(f"{elsewhere}/red.png"), shows(URLS[BLUE])])) == [RED, BLUE]
        assert seen(ask(server, [input_image(f"{elsewhere}/red.png")], RESPONSES)) == [RED]
        source = {"type": "url", "url": f"{elsewhere}/red.png"}
        assert seen(ask(server, [{"type": "image", "source": source}], MESSAGES)) == [RED]
        told = server.error(400, messages=[{"role": "user", "content": [shows(f"{elsewhere}/away")]}])
        assert (told["code"], told["param"]) == ("invalid_image", "messages[0].content[0].image_url")
        assert "its host is not among those" in told["message"]
    with served(engine, allow_remote_images=True) as server:
        told = server.error(400, messages=[{"role": "user", "content": [shows(f"{elsewhere}/red.png")]}])
        assert "its host has no public address" in told["message"]


def test_more_images_than_there_is_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that run have as many pixels as may be held: others are told to come later."""
    monkeypatch.setattr(looking, "LEAST_HELD", 0)
    engine = FakeEngine(script=lambda request: [60.0, *words(request)])
    engine.info = SEEING
    urls = [data_url(plain((index, 0, 0), (1_000, 1_000))) for index in range(9)]
    with served(engine, image_pixels=1) as server:
        for n_begun, half in enumerate((urls[:4], urls[4:8]), start=1):
            connection = send(server, messages=[{"role": "user", "content": [shows(one) for one in half]}])
            until(lambda n=n_begun: len(engine.requests) == n)
            connection.close()  # what the fake engine remembers is held still
        answer = server.chat(messages=[{"role": "user", "content": [shows(urls[8])]}])
        assert answer.status_code in (429, 503), answer.text
        assert answer.headers["retry-after"] == "5"
        assert "hold as many images as there is memory for" in answer.json()["error"]["message"]
        engine.script = words
        assert server.chat().status_code == 200
        until(lambda: not engine.running)
        engine.requests.clear()
        engine.streams.clear()
        until(
            lambda: server.chat(messages=[{"role": "user", "content": [shows(urls[8])]}]).status_code == 200
        )


def decoders() -> Iterator[int]:
    """The processes that decode images for this one."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == os.getpid() and b"images.pillow_process" in (folder / "cmdline").read_bytes():
                yield int(folder.name)


def test_a_decoder_that_dies_ends_its_image_alone(server: Served) -> None:
    ask(server, [shows(URLS[RED])])
    found = list(decoders())
    assert found
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    bad = 0
    for _ in range(3 * AT_ONCE):
        answer = server.chat(messages=[{"role": "user", "content": [shows(URLS[RED])]}])
        if answer.status_code != 200:
            bad += 1
            assert answer.status_code == 400
            assert "the process that decodes images was lost over it" in answer.json()["error"]["message"]
    assert 0 < bad <= AT_ONCE
    assert seen(ask(server, [shows(one) for one in URLS.values()])) == list(URLS)
