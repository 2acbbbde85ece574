"""Requests in the shapes that known clients send them, and the conversation that reaches the engine.

What can be installed is tested itself (`tests/clients`); this is for editors and agents that cannot. The shapes are
those of these programs' requests, cut down to a turn or two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from slipstream.engine.api import Chat
from tests.http.client_shapes import ARGUMENTS, CALLED, CHATS, PARAMETERS, Shape
from tests.http.fake import INFO
from tests.http.serving import Served
from tests.http.test_tools import TEMPLATE

FLAT = {
    "type": "function",
    "name": "read_file",
    "description": "d",
    "strict": False,
    "parameters": PARAMETERS,
}


def item(role: str, text: str, kind: str = "input_text") -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


CODEX = {
    "model": "local",
    "instructions": "You are a coding agent.",
    "tools": [
        FLAT,
        {"type": "web_search", "external_web_access": True},
        {"type": "local_shell"},
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "d",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
        },
        {"type": "namespace", "name": "mcp__docs__", "description": "d", "tools": [{**FLAT, "name": "find"}]},
        {"type": "image_generation", "output_format": "png"},
        {"type": "tool_search", "execution": "client", "description": "d", "parameters": PARAMETERS},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto", "context": "all_turns"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199c1a0-0000-7000-8000-000000000000",
    "text": {"verbosity": "low"},
    "client_metadata": {"session_id": "s"},
}
RESPONSES = (
    Shape(
        "Codex: first turn",
        CODEX
        | {
            "input": [
                item("developer", "<permissions>"),
                item("developer", "<skills>"),
                item("user", "<environment_context>"),
                item("user", "Fix it."),
            ]
        },
        told=[
            ("system", "You are a coding agent.\n\n<permissions>\n\n<skills>"),
            ("user", "<environment_context>"),
            ("user", "Fix it."),
        ],
        path="/v1/responses",
        tools=["read_file", "apply_patch", "mcp__docs__find"],
    ),
    Shape(
        "Codex: after calls",
        CODEX
        | {
            "reasoning": None,
            "input": [
                item("user", "Fix it."),
                {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "gAAAAABo="},
                {**item("assistant", "I look.", "output_text"), "phase": "commentary"},
                {"type": "function_call", "name": "read_file", "arguments": ARGUMENTS, "call_id": "c1"},
                {
                    "type": "function_call_output",
                    "call_id": "c1",
                    "output": [{"type": "input_text", "text": "x = 1"}],
                },
                {
                    "type": "function_call",
                    "name": "find",
                    "namespace": "mcp__docs__",
                    "arguments": ARGUMENTS,
                    "call_id": "c2",
                },
                {"type": "function_call_output", "call_id": "c2", "output": "none"},
                {"type": "custom_tool_call", "call_id": "c3", "name": "apply_patch", "input": "***"},
                {"type": "custom_tool_call_output", "call_id": "c3", "output": "done"},
            ],
        },
        told=[
            ("system", "You are a coding agent."),
            ("user", "Fix it."),
            ("assistant", f"I look.read_file{ARGUMENTS}"),
            ("tool", "x = 1"),
            ("assistant", f"mcp__docs__find{ARGUMENTS}"),
            ("tool", "none"),
            ("assistant", 'apply_patch{"input":"***"}'),
            ("tool", "done"),
        ],
        path="/v1/responses",
        tools=["read_file", "apply_patch", "mcp__docs__find"],
    ),
    Shape(
        "OpenAI's Agents SDK",
        {
            "model": "local",
            "instructions": "You are a coding agent.",
            "input": [
                {"role": "user", "content": "Fix it."},
                {
                    "id": "fc_other_server",
                    "type": "function_call",
                    "status": "completed",
                    "call_id": "call_1",
                    "name": "read_file",
                    "arguments": ARGUMENTS,
                },
                {"type": "function_call_output", "call_id": "call_1", "output": "x = 1"},
            ],
            "include": [],
            "tools": [{**FLAT, "strict": True, "parameters": {**PARAMETERS, "additionalProperties": False}}],
            "prompt_cache_retention": None,
            "max_output_tokens": None,
            "truncation": None,
            "top_logprobs": None,
            "metadata": None,
            "prompt": None,
            "conversation": None,
            "context_management": None,
        },
        told=CALLED,
        path="/v1/responses",
        tools=["read_file"],
    ),
    Shape(
        "n8n over Responses",
        {
            "model": "local",
            "input": [item("system", "You are a coding agent."), item("user", "Fix it.")],
            "text": {"format": {"type": "text"}},
            "tools": [{**FLAT, "strict": None}],
            "temperature": 0.7,
            "top_p": 1,
            "stream": True,
            "user": "u",
            "service_tier": "auto",
        },
        path="/v1/responses",
        tools=["read_file"],
        sampling={"temperature": 0.7},
    ),
)


@pytest.fixture(autouse=True)
def hermes(server: Served) -> Iterator[None]:
    server.engine.info = replace(INFO, chat_template=TEMPLATE)
    yield
    server.engine.info = INFO


def _told(message: Mapping[str, Any]) -> tuple[str, str]:
    calls = [one["function"] for one in message.get("tool_calls") or ()]
    return message["role"], (message["content"] or "") + "".join(
        one["name"] + (one["arguments"] if isinstance(one["arguments"], str) else repr(one["arguments"]))
        for one in calls
    )


@pytest.mark.parametrize("shape", [*RESPONSES, *CHATS], ids=lambda shape: shape.client)
def test_it_is_read_as_it_is_meant(server: Served, shape: Shape) -> None:
    answer = server.post(shape.path, dict(shape.fields))
    assert answer.status_code == 200, answer.text
    request = server.engine.requests[-1]
    if isinstance(request.prompt, Chat):
        assert [_told(one) for one in request.prompt.messages] == list(shape.told)
        shown = request.prompt.template_kwargs.get("tools") or ()
        assert [one["function"]["name"] for one in shown] == list(shape.tools)
    assert {name: getattr(request.sampling, name) for name in shape.sampling} == shape.sampling
    assert list(request.stop) == list(shape.stop)
