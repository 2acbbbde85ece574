"""What agents need of `/v1/responses`: thinking that they can show and give back, and functions in namespaces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import orjson
import pytest
from openai import OpenAI

from tests.http.fake import INFO
from tests.http.serving import Served
from tests.http.test_responses import LOOK, PATH, PING, asked, refused
from tests.http.test_tools import CALL, TEMPLATE, THOUGHT, says


@pytest.fixture(autouse=True)
def hermes(server: Served) -> Iterator[None]:
    server.engine.info = replace(INFO, chat_template=TEMPLATE)
    yield
    server.engine.info = INFO


def test_thinking_is_the_summary_where_a_client_asks_for_one(client: OpenAI, server: Served) -> None:
    server.engine.script = says(THOUGHT + "Yes.")
    with client.responses.stream(model="m", input="Hi", reasoning={"summary": "auto"}) as stream:
        seen = list(stream)
        final = stream.get_final_response()
    deltas = [one.delta for one in seen if one.type == "response.reasoning_summary_text.delta"]
    (part,) = final.output[0].summary
    assert "".join(deltas).strip() == part.text.strip() == "Let me\nthink."
    assert (final.output[0].content, final.reasoning.summary) == ([], "auto")
    assert [one.type for one in seen if "reasoning" in one.type and "delta" not in one.type] == [
        "response.reasoning_summary_part.added",
        "response.reasoning_summary_text.done",
        "response.reasoning_summary_part.done",
    ]
    client.responses.create(model="m", input="Go on.", previous_response_id=final.id)
    assert asked(server)[1]["reasoning_content"].strip() == "Let me\nthink."
    plain = client.responses.create(model="m", input="Hi", reasoning={"summary": "none"})
    assert (plain.output[0].summary, plain.reasoning.summary) == ([], None)


def test_thinking_comes_back_from_clients_that_keep_it_themselves(client: OpenAI, server: Served) -> None:
    server.engine.script = says(THOUGHT + "Yes.")
    include = ["reasoning.encrypted_content"]
    made = client.responses.create(model="m", input="Hi", include=include, store=False)
    value = made.output[0].encrypted_content
    assert value
    told = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}]}
    for sealed, expected in (
        (value, "Let me\nthink."),
        (value[:-3], "short"),
        ("c29tZSB0ZXh0", "short"),
        (None, "short"),
    ):
        item = {**told, "encrypted_content": sealed}
        client.responses.create(model="m", input=[item, {"role": "user", "content": "Go on."}])
        assert asked(server)[0]["reasoning_content"].strip() == expected
    assert "encrypted_content" not in server.post(PATH, {"input": "Hi"}).json()["output"][0]


def test_functions_in_namespaces(client: OpenAI, server: Served) -> None:
    """As agents send those of MCP servers: two may have one name, and a call names both."""
    long = "n" * 60
    tools = [
        {"type": "namespace", "name": name, "description": "d", "tools": [LOOK]} for name in ("mcp__a", long)
    ]
    tools[0]["tools"].append({"type": "custom", "name": "x"})
    server.engine.script = says(CALL.replace("get_weather", "mcp__a__get_weather"))
    with client.responses.stream(model="m", input="Hi", tools=[PING, *tools]) as stream:
        (ended,) = [one for one in stream if one.type == "response.function_call_arguments.done"]
        final = stream.get_final_response()
    (call,) = final.output
    assert (call.namespace, call.name, ended.name) == ("mcp__a", "get_weather", "get_weather")
    assert [one.type for one in final.tools] == ["function", "namespace", "namespace"]
    assert [one.name for one in final.tools[1].tools] == ["get_weather", "x"]
    shown = [one["function"]["name"] for one in server.engine.requests[-1].prompt.template_kwargs["tools"]]
    assert shown[:2] == ["ping", "mcp__a__get_weather"]
    assert (shown[2], len(shown[3])) == ("mcp__a__x", 64)
    choice = {"type": "function", "name": "get_weather", "namespace": "mcp__a"}
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    more = {"previous_response_id": final.id, "tool_choice": choice, "tools": tools}
    again = server.post(PATH, {"input": [output], **more}).json()
    assert again["tool_choice"] == choice
    assert asked(server)[1]["tool_calls"][0]["function"]["name"] == "mcp__a__get_weather"
    kept = client.responses.create(model="m", input=[call, output])
    assert next(iter(client.responses.input_items.list(kept.id, order="asc"))).namespace == "mcp__a"
    error = refused(server, tools=[{**LOOK, "name": "mcp__a__get_weather"}, tools[0]])
    assert (error["param"], "a name of its own" in error["message"]) == ("tools", True)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "*** \\"é\\" ***"}', '*** "é" ***'),
        ('{"input": "cut', "cut"),
        ('{"patch": 1}', '{"patch": 1}'),
        ("{", "{"),
    ],
)
def test_tools_that_take_a_text(client: OpenAI, server: Served, arguments: str, text: str) -> None:
    form = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
    tool = {"type": "custom", "name": "patch", "description": "Patches.", "format": form}
    end = "}\n</tool_call>" if arguments.endswith("}") else ""
    server.engine.script = says(f'<tool_call>\n{{"name": "patch", "arguments": {arguments}{end}')
    with client.responses.stream(model="m", input="Hi", tools=[tool]) as stream:
        seen = list(stream)
        final = stream.get_final_response()
    (shown,) = server.engine.requests[-1].prompt.template_kwargs["tools"]
    assert shown["function"]["description"].startswith(
        "Patches.\n\nThe input follows this lark grammar:\nstart"
    )
    (call,) = final.output
    assert (call.type, call.name, call.input) == ("custom_tool_call", "patch", text)
    (delta,) = [one.delta for one in seen if one.type == "response.custom_tool_call_input.delta"]
    (ended,) = [one.input for one in seen if one.type == "response.custom_tool_call_input.done"]
    assert delta == ended == text
    assert final.tools[0].format.definition == "start: /.+/"
    output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
    choice = {"type": "custom", "name": "patch"}
    more = {"previous_response_id": final.id, "tools": [tool], "tool_choice": choice}
    assert server.post(PATH, {"input": [output], **more}).json()["tool_choice"] == choice
    _, calling, result = asked(server)
    assert orjson.loads(calling["tool_calls"][0]["function"]["arguments"]) == {"input": text}
    assert result == {"role": "tool", "content": "done", "tool_call_id": call.call_id}
