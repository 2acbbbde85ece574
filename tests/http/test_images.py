"""Images in requests of every dialect, as clients send them; what is refused, kept and told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from slipstream.engine.api import Chat, Usage
from slipstream.server.openai.wire import ChatRequest
from tests.http.fake import INFO, SEEING, FakeEngine, delta, done
from tests.http.serving import Served, logged, served
from tests.http.test_tools import TEMPLATE, says
from tests.image_files import BLUE, HOSTILE, RED, data_url, saved, turned, two

ONE, OTHER = data_url(saved(two())), data_url(saved(two(width=6, left=BLUE, right=RED)))
SHOWN = {"type": "image"}
MESSAGES, RESPONSES, CHAT = "/v1/messages", "/v1/responses", "/v1/chat/completions"


@pytest.fixture
def seeing(server: Served) -> Iterator[Served]:
    server.engine.info = SEEING
    yield server
    server.engine.info = INFO


@pytest.fixture
def hermes(seeing: Served) -> Served:
    seeing.engine.info = replace(SEEING, chat_template=TEMPLATE)
    return seeing


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def picture(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def block(url: str) -> dict[str, Any]:
    """An image as a block of Anthropic's."""
    head, _, data = url.partition(",")
    media_type = head.removeprefix("data:").partition(";")[0]
    return {"type": "image", "source": {"type": "base64", "media_type": media_type, "data": data}}


def seen(server: Served) -> tuple[list[Any], list[int]]:
    """The contents of the last conversation that reached the engine, and the widths of its images."""
    prompt = server.engine.requests[-1].prompt
    assert isinstance(prompt, Chat)
    return [one.get("content") for one in prompt.messages], [one.width for one in prompt.images]


def test_a_chat_with_openais_client(client: OpenAI, seeing: Served) -> None:
    content: Any = [text("First"), picture(ONE, detail="high"), text("then"), text("that"), picture(OTHER)]
    reply = client.chat.completions.create(
        model="m",
        messages=[
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": content},
            {"role": "assistant", "content": "Yes?"},
            {"role": "user", "content": [{"type": "image_url", "image_url": ONE}]},  # type: ignore[list-item]
        ],
    )
    assert reply.choices[0].message.content
    contents, widths = seen(seeing)
    assert contents == [
        "Be short.",
        [text("First"), SHOWN, text("then"), text("that"), SHOWN],
        "Yes?",
        [SHOWN],
    ]
    assert widths == [4, 6, 4]
    image = seeing.engine.requests[-1].prompt.images[0]  # type: ignore[union-attr]
    assert (image.height, image.pixels[:3], image.pixels[-3:]) == (2, bytes(RED), bytes(BLUE))


def test_texts_without_images_are_one_text(seeing: Served) -> None:
    seeing.chat(messages=user(text("a"), text("b")))
    assert seen(seeing) == (["a\nb"], [])


def test_choices_share_the_images(seeing: Served) -> None:
    assert seeing.chat(messages=user(picture(ONE)), n=3).status_code == 200
    first, *others = [one.prompt for one in seeing.engine.requests]
    assert all(one.images is first.images for one in others)


def test_tools_may_show_images(hermes: Served) -> None:
    called = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    turns = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "a", "content": [text("here"), picture(ONE)]},
    ]
    assert hermes.chat(messages=turns).status_code == 200
    contents, widths = seen(hermes)
    assert (contents[-1], widths) == ([text("here"), SHOWN], [4])


def test_images_beside_tools_that_are_described(seeing: Served) -> None:
    """A template without tools, and one without system messages either: their description goes before the image."""
    tool = {"type": "function", "function": {"name": "look"}}
    called = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    turns = [
        *user(picture(ONE), text("What is it?")),
        {"role": "assistant", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "a", "content": [picture(OTHER)]},
    ]
    template = "{% for one in messages %}{% if one.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    template += "<{{ one.role }}>{{ one.content }}{% endfor %}"
    seeing.engine.info = replace(SEEING, chat_template=template)
    assert seeing.chat(messages=turns, tools=[tool]).status_code == 200
    (first, _, result), widths = seen(seeing)
    assert [one["type"] for one in first] == ["text", "image", "text"]
    assert first[0]["text"].endswith("\n\n")
    assert (result, widths) == ([text("<tool_response>\n"), SHOWN, text("\n</tool_response>")], [4, 6])


def test_responses_go_on_with_their_images(client: OpenAI, hermes: Served) -> None:
    first = client.responses.create(
        model="m",
        input=[
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "What is"},
                    {"type": "input_image", "image_url": ONE, "detail": "low"},
                ],
            }
        ],
    )
    assert seen(hermes) == ([[text("What is"), SHOWN]], [4])
    (item,) = client.responses.input_items.list(first.id).data
    assert item.model_dump()["content"][1]["image_url"] == ONE
    output = [{"type": "input_image", "image_url": OTHER}]
    more: Any = [
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": output},
    ]
    second = client.responses.create(model="m", input=more, previous_response_id=first.id)
    client.responses.create(model="m", input="And?", previous_response_id=second.id)
    contents, widths = seen(hermes)
    assert contents[0] == [text("What is"), SHOWN]
    assert contents[-1] == "And?"
    assert [SHOWN] in contents
    assert widths == [4, 6]


def test_blocks_of_messages(hermes: Served) -> None:
    turns = [
        {"role": "user", "content": [text("one"), block(ONE), text("two")]},
        {"role": "user", "content": "three"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "toolu_a", "name": "look", "input": {}}],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_a", "content": [block(OTHER), text("seen")]},
                block(ONE),
            ],
        },
    ]
    answer = hermes.post(MESSAGES, {"max_tokens": 10, "messages": turns})
    assert answer.status_code == 200, answer.text
    contents, widths = seen(hermes)
    assert contents == [
        [text("one"), SHOWN, text("two"), text("three")],
        None,
        [SHOWN, text("seen")],
        [SHOWN],
    ]
    assert widths == [4, 6, 4]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions/input_tokens", {"messages": user(picture(ONE))}),
        ("/apply-template", {"messages": user(picture(ONE))}),
        (f"{RESPONSES}/input_tokens", {"input": user({"type": "input_image", "image_url": ONE})}),
        (f"{MESSAGES}/count_tokens", {"messages": user(block(ONE))}),
    ],
)
def test_prompts_are_counted_and_shown(seeing: Served, path: str, body: dict[str, Any]) -> None:
    answer = seeing.post(path, body)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": user(text("a"), picture(ONE))}, "messages[0].content[1].image_url"),
        (
            RESPONSES,
            {"input": [{"role": "user", "content": "a"}, *user({"type": "input_image", "image_url": ONE})]},
            "input[1].content[0].image_url",
        ),
        (MESSAGES, {"max_tokens": 1, "messages": user(block(ONE))}, "messages.0.content.0.source"),
        (
            MESSAGES,
            {
                "max_tokens": 1,
                "messages": user(
                    text("a"), {"type": "tool_result", "tool_use_id": "a", "content": [block(ONE)]}
                ),
            },
            "messages.0.content.1.content.0.source",
        ),
    ],
)
def test_models_that_see_nothing_say_so(server: Served, path: str, body: Any, param: str) -> None:
    answer = server.post(path, body)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message == f"{param}: the model fake/model sees no images"
    assert not server.engine.requests


def test_without_vision_that_is_why() -> None:
    with served(vision=False) as one:
        assert "--no-vision" in one.error(400, messages=user(picture(ONE)))["message"]


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        ([{"type": "image_url"}], "invalid_value", "should have an address"),
        ([{"type": "image_url", "image_url": {}}], "invalid_value", "should have an address"),
        ([{"type": "image_url", "image_url": 7}], "invalid_value", "should have an address"),
        ([{"type": "image_url", "image_url": ""}], "invalid_value", "should have an address"),
        ([picture(ONE, detail="huge")], "invalid_value", "'detail' should be one of"),
        ([{"type": "input_audio", "input_audio": {}}, picture(ONE)], "unsupported_value", "only parts of"),
        ([picture(ONE), {"type": "text"}], "invalid_value", "string in 'text'"),
        ([picture("data:image/png;base64,iVBO!")], "invalid_image", "not valid base64"),
        ([picture("data:image/png;base64,ä")], "invalid_image", "not valid base64"),
        ([picture("data:image/svg+xml;base64,AAAA")], "invalid_image", "should begin with data:image/png"),
        ([picture("data:text/html,<p>")], "invalid_image", "should begin with data:image/png"),
        ([picture("data:image/png,AAAA")], "invalid_image", "should begin with data:image/png"),
        ([picture("iVBORw0KGgo=")], "invalid_image", "should be given as a data:"),
        ([picture("gopher://a/b")], "invalid_image", "should be given as a data:"),
        ([picture("C:\\secret.png")], "invalid_image", "should be given as a data:"),
        ([picture("http://127.0.0.1:1/a.png")], "invalid_image", "--allow-remote-images"),
        ([picture("file:///etc/passwd")], "invalid_image", "--media-path"),
    ],
)
def test_what_is_wrong_is_named(seeing: Served, content: list[Any], code: str, message: str) -> None:
    error = seeing.error(400, messages=user(*content))
    assert (error["code"], error["param"][:19]) == (code, "messages[0].content")
    assert message in error["message"]
    if code == "invalid_image":
        assert error["param"] == "messages[0].content[0].image_url"
    assert not seeing.engine.requests
    assert seeing.chat(messages=user(picture(ONE))).status_code == 200


@pytest.mark.parametrize("role", ["system", "developer", "assistant"])
def test_only_users_and_tools_show_images(seeing: Served, role: str) -> None:
    turns = [{"role": role, "content": [picture(ONE)]}, {"role": "user", "content": "a"}]
    assert f"a turn of the {role} cannot show images" in seeing.error(400, messages=turns)["message"]
    if role != "developer":
        answer = seeing.post(
            MESSAGES, {"max_tokens": 1, "messages": [{"role": role, "content": [block(ONE)]}]}
        )
        assert "has no blocks of the type image" in answer.json()["error"]["message"]
    item = {"role": role, "content": [{"type": "input_image", "image_url": ONE}]}
    assert "cannot show images" in seeing.post(RESPONSES, {"input": [item]}).json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (RESPONSES, {"input": user({"type": "input_image", "file_id": "f"})}, "no files are kept here"),
        (
            MESSAGES,
            {"messages": user({"type": "image", "source": {"type": "file", "file_id": "f"}})},
            "base64 or url",
        ),
        (
            MESSAGES,
            {
                "messages": user(
                    {"type": "image", "source": {"type": "base64", "media_type": "image/bmp", "data": ""}}
                )
            },
            "media_type",
        ),
    ],
)
def test_other_sources(seeing: Served, path: str, body: dict[str, Any], message: str) -> None:
    answer = seeing.post(path, {"max_tokens": 1, **body} if path == MESSAGES else body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", HOSTILE)
def test_files_that_lie(client: OpenAI, seeing: Served, name: str) -> None:
    """Refused with a reason, and the next request is served."""
    url = data_url(HOSTILE[name][0]())
    with pytest.raises(BadRequestError) as refused:
        client.chat.completions.create(model="m", messages=user(text("a"), picture(url)))  # type: ignore[arg-type]
    assert (refused.value.code, refused.value.param) == ("invalid_image", "messages[0].content[1].image_url")
    assert url[40:60] not in str(refused.value) or len(url) < 60
    assert client.chat.completions.create(model="m", messages=user(picture(ONE))).choices  # type: ignore[arg-type]


def test_images_are_turned_upright(seeing: Served) -> None:
    seeing.chat(messages=user(picture(data_url(turned(6), "jpeg"))))
    (image,) = seeing.engine.requests[-1].prompt.images  # type: ignore[union-attr]
    assert (image.width, image.height) == (32, 64)


def test_a_number_of_images() -> None:
    engine = FakeEngine()
    engine.info = SEEING
    with served(engine, image_limit=2) as one:
        assert one.chat(messages=user(picture(ONE), picture(ONE))).status_code == 200
        error = one.error(400, messages=[*user(picture(ONE)), *user(text("a"), picture(ONE), picture(OTHER))])
        assert error["param"] == "messages[1].content[2].image_url"
        assert "2 images (--image-limit), this one has 3" in error["message"]


def test_the_number_counts_kept_images_too() -> None:
    engine = FakeEngine()
    engine.info = SEEING
    with served(engine, image_limit=1) as one:
        body = {"input": user({"type": "input_image", "image_url": ONE})}
        first = one.post(RESPONSES, body).json()["id"]
        assert one.post(RESPONSES, {"input": "a", "previous_response_id": first}).status_code == 200
        answer = one.post(RESPONSES, {**body, "previous_response_id": first})
        assert answer.json()["error"]["param"] == "input[0].content[0].image_url"


def test_files_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(saved(two()))
    (tmp_path.parent / "outside.png").write_bytes(saved(two()))
    engine = FakeEngine()
    engine.info = SEEING
    with served(engine, media_path=str(tmp_path)) as one:
        assert one.chat(messages=user(picture("file://a.png"))).status_code == 200
        assert seen(one)[1] == [4]
        for name in ("../outside.png", "no.png"):
            error = one.error(400, messages=user(picture(f"file://{name}")))
            assert "there is no image file of this name below --media-path" in error["message"]
            assert str(tmp_path.parent) not in error["message"]


def test_a_body_may_be_larger_where_images_are_seen(seeing: Served) -> None:
    long = {"messages": user(picture("data:image/png;base64," + "A" * (9 << 20)))}
    assert seeing.post(CHAT, long).json()["error"]["code"] == "invalid_image"
    longer = {"messages": user(picture("data:image/png;base64," + "A" * (49 << 20)))}
    assert seeing.post(CHAT, longer).status_code == 413
    seeing.engine.info = INFO
    assert seeing.post(CHAT, long).status_code == 413
    engine = FakeEngine()
    engine.info = SEEING
    with served(engine, max_body=1) as one:
        assert one.post(CHAT, long).status_code == 413


def test_long_images_are_kept_and_long_texts_are_not_gone_on_from(seeing: Served) -> None:
    """A picture of 9 MiB in a kept response is no reason to refuse the next; as much text is."""
    noise = data_url(saved(two(width=2200, height=2200), "PNG", compress_level=0))
    assert len(noise) > 9 << 20
    body = {"input": user({"type": "input_image", "image_url": noise})}
    first = seeing.post(RESPONSES, body).json()["id"]
    assert seeing.post(RESPONSES, {"input": "a", "previous_response_id": first}).status_code == 200
    assert seen(seeing)[1] == [2200]
    first = seeing.post(RESPONSES, {"input": "a" * (9 << 20)}).json()["id"]
    answer = seeing.post(RESPONSES, {"input": "a", "previous_response_id": first})
    assert answer.status_code == 400
    assert "is longer than 8 MiB" in answer.json()["error"]["message"]


def test_what_is_told_of_it(client: OpenAI, seeing: Served, caplog: pytest.LogCaptureFixture) -> None:
    usage = Usage(n_prompt=50, n_cached=1, n_completion=3, n_image=40)
    seeing.engine.script = lambda request: [delta("a"), done(request, usage=usage)]
    caplog.set_level("INFO")
    told = seeing.chat(messages=user(picture(ONE), picture(OTHER)), n=2).json()["usage"]
    assert told["prompt_tokens_details"] == {"cached_tokens": 1, "image_tokens": 40}
    (line,) = logged(caplog, "request")
    assert line["n_images"] == 2
    reply = client.responses.create(model="m", input="a")
    assert reply.usage
    assert reply.usage.input_tokens_details.model_dump()["image_tokens"] == 40


def test_what_the_model_sees_is_told(seeing: Served) -> None:
    def told() -> tuple[Any, ...]:
        models = seeing.http.get("/v1/models").json()
        props = seeing.http.get("/props").json()
        entry = models["data"][0]["architecture"]
        return props["modalities"], entry["input_modalities"], models["models"][0]["capabilities"]

    nothing = {"vision": False, "video": False, "audio": False}
    assert told() == (
        nothing | {"vision": True},
        ["text", "image"],
        ["completion", "tools", "vision", "multimodal"],
    )
    seeing.engine.info = INFO
    assert told() == (nothing, ["text"], ["completion", "tools"])


def test_a_last_turn_that_is_continued_may_follow_images(seeing: Served) -> None:
    turns = [*user(picture(ONE)), {"role": "assistant", "content": "It is"}]
    assert seeing.chat(messages=turns, continue_final_message=True).status_code == 200


def test_streams(seeing: Served) -> None:
    seeing.engine.script = says("It is red.")
    chunks = seeing.events(messages=user(picture(ONE)))
    assert "".join(one["choices"][0]["delta"].get("content") or "" for one in chunks if one["choices"])


def test_the_document_tells_of_images() -> None:
    schema = json.dumps(ChatRequest.model_json_schema())
    assert "image_url" in schema
    assert "--allow-remote-images" in schema
