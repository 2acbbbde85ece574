"""The OpenAPI document: valid, complete, and what the server really does."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute
from openapi_spec_validator import validate
from pydantic import BaseModel, BeforeValidator, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from slipstream.engine.api import Request
from slipstream.engine.settings import Settings
from slipstream.server.anthropic.wire import CountRequest, MessagesRequest
from slipstream.server.describe import api_page
from slipstream.server.describe.openapi import STATUSES
from slipstream.server.http import gate
from slipstream.server.http.app import create_app
from slipstream.server.http.gate import Gate
from slipstream.server.native.generation import NativeCompletion
from slipstream.server.native.wire import Detokenize, EraseSlot, SlotFile, Tokenize
from slipstream.server.openai import refuse
from slipstream.server.openai.absent import ABSENT
from slipstream.server.openai.wire import ChatRequest, CompletionRequest, Speculative
from slipstream.server.responses.wire import ResponsesRequest
from tests.http.document import DOCUMENT, event_schema, hold, hold_events
from tests.http.fake import FakeEngine, Step, delta, done
from tests.http.serving import Served, chat, served

ROOT = Path(__file__).parents[2]
MESSAGES = "/v1/messages"  # its stream has no options
BODILESS = ("/v1/responses/{response_id}/cancel",)  # of the routes that are posted to
BODIES = (
    CountRequest,
    MessagesRequest,
    ResponsesRequest,
    ChatRequest,
    CompletionRequest,
    Tokenize,
    Detokenize,
    SlotFile,
    EraseSlot,
)


OPERATIONS = {
    (path, method): one for path, methods in DOCUMENT["paths"].items() for method, one in methods.items()
}
SCHEMAS = DOCUMENT["components"]["schemas"]


@cache
def served_routes() -> list[APIRoute]:
    app = create_app(Gate(FakeEngine()), Settings(model="fake"))
    routes = [route for router in app.routes for route in router.original_router.routes]
    assert all(isinstance(route, APIRoute) for route in routes)
    return routes


def fields_of(kind: Any, seen: set[type]) -> Iterator[tuple[str, str, FieldInfo]]:
    """(model, name, field) of a model and of all models in it."""
    if kind in seen:
        return
    seen.add(kind)
    for name, one in kind.model_fields.items():
        yield kind.__name__, name, one
        yield from (found for inner in models_in(one.annotation) for found in fields_of(inner, seen))


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in getattr(annotation, "__args__", ()):
        yield from models_in(inner)


FIELDS = [one for seen in [set[type]()] for model in BODIES for one in fields_of(model, seen)]


def test_it_is_valid() -> None:
    validate(json.loads(json.dumps(DOCUMENT)))


def test_every_route_is_in_it_and_nothing_else() -> None:
    routes = {
        (route.path.replace(":path}", "}"), method.lower())
        for route in served_routes()
        if route.include_in_schema
        for method in route.methods
    }
    assert routes == set(OPERATIONS)
    assert len({one["operationId"] for one in OPERATIONS.values()}) == len(OPERATIONS)


def test_only_absent_endpoints_are_left_out() -> None:
    hidden = {route.path for route in served_routes() if not route.include_in_schema}
    assert hidden == {path for _, paths, _ in ABSENT for path in paths}


def test_every_operation_says_what_it_takes_and_answers() -> None:
    """FastAPI's generator makes do with a route that declares nothing."""
    for (path, method), one in OPERATIONS.items():
        route = next(
            each for each in served_routes() if each.path_format == path and method.upper() in each.methods
        )
        assert route.summary, path
        assert ("requestBody" in one) == (method == "post" and path not in BODILESS), path
        success = one["responses"]["200"].get("content", {})
        if method == "head":
            assert not success, path
        elif path != "/openapi.json":
            assert success, path
            assert all(each.get("schema") != {} for each in success.values()), path
        for status, response in one["responses"].items():
            assert ("retry-after" in response["headers"]) == (status in ("429", "503")), path


def test_it_says_which_paths_need_no_key() -> None:
    with served(api_key="secret") as one:
        for (path, method), operation in OPERATIONS.items():
            needs_key = one.http.request(method, path).status_code == 401
            assert ("401" in operation["responses"]) == needs_key, path
            assert operation.get("security") == (None if needs_key else []), path


def test_every_reference_leads_somewhere() -> None:
    names = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(DOCUMENT)))
    assert names == set(SCHEMAS)


def test_every_field_has_a_meaning() -> None:
    assert not [f"{model}.{name}" for model, name, one in FIELDS if not one.description]
    bodies = [SCHEMAS[model.__name__]["properties"] for model in BODIES]
    assert not [name for fields in bodies for name, one in fields.items() if not one.get("description")]


def test_every_reader_says_what_it_takes() -> None:
    readers = [
        (f"{model}.{name}", one)
        for model, name, field in FIELDS
        for one in field.metadata
        if isinstance(one, BeforeValidator)
    ]
    assert readers
    assert not [name for name, one in readers if one.json_schema_input_type is PydanticUndefined]


def test_every_status_of_the_server_is_in_it() -> None:
    made = {
        node.args[0].value
        for path in (ROOT / "server").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Refused" and node.args
        if isinstance(node.args[0], ast.Constant)
    }
    assert made == set(STATUSES)
    listed = {int(status) for one in OPERATIONS.values() for status in one["responses"]}
    # 405 and 431 are no operation's: of other methods, and before any path.
    assert listed == {200, *STATUSES} - {405, 431}


def codes_in(tree: ast.AST) -> Iterator[str]:
    """Every error code that a module of the server names: where an error is made, and as a default."""
    places = {"Refused": 2, "_request": 0, "_failed": 0, "unavailable": 1}
    for node in ast.walk(tree):
        found: list[Any] = []
        if isinstance(node, ast.Call):
            place = places.get(getattr(node.func, "id", ""), len(node.args))
            found = [
                *node.args[place : place + 1],
                *(one.value for one in node.keywords if one.arg == "code"),
            ]
        if isinstance(node, ast.FunctionDef):
            found = [
                default
                for one, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
                if one.arg == "code"
            ]
        yield from (one.value for one in found if isinstance(one, ast.Constant) and one.value is not None)


def test_every_code_of_the_server_is_in_it() -> None:
    named = {
        code for path in (ROOT / "server").rglob("*.py") for code in codes_in(ast.parse(path.read_text()))
    }
    assert {code for _, codes in STATUSES.values() for code in codes} == named | set(gate.REASONS)


def test_refused_and_ignored_fields_are_told() -> None:
    fields = SCHEMAS["ChatRequest"]["properties"]
    assert set(fields) >= {*refuse.REFUSED, *refuse.IGNORED}
    assert fields["best_of"]["enum"] == [1, None]
    assert fields["speculative.n_max"]["description"] == Speculative.model_fields["n_max"].description


def test_schemas_know_what_readers_take() -> None:
    stop = SCHEMAS["ChatRequest"]["properties"]["stop"]["anyOf"]
    assert {"type": "string", "minLength": 1, "maxLength": 256} in stop
    assert SCHEMAS["ChatRequest"]["required"] == ["messages"]
    assert SCHEMAS["ChatRequest"]["properties"]["seed"]["anyOf"][0]["maximum"] == 2**64 - 1
    assert "additionalProperties" not in SCHEMAS["ChatCompletion"]
    assert SCHEMAS["Speculative"]["additionalProperties"] is False
    assert not [name for name in SCHEMAS if "__" in name]  # two models of one name


def test_it_is_served_behind_the_key() -> None:
    with served(api_key="secret") as one:
        assert one.http.get("/openapi.json").status_code == 401
        answer = one.http.get("/openapi.json", headers={"authorization": "Bearer secret"})
    told = answer.json()
    assert told.pop("security") == [{"bearer": []}, {"header": []}]
    assert told == {
        key: value for key, value in json.loads(json.dumps(DOCUMENT)).items() if key != "security"
    }
    with served() as one:
        assert {} in one.http.get("/openapi.json").json()["security"]
    with served(api_prefix="/llm") as one:
        assert one.http.get("/llm/openapi.json").json()["servers"] == [{"url": "/llm"}]


# What a request asks for, and the path. Every field that adds to a reply is among them.
ASKS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", chat()),
    (
        "/v1/chat/completions",
        chat(n=2, logprobs=True, top_logprobs=3, spec_detail=True, return_token_ids=True),
    ),
    ("/v1/chat/completions", chat(speculative={"types": "ngram-simple", "n_max": 2, "ngram_size_n": 3})),
    ("/v1/chat/completions", chat(prediction={"type": "content", "content": "w0 w1"}, service_tier="auto")),
    ("/chat/completions", chat(max_tokens=1, stop="w9")),
    ("/v1/completions", {"prompt": "a b"}),
    ("/v1/completions", {"prompt": ["a", [5, 6]], "n": 2, "logprobs": 2, "spec_detail": True}),
    ("/v1/completions", {"prompt": "a b", "echo": True, "logprobs": 1, "return_token_ids": True}),
    ("/v1/completions", {"prompt": "a b", "speculative": {"types": "none"}}),
    ("/v1/chat/completions/input_tokens", chat()),
    ("/v1/completions/input_tokens", {"prompt": "a b"}),
    ("/apply-template", chat()),
    ("/tokenize", {"content": "ab"}),
    ("/tokenize", {"content": "ab", "with_pieces": True}),
    ("/tokenize", {"prompt": "ab"}),
    ("/detokenize", {"tokens": [65]}),
    ("/v1/messages", {"messages": chat()["messages"], "max_tokens": 3}),
    ("/v1/messages/count_tokens", {"messages": chat()["messages"]}),
)
# What streams do not have.
WHOLE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", chat(prompt_logprobs=1)),
    ("/v1/completions", {"prompt": "a b", "prompt_logprobs": 0}),
)


@pytest.mark.parametrize(("path", "body"), [*ASKS, *WHOLE])
def test_replies(server: Served, path: str, body: dict[str, Any]) -> None:
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    hold(path, 200, answer.content)


@pytest.mark.parametrize(
    ("path", "body"), [one for one in ASKS if event_schema(one[0]) and one[0] != MESSAGES]
)
def test_events(server: Served, path: str, body: dict[str, Any]) -> None:
    chunks = server.events(
        path, **body, stream_options={"include_usage": True, "continuous_usage_stats": True}
    )
    assert chunks  # held against the document where they were read


CALLING = (
    "<think>\nhm\n</think>\n\nSee: ",
    '<tool_call>\n{"name": "look", "arguments": {"n": 1}}\n</tool_call>',
)


def calling(request: Request) -> Iterator[Step]:
    yield from (delta(text) for text in CALLING)
    yield done(request, 2)


def test_tool_calls_and_reasoning() -> None:
    engine = FakeEngine(calling)
    engine.info = dataclasses.replace(
        engine.info, chat_template='{{ tools }}<tool_call>\n{"name": <think></think>{{ messages }}'
    )
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    with served(engine, chat_format="hermes") as one:
        whole = one.chat(tools=tools)
        hold("/v1/chat/completions", 200, whole.content)
        (choice,) = whole.json()["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["reasoning_content"] == "hm"
        chunks = one.events(tools=tools)
    assert any("tool_calls" in each["delta"] for chunk in chunks for each in chunk["choices"])


@pytest.mark.parametrize(
    "path",
    [
        "/health",
        "/v1/health",
        "/live",
        "/ping",
        "/version",
        "/load",
        "/slots",
        "/speculation",
        "/props",
        "/tokenizer_info",
        "/v1/models",
        "/models",
    ],
)
def test_looks(server: Served, path: str) -> None:
    hold(path, 200, server.http.get(path).content)


def test_slots_in_files() -> None:
    with served(slot_save_path="/saved") as one:
        one.chat()
        for action in ("save", "restore", "erase"):
            body = {} if action == "erase" else {"filename": "talk"}
            answer = one.post(f"/slots/0?action={action}", body)
            assert answer.status_code == 200, answer.text
            hold("/slots/{slot}", 200, answer.content)


def test_failures(server: Served) -> None:
    for path, status, answer in (
        ("/v1/chat/completions", 400, server.chat(n=0)),
        ("/v1/chat/completions", 400, server.chat(messages=[{"role": "user", "content": "a " * 600}])),
        ("/v1/chat/completions", 415, server.http.post("/v1/chat/completions", content=b"{}")),
        ("/v1/models/{name}", 404, server.http.get("/v1/models/other")),
        ("/slots/{slot}", 404, server.post("/slots/0?action=erase")),
    ):
        assert answer.status_code == status
        hold(path, status, answer.content)
    with served(loaded=False) as one:
        for path in ("/health", "/slots"):
            hold(path, 503, one.http.get(path).content)


def test_what_is_not_told_is_seen() -> None:
    with pytest.raises(ValidationError, match="Extra inputs"):
        hold("/live", 200, b'{"status": "ok", "step_age_s": 0, "more": 1}')
    with pytest.raises(ValidationError):
        hold_events("/v1/completions", 'data: {"id": 1}\n\ndata: [DONE]\n\n')
    with pytest.raises(AssertionError, match="may not answer 418"):
        hold("/live", 418, b"{}")


def test_the_page_has_what_some_requests_alone_are_refused() -> None:
    """`n_cmpl` and the like are refused in a chat, and llama-server's own completions have them."""
    for model in (NativeCompletion, Tokenize):
        table = api_page.page().partition(f"### {model.__name__}\n")[2].partition("\n### ")[0]
        names = [one for one in model.model_fields if one != "speculative"]
        assert [one for one in names if f"| `{one}`" not in table] == []


def test_the_page_is_fresh() -> None:
    assert api_page.main([str(ROOT / "docs" / "api.md"), "--check"]) == 0
