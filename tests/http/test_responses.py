"""`/v1/responses` as OpenAI's client sees it: whole, streamed, kept, gone on from, made in the background."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from slipstream.engine.api import Chat, Delta, Failed, Request, TokenLogprob
from slipstream.engine.errors import StepFailed
from slipstream.server.responses.kept import KeptResponses
from tests.http.fake import INFO, delta, done, words
from tests.http.serving import Served, logged, served, until
from tests.http.test_tools import CALL, SECOND, TEMPLATE, THOUGHT, says

PATH = "/v1/responses"
TOKENS = "slipstream:request_generation_tokens_sum"
TEN = "w0 w1 w2 w3 w4 w5 w6 w7 w8 w9 "
LOOK = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather somewhere",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
PING = {"type": "function", "name": "ping"}


@pytest.fixture
def hermes(server: Served) -> Iterator[None]:
    server.engine.info = replace(INFO, chat_template=TEMPLATE)
    yield
    server.engine.info = INFO


def events(server: Served, **fields: Any) -> list[dict[str, Any]]:
    answer = server.post(PATH, {"input": "Hi there", "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    blocks = [one.split("\n") for one in answer.text.split("\n\n") if one]
    found = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in blocks]
    assert all(name == one["type"] for name, one in found)
    return [one for _, one in found]


def refused(server: Served, status: int = 400, **fields: Any) -> dict[str, Any]:
    answer = server.post(PATH, {"input": "Hi there", **fields})
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


def asked(server: Served) -> list[dict[str, Any]]:
    """The messages of the last conversation that reached the engine."""
    prompt = server.engine.requests[-1].prompt
    assert isinstance(prompt, Chat)
    return [dict(one) for one in prompt.messages]


def test_whole(client: OpenAI, server: Served) -> None:
    reply = client.responses.create(
        model="m", input="Hi there", instructions="Be short.", metadata={"a": "b"}
    )
    assert reply.output_text == TEN
    assert (reply.status, reply.metadata, reply.instructions) == ("completed", {"a": "b"}, "Be short.")
    assert reply.usage is not None
    assert (reply.usage.input_tokens, reply.usage.output_tokens, reply.usage.total_tokens) == (5, 10, 15)
    assert reply.usage.input_tokens_details.cached_tokens == 1
    assert asked(server) == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hi there"},
    ]


def test_the_sdk_puts_a_stream_together(client: OpenAI) -> None:
    with client.responses.stream(model="m", input="Hi there") as stream:
        seen = [one.type for one in stream]
        final = stream.get_final_response()
    assert final.output_text == TEN
    assert seen == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 4,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


def test_a_stream_is_numbered_and_says_what_the_whole_says(server: Served) -> None:
    whole = server.post(PATH, {"input": "Hi there", "seed": 3}).json()
    streamed = events(server, seed=3)
    assert [one["sequence_number"] for one in streamed] == list(range(len(streamed)))
    last = streamed[-1]["response"]
    texts = [one["delta"] for one in streamed if one["type"] == "response.output_text.delta"]
    assert "".join(texts) == last["output"][0]["content"][0]["text"] == TEN
    for one in (whole, last):
        one["output"][0].pop("id")
        for name in ("id", "created_at", "completed_at"):
            one.pop(name)
    assert whole == last


@pytest.mark.usefixtures("hermes")
@pytest.mark.parametrize("n_burst", [1, 7, 100])
def test_thinking_text_and_calls_are_items_in_order(client: OpenAI, server: Served, n_burst: int) -> None:
    server.engine.script = says(THOUGHT + "I look.\n" + CALL + "\n" + SECOND, n_burst)
    with client.responses.stream(model="m", input="Hi", tools=[LOOK, PING]) as stream:
        done_items = [one.item.type for one in stream if one.type == "response.output_item.done"]
        final = stream.get_final_response()
    assert [one.type for one in final.output] == done_items
    thought, said, look, ping = final.output
    assert thought.content[0].text.strip() == "Let me\nthink."
    assert said.content[0].text.strip() == "I look."
    assert (look.name, json.loads(look.arguments), ping.name) == ("get_weather", {"city": "Oslo é"}, "ping")
    assert final.usage.output_tokens_details.reasoning_tokens > 0
    whole = client.responses.create(model="m", input="Hi", tools=[LOOK, PING])
    assert [one.type for one in whole.output] == done_items


@pytest.mark.usefixtures("hermes")
def test_results_of_calls_go_back_to_the_model(client: OpenAI, server: Served) -> None:
    server.engine.script = says(THOUGHT + CALL)
    first = client.responses.create(model="m", input="Weather?", tools=[LOOK], tool_choice="auto")
    call = next(one for one in first.output if one.type == "function_call")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    for more in (
        {"input": [output], "previous_response_id": first.id},
        {"input": [{"role": "user", "content": "Weather?"}, *first.output, output]},
        {
            "input": [output],
            "previous_response_id": first.id,
            "tool_choice": {"type": "function", "name": "get_weather"},
        },
    ):
        client.responses.create(model="m", tools=[LOOK], **more)
        user, calling, result = asked(server)
        assert user == {"role": "user", "content": "Weather?"}
        assert calling["reasoning_content"].strip() == "Let me\nthink."
        assert calling["tool_calls"][0]["id"] == call.call_id
        assert result == {"role": "tool", "content": "rain", "tool_call_id": call.call_id}


@pytest.mark.usefixtures("hermes")
def test_an_agents_hosted_tools_are_not_shown(client: OpenAI, server: Served) -> None:
    reply = client.responses.create(model="m", input="Hi", tools=[{"type": "web_search"}, LOOK])
    assert [one.name for one in reply.tools] == ["get_weather"]
    prompt = server.engine.requests[-1].prompt
    assert [one["function"]["name"] for one in prompt.template_kwargs["tools"]] == ["get_weather"]
    assert refused(server, tools=[LOOK], tool_choice={"type": "web_search"})["param"] == "tool_choice"


def test_structured_output(client: OpenAI, server: Served) -> None:
    class Found(BaseModel):
        n: int

    server.engine.script = lambda request: [delta('{"n": 4}'), done(request, 1)]
    parsed = client.responses.parse(model="m", input="Hi", text_format=Found)
    assert parsed.output_parsed == Found(n=4)
    grammar = server.engine.requests[-1].grammar
    assert grammar.kind == "json_schema"
    assert json.loads(grammar.source)["properties"]["n"]["type"] == "integer"
    assert parsed.text.format.type == "json_schema"


def test_log_probabilities(client: OpenAI) -> None:
    include = ["message.output_text.logprobs"]
    with client.responses.stream(model="m", input="Hi", include=include, top_logprobs=2) as stream:
        deltas = [one for one in stream if one.type == "response.output_text.delta"]
        final = stream.get_final_response()
    (part,) = final.output[0].content
    assert "".join(one.token for one in part.logprobs) == TEN
    assert sum(len(one.logprobs) for one in deltas) == len(part.logprobs) == 10
    assert [len(one.top_logprobs) for one in part.logprobs] == [2] * 10


@pytest.mark.usefixtures("hermes")
@pytest.mark.parametrize("opening", ["", THOUGHT])
def test_log_probabilities_go_with_the_text_that_their_tokens_wrote(server: Served, opening: str) -> None:
    """However many tokens come in a step; also of text that was held back, as it could have been a call's marker."""
    said = "a < b,  < or\n\n   <tool_cat>, I look. "
    text = opening + said + CALL + "\n" + SECOND
    tokens = [text[i : i + 3] for i in range(0, len(text), 3)]
    judged = [TokenLogprob(i, one.encode(), -float(i), offset=3 * i) for i, one in enumerate(tokens)]
    fields: dict[str, Any] = {"tools": [LOOK, PING], "include": ["message.output_text.logprobs"]}
    found = []
    for n in (1, 2, 3, 7, 100):
        steps = [
            Delta("".join(some), (1,) * len(some), (None,) * len(some), some, tuple(judged[i : i + n]))
            for i in range(0, len(tokens), n)
            if (some := tuple(tokens[i : i + n]))
        ]
        server.engine.script = lambda request, steps=steps: [*steps, done(request, len(tokens))]
        told = events(server, **fields)
        (message,) = (one for one in told[-1]["response"]["output"] if one["type"] == "message")
        (part,) = message["content"]
        deltas = [one for one in told if one["type"] == "response.output_text.delta"]
        assert [each for one in deltas for each in one["logprobs"]] == part["logprobs"]
        found.append(part)
    assert all(one == found[0] for one in found)
    first, last = len(opening) // 3, (text.index("<tool_call>") - 1) // 3
    places = [-int(one["logprob"]) for one in found[0]["logprobs"]]
    assert places == [*range(places[0], places[-1] + 1)]
    assert places[0] in (first, first + 1)
    assert last - 1 <= places[-1] <= last


def test_a_cut_reply_is_incomplete(client: OpenAI, server: Served) -> None:
    reply = client.responses.create(model="m", input="Hi", max_output_tokens=4)
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert reply.output[0].status == "incomplete"
    assert server.engine.requests[-1].max_tokens == 4
    assert events(server, max_output_tokens=4)[-1]["type"] == "response.incomplete"


def test_a_reply_without_text_has_a_message(server: Served) -> None:
    server.engine.script = lambda request: [done(request, 1)]
    (item,) = server.post(PATH, {"input": "Hi"}).json()["output"]
    assert item["content"][0]["text"] == ""


def test_a_failure_behind_the_first_byte_is_an_event(client: OpenAI, server: Served) -> None:
    server.engine.script = lambda request: [delta("some"), Failed(StepFailed("it broke"))]
    streamed = events(server)
    assert streamed[-1]["type"] == "response.failed"
    response = streamed[-1]["response"]
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
    assert client.responses.retrieve(response["id"]).status == "failed"
    assert server.post(PATH, {"input": "Hi"}).status_code == 500


def test_kept_responses(client: OpenAI) -> None:
    first = client.responses.create(model="m", input=[{"role": "user", "content": f"m{i}"} for i in range(3)])
    assert client.responses.retrieve(first.id) == first
    listed = list(client.responses.input_items.list(first.id, limit=2, order="asc"))
    assert [one.content[0].text for one in listed] == ["m0", "m1", "m2"]
    newest = client.responses.input_items.list(first.id, limit=1)
    assert (newest.data[0].content[0].text, newest.has_more) == ("m2", True)
    client.responses.delete(first.id)
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            ask(first.id)


def test_a_response_goes_on_from_those_before_it(client: OpenAI, server: Served) -> None:
    first = client.responses.create(model="m", input="one", instructions="Only here.")
    second = client.responses.create(model="m", input="two", previous_response_id=first.id)
    client.responses.create(model="m", input="three", previous_response_id=second.id, instructions="Now.")
    told = [(one["role"], one["content"]) for one in asked(server)]
    assert told == [
        ("system", "Now."),
        ("user", "one"),
        ("assistant", TEN),
        ("user", "two"),
        ("assistant", TEN),
        ("user", "three"),
    ]
    client.responses.delete(first.id)
    error = refused(server, 404, previous_response_id=second.id)
    assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")
    assert "one before it" in error["message"]


def test_references_stand_for_kept_items(client: OpenAI, server: Served) -> None:
    first = client.responses.create(model="m", input="one")
    again = [{"role": "user", "content": "one"}, {"type": "item_reference", "id": first.output[0].id}]
    client.responses.create(model="m", input=[*again, {"role": "user", "content": "two"}])
    assert [one["content"] for one in asked(server)] == ["one", TEN, "two"]
    error = refused(
        server, 404, input=[{"role": "user", "content": "a"}, {"type": "item_reference", "id": "msg_0"}]
    )
    assert error["param"] == "input[1].id"


def test_items_of_a_kept_request_can_be_referred_to(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A response is read once, however many of its items are named."""
    made = server.post(PATH, {"input": "one"}).json()
    (item,) = server.http.get(f"{PATH}/{made['id']}/input_items").json()["data"]
    read: list[str] = []
    get = KeptResponses.get

    async def counted(self: KeptResponses, tenant: str, response_id: str) -> Any:
        read.append(response_id)
        return await get(self, tenant, response_id)

    monkeypatch.setattr(KeptResponses, "get", counted)
    names = [item["id"], made["output"][0]["id"], item["id"]]
    server.post(PATH, {"input": [{"type": "item_reference", "id": one} for one in names]})
    assert [one["content"] for one in asked(server)] == ["one", TEN, "one"]
    assert read == [made["id"]]


def test_what_is_not_to_be_kept_is_not(client: OpenAI, server: Served) -> None:
    reply = client.responses.create(model="m", input="one", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(reply.id)
    with served(responses_kept=0) as one:
        response = one.post(PATH, {"input": "a"}).json()
        assert response["store"] is False
        assert refused(one, 404, previous_response_id=response["id"])["param"] == "previous_response_id"
        assert refused(one, background=True)["param"] == "background"


def test_keys_do_not_see_each_others_responses() -> None:
    with served(api_key="mine,yours") as one:
        mine, yours = ({"headers": {"x-api-key": key}} for key in ("mine", "yours"))
        made = one.post(PATH, {"input": "a"}, **mine).json()["id"]
        assert one.http.get(f"{PATH}/{made}", **mine).status_code == 200
        assert one.http.get(f"{PATH}/{made}", **yours).status_code == 404
        answer = one.post(PATH, {"input": "a", "previous_response_id": made}, **yours)
        assert answer.status_code == 404


def test_the_least_used_make_room() -> None:
    with served(responses_kept=2) as one:
        made = [one.post(PATH, {"input": "a"}).json()["id"] for _ in range(2)]
        assert one.http.get(f"{PATH}/{made[0]}").status_code == 200
        one.post(PATH, {"input": "a"})
        assert [one.http.get(f"{PATH}/{which}").status_code for which in made] == [200, 404]


def test_a_file_outlives_the_server(tmp_path: Any) -> None:
    place = tmp_path / "responses.db"
    with served(responses_store=str(place)) as one:
        made = one.post(PATH, {"input": "one"}).json()["id"]
    assert place.stat().st_mode & 0o777 == 0o600
    with served(responses_store=str(place)) as one:
        assert one.post(PATH, {"input": "two", "previous_response_id": made}).status_code == 200
        assert [each["content"] for each in asked(one)] == ["one", TEN, "two"]


def test_a_conversation_that_is_too_long_to_read_is_refused(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = server.post(PATH, {"input": "a" * 3000}).json()["id"]
    second = server.post(PATH, {"input": "b", "previous_response_id": first}).json()["id"]
    monkeypatch.setattr("slipstream.server.responses.kept.MOST_CHAINED", 5000)
    error = refused(server, previous_response_id=second)
    assert (error["param"], "longer than" in error["message"]) == ("previous_response_id", True)


def slowly(request: Request) -> Iterator[Any]:
    yield delta("slow ")
    yield 30.0
    yield done(request, 1)


def test_in_the_background(client: OpenAI) -> None:
    made = client.responses.create(model="m", input="one", background=True)
    assert (made.status, made.background) == ("in_progress", True)
    until(lambda: client.responses.retrieve(made.id).status == "completed")
    assert client.responses.retrieve(made.id).output_text == TEN
    assert client.responses.cancel(made.id).status == "completed"


def test_what_is_made_in_the_background_is_counted_when_it_ends(
    server: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, as any other request; also what failed."""

    def generated() -> float:
        line = next(one for one in server.http.get("/metrics").text.splitlines() if one.startswith(TOKENS))
        return float(line.split()[1])

    before = generated()
    with caplog.at_level("INFO"):
        made = server.post(PATH, {"input": "one", "background": True}).json()["id"]
        until(lambda: generated() == before + 10)
        until(lambda: [one for one in logged(caplog, "request") if one.get("id") == made])
    (line,) = [one for one in logged(caplog, "request") if one["path"] == PATH]
    assert (line["status"], line["n_completion"], line["reason"]) == (200, 10, "stop")
    assert generated() == before + 10
    server.engine.script = lambda request: [ValueError("qzCanary")]
    failing = server.post(PATH, {"input": "one", "background": True}).json()["id"]
    until(lambda: server.http.get(f"{PATH}/{failing}").json()["status"] == "failed")
    server.engine.script = words


def test_the_input_of_a_running_response_is_listed(server: Served) -> None:
    server.engine.script = slowly
    made = server.post(PATH, {"input": "one", "background": True}).json()["id"]
    (item,) = server.http.get(f"{PATH}/{made}/input_items").json()["data"]
    assert item["content"][0]["text"] == "one"
    server.http.post(f"{PATH}/{made}/cancel")
    (kept,) = server.http.get(f"{PATH}/{made}/input_items").json()["data"]
    assert kept == item
    server.engine.script = words


def test_cancelling(client: OpenAI, server: Served) -> None:
    server.engine.script = slowly
    made = client.responses.create(model="m", input="one", background=True)
    assert refused(server, previous_response_id=made.id)["param"] == "previous_response_id"
    with pytest.raises(openai.BadRequestError, match="still being made"):
        client.responses.delete(made.id)
    assert client.responses.cancel(made.id).status == "cancelled"
    until(lambda: not server.engine.running)
    assert client.responses.retrieve(made.id).status == "cancelled"
    server.engine.script = words
    kept = client.responses.create(model="m", input="one")
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(kept.id)


def test_the_oldest_turns_are_left_out_where_asked(client: OpenAI, server: Served) -> None:
    turns = [{"role": "user", "content": f"t{i} " + "word " * 100} for i in range(10)]
    items = [{"role": "system", "content": "Be short."}, *turns]
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="m", input=items)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
    client.responses.create(model="m", input=items, truncation="auto")
    told = [one["content"].split(" ")[0] for one in asked(server)]
    assert told == ["Be", "t5", "t6", "t7", "t8", "t9"]
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model="m", input="word " * 600, truncation="auto")


def test_counting(client: OpenAI) -> None:
    assert client.responses.input_tokens.count(model="m", input="Hi there").input_tokens == 3


def test_extensions_work_as_in_a_chat(server: Served) -> None:
    fields = {
        "seed": 5,
        "top_k": 3,
        "stop": ["x"],
        "speculative.n_max": 2,
        "prediction": {"type": "content", "content": "w0"},
    }
    response = server.post(PATH, {"input": "Hi", **fields}).json()
    request = server.engine.requests[-1]
    assert (request.sampling.seed, request.sampling.top_k, request.stop) == (5, 3, ("x",))
    assert (request.speculate.n_max, request.prediction) == (2, "w0")
    assert (response["seed"], response["speculative"]["n_max"]) == (5, 2)


def test_progress_and_times(server: Served) -> None:
    streamed = events(server, return_progress=True, timings_per_token=True)
    far = [one for one in streamed if "prompt_progress" in one]
    assert [(one["type"], one["prompt_progress"]["processed"]) for one in far] == [
        ("response.in_progress", 1),
        ("response.in_progress", 2),
        ("response.in_progress", 3),
    ]
    deltas = [one for one in streamed if one["type"] == "response.output_text.delta"]
    assert [one["timings"]["predicted_n"] for one in deltas] == [3, 6, 9, 10]
    assert streamed[-1]["timings"] == streamed[-1]["response"]["timings"]
    assert not any("timings" in one or "prompt_progress" in one for one in events(server))
