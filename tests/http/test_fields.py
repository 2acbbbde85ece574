"""Request fields of vLLM, llama-server and OpenAI that shape a reply or its ending; counting; names of endpoints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import openai
import pytest
from openai import OpenAI

from slipstream.engine.api import Infill
from tests.http.fake import INFO, N_CTX, done
from tests.http.serving import Served, chat

HI = [{"role": "user", "content": "Hi there"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {CHAT: chat(), TEXT: {"prompt": "a b"}}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("keeps_stop", ["include_stop_str_in_output", "no_stop_trim"])
def test_when_a_reply_ends(server: Served, path: str, keeps_stop: str) -> None:
    fields = {
        "min_tokens": 4,
        "max_tokens": 9,
        "stop_token_ids": [7, 8],
        "ignore_eos": True,
        keeps_stop: True,
    }
    assert server.post(path, {**BODIES[path], **fields}).status_code == 200
    request = server.engine.requests[-1]
    assert (request.min_tokens, request.max_tokens, request.stop_token_ids) == (4, 9, (7, 8))
    assert (request.sampling.ignore_eos, request.include_stop) == (True, True)
    for nothing in (
        {},
        {"min_tokens": None, "stop_token_ids": None},
        {"min_tokens": 0, "stop_token_ids": [], keeps_stop: False},
    ):
        assert server.post(path, {**BODIES[path], **nothing}).status_code == 200
        request = server.engine.requests[-1]
        assert (request.min_tokens, request.stop_token_ids, request.include_stop) == (0, (), False)


def test_no_fewer_tokens_than_there_may_be(server: Served) -> None:
    assert server.chat(min_tokens=4, max_tokens=4).status_code == 200
    assert server.chat(min_tokens=4, max_tokens=3, max_completion_tokens=4).status_code == 200
    server.engine.requests.clear()
    error = server.error(400, min_tokens=4, max_completion_tokens=3)
    assert (error["param"], error["message"]) == (
        "min_tokens",
        "min_tokens: must not be above max_tokens (3)",
    )
    assert not server.engine.requests


@pytest.mark.parametrize("path", BODIES)
def test_control_tokens(server: Served, path: str) -> None:
    for value, wanted in ((False, False), (True, True), (None, True)):
        assert server.post(path, {**BODIES[path], "skip_special_tokens": value}).status_code == 200
        assert server.engine.requests[-1].skip_special is wanted


def test_token_ids_of_a_chat(client: OpenAI, server: Served) -> None:
    asked: dict[str, Any] = {"model": "m", "messages": HI, "n": 2, "extra_body": {"return_token_ids": True}}
    prompt = [1, 102, 105]
    whole = client.chat.completions.create(**asked)
    assert whole.model_extra is not None
    assert whole.model_extra["prompt_token_ids"] == prompt
    assert [choice.model_extra["token_ids"] for choice in whole.choices] == [list(range(10))] * 2
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert [chunk.model_extra.get("prompt_token_ids") for chunk in chunks] == [prompt] + [None] * (
        len(chunks) - 1
    )
    ids: dict[int, list[int]] = {0: [], 1: []}
    for chunk in chunks:
        assert not chunk.choices[0].delta.model_extra
        ids[chunk.choices[0].index] += chunk.choices[0].model_extra.get("token_ids", [])
    assert ids == {0: list(range(10)), 1: list(range(10))}
    with client.chat.completions.stream(**asked) as stream:
        assert stream.get_final_completion().choices[1].message.content == whole.choices[1].message.content
    plain = client.chat.completions.create(model="m", messages=HI)
    assert "prompt_token_ids" not in plain.model_extra
    assert "token_ids" not in plain.choices[0].model_extra


def test_the_only_service_tier(client: OpenAI, server: Served) -> None:
    assert (
        client.chat.completions.create(model="m", messages=HI, service_tier="flex").service_tier == "default"
    )
    assert client.chat.completions.create(model="m", messages=HI).service_tier is None
    assert {one["service_tier"] for one in server.events(service_tier="auto")} == {"default"}


def test_who_asks_changes_nothing(server: Served) -> None:
    fields = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "safety_identifier": "s",
        "verbosity": "low",
    }
    plain, told = (server.chat(seed=1, **more).json() for more in ({}, fields))
    for body in (plain, told):
        body.pop("id")
        body.pop("created")
    assert plain == told


@pytest.mark.parametrize(
    "fields",
    [
        {"return_tokens": True},
        {"lora": [{"id": 0, "scale": 1}]},
        {"post_sampling_probs": True},
        {"truncate_prompt_tokens": 5},
        {"use_beam_search": True},
        {"audio": {"voice": "x"}},
        {"modalities": ["audio"]},
        {"best_of": 2},
        {"return_tokens_as_token_ids": True},
        {"stop_regex": "[0-9]"},
        {"parse_tool_calls": False},
        {"lora_path": "x"},
        {"mm_processor_kwargs": {"max_pixels": 4}},
        {"kv_transfer_params": {"do_remote_decode": True}},
    ],
    ids=lambda fields: next(iter(fields)),
)
@pytest.mark.parametrize("path", BODIES)
def test_what_is_not_supported_is_refused_by_name(server: Served, path: str, fields: dict[str, Any]) -> None:
    answer = server.post(path, {**BODIES[path], **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "unsupported_value")
    assert error["param"] == next(iter(fields))
    assert "grammar" not in error["message"], "none of these is about grammars"
    assert not server.engine.requests


def test_tokens_around_a_prompt(server: Served) -> None:
    """A server whose tokenizer adds none is asked for nothing by `add_special_tokens: false`."""
    for path, value in ((CHAT, True), (TEXT, False)):
        answer = server.post(path, {**BODIES[path], "add_special_tokens": value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "add_special_tokens")
    assert not server.engine.requests
    for path, value in ((CHAT, False), (TEXT, True)):
        assert server.post(path, {**BODIES[path], "add_special_tokens": value}).status_code == 200
    server.engine.info = replace(INFO, bos_token=None)
    try:
        assert server.post(TEXT, {**BODIES[TEXT], "add_special_tokens": False}).status_code == 200
    finally:
        server.engine.info = INFO


@pytest.mark.parametrize(
    ("path", "body", "n_tokens"),
    [
        (f"{CHAT}/input_tokens", chat(), 3),
        ("/chat/completions/input_tokens", chat(n=2), 3),
        (f"{TEXT}/input_tokens", {"prompt": "a b c"}, 4),
        (f"{TEXT}/input_tokens", {"prompt": ["a", [7, 8, 9]], "n": 2}, 5),
        (f"{TEXT}/input_tokens", {"prompt": "a b", "suffix": "c"}, 4),
    ],
)
def test_prompts_are_counted(server: Served, path: str, body: dict[str, Any], n_tokens: int) -> None:
    assert server.post(path, body).json() == {"object": "response.input_tokens", "input_tokens": n_tokens}
    assert not server.engine.requests


def test_what_is_too_long_to_fit_is_counted_too(server: Served) -> None:
    long = "a " * 2 * N_CTX
    n = 2 * N_CTX + 1
    for path, body in (
        (f"{CHAT}/input_tokens", chat(messages=[{"role": "user", "content": long}])),
        (f"{TEXT}/input_tokens", {"prompt": long}),
        ("/v1/responses/input_tokens", {"input": long}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": long}]}),
    ):
        assert server.post(path, body).json()["input_tokens"] == n


def test_counting_refuses_what_generating_refuses(server: Served) -> None:
    for path in (CHAT, TEXT):
        for fields, param in (({"temperature": -1}, "temperature"), ({"mirostat": 2}, "mirostat")):
            answers = [server.post(one, {**BODIES[path], **fields}) for one in (path, f"{path}/input_tokens")]
            assert [one.status_code for one in answers] == [400, 400]
            assert answers[0].json() == answers[1].json()
            assert answers[1].json()["error"]["param"] == param


def test_a_count_is_what_usage_tells(server: Served) -> None:
    for path in (CHAT, TEXT):
        counted = server.post(f"{path}/input_tokens", BODIES[path]).json()["input_tokens"]
        assert server.post(path, BODIES[path]).json()["usage"]["prompt_tokens"] == counted
    assert not any(isinstance(one.prompt, Infill) for one in server.engine.requests)


def test_names_without_a_version(server: Served) -> None:
    assert server.post("/chat/completions", chat()).json()["object"] == "chat.completion"
    assert server.http.get("/models").json() == server.http.get("/v1/models").json()


def test_model_names_have_slashes(server: Served) -> None:
    for name in ("fake/model", "fake%2Fmodel"):
        assert server.http.get(f"/v1/models/{name}").json()["id"] == "fake/model"
    for name in ("fake", "fake/", "fake/model/", "/fake/model", "model", "fake/model/x"):
        answer = server.http.get(f"/v1/models/{name}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("/v1/embeddings", "embeddings"),
        ("/embedding", "embeddings"),
        ("/v1/rerank", "reranking"),
        ("/v1/audio/transcriptions", "audio"),
        ("/v1/audio/speech", "audio"),
        ("/v1/images/generations", "images"),
        ("/v1/load_lora_adapter", "LoRA"),
        ("/score", "scoring"),
        ("/generate", "use /v1/completions"),
    ],
)
def test_absent_endpoints_are_named(server: Served, path: str, what: str) -> None:
    for answer in (server.http.get(path), server.post(path, {"input": "x"})):
        assert answer.status_code == 404, "a client would try a 5xx again"
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("not_found_error", "not_supported")
        assert what in error["message"]


def test_the_client_sees_an_absent_endpoint(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.embeddings.create(model="m", input="x")
    assert caught.value.code == "not_supported"


def test_a_stop_string_is_told(server: Served) -> None:
    """Where a choice ends, null if it ended by itself."""
    server.engine.script = lambda request: [done(request, 1, stop_string="x")]
    for path in (CHAT, TEXT):
        choice = server.post(path, {**BODIES[path], "stop": "x"}).json()["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "x")
    server.engine.script = lambda request: [done(request, 1)]
    for path in (CHAT, TEXT):
        choice = server.post(path, {**BODIES[path], "stop": "x"}).json()["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
        last = [one for event in server.events(path, **BODIES[path]) for one in event["choices"]][-1]
        assert (last["finish_reason"], last["stop_reason"]) == ("stop", None)


@pytest.mark.parametrize("path", BODIES)
def test_whole_numbers_may_be_written_as_floats(server: Served, path: str) -> None:
    fields = {"max_tokens": 8.0, "top_k": 5.0, "seed": 3.0, "n": 1.0, "min_tokens": 2.0, "temperature": 1.0}
    assert server.post(path, {**BODIES[path], **fields, "speculative.n_max": 4.0}).status_code == 200
    request = server.engine.requests[-1]
    assert (request.max_tokens, request.min_tokens, request.speculate.n_max) == (8, 2, 4)
    assert (request.sampling.top_k, request.sampling.seed, request.sampling.temperature) == (5, 3, 1.0)
