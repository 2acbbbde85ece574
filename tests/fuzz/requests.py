"""Valid requests to begin from: every field with a value that asks for something, in small portions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "n": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["name", "n"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look", "description": "looks", "parameters": SCHEMA}}
TURNS = [
    {"role": "system", "content": "Be short."},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "Write the docstring:"},
            {"type": "text", "text": "def f(x): ..."},
        ],
    },
    {"role": "assistant", "content": "What does it do?", "reasoning_content": "hm"},
    {"role": "user", "content": "It adds.", "name": "me"},
]
CALLED = [
    {"role": "user", "content": "Look."},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "look", "arguments": '{"name": "a", "n": 1}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "seen"},
]


def chat(**fields: Any) -> tuple[str, Mapping[str, Any]]:
    return "/v1/chat/completions", {"messages": TURNS[:2], "max_tokens": 6, **fields}


def text(**fields: Any) -> tuple[str, Mapping[str, Any]]:
    return "/v1/completions", {"prompt": "def add(a, b):\n", "max_tokens": 6, **fields}


ITEMS = [
    {"role": "developer", "content": "Be short."},
    {"role": "user", "content": [{"type": "input_text", "text": "Look."}]},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"type": "custom_tool_call", "call_id": "call_2", "name": "apply", "input": "x"},
    {"type": "custom_tool_call_output", "call_id": "call_2", "output": "done"},
    {"type": "reasoning", "summary": [], "encrypted_content": "slipstream.1.aG0="},
    {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"name": "a", "n": 1}'},
    {"type": "function_call_output", "call_id": "c1", "output": "seen"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "There."}]},
    {"role": "user", "content": "And?"},
]


def response(**fields: Any) -> tuple[str, Mapping[str, Any]]:
    return "/v1/responses", {
        "input": "Write the docstring:\n\ndef f(x): ...",
        "max_output_tokens": 6,
        **fields,
    }


def native(**fields: Any) -> tuple[str, Mapping[str, Any]]:
    return "/completion", {"prompt": "def add(a, b):\n", "n_predict": 6, **fields}


BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "Look."}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"name": "a", "n": 1}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "seen"}]},
            {"type": "text", "text": "And?"},
        ],
    },
]
CUSTOM = {"name": "look", "description": "looks", "input_schema": SCHEMA}


def message(**fields: Any) -> tuple[str, Mapping[str, Any]]:
    return "/v1/messages", {"messages": BLOCKS[:1], "max_tokens": 6, **fields}


def schema(**fields: Any) -> Mapping[str, Any]:
    told = {"name": "thing", "schema": SCHEMA, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": told}, "max_tokens": 40, **fields}


REQUESTS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    chat(),
    chat(messages=TURNS, model="demo", stream=True, stream_options={"include_usage": True}),
    chat(n=2, seed=7, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, stream=True),
    chat(
        repeat_penalty=1.1,
        repeat_last_n=8,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        logit_bias={"7": -100},
    ),
    chat(stop=["\n\n", "def"], stop_token_ids=[3], min_tokens=2, ignore_eos=True),
    chat(stop="def", include_stop_str_in_output=True),
    chat(allowed_token_ids=[3, 5, 7], bad_words=["def", "import os"]),
    chat(logprobs=True, top_logprobs=3, return_token_ids=True, spec_detail=True, stream=True),
    chat(speculative={"types": ["draft-model"], "n_max": 4, "n_min": 1, "p_min": 0.1}),
    chat(prediction={"type": "content", "content": [{"type": "text", "text": "def f(x):"}]}),
    chat(chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low", cache_prompt=False),
    chat(
        messages=[*TURNS[:2], {"role": "assistant", "content": "It"}],
        add_generation_prompt=False,
        continue_final_message=True,
    ),
    chat(**schema()),
    chat(**schema(stream=True, temperature=1.0)),
    chat(response_format={"type": "json_object"}),
    chat(tools=[TOOL], tool_choice="required", max_tokens=40),
    chat(
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "look"}},
        stream=True,
        max_tokens=40,
    ),
    chat(messages=CALLED, tools=[TOOL], parallel_tool_calls=False),
    text(),
    text(prompt=["a", [5, 6, 7]], n=2, stream=True),
    text(echo=True, logprobs=2, max_tokens=1),
    text(prompt_logprobs=2, max_tokens=1),
    chat(prompt_logprobs=0, logprobs=True),
    text(prompt=[5, 6, 7], stop="x", cache_salt="s", stream=True, **{"speculative.n_max": 2}),
    response(),
    response(
        input=ITEMS,
        instructions="Be short.",
        stream=True,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        truncation="auto",
        metadata={"a": "b"},
    ),
    response(
        text={"format": {"type": "json_schema", "name": "thing", "schema": SCHEMA}}, max_output_tokens=40
    ),
    response(
        tools=[
            {"type": "function", "name": "look", "parameters": SCHEMA},
            {"type": "web_search"},
            {
                "type": "custom",
                "name": "apply",
                "format": {"type": "grammar", "syntax": "regex", "definition": "a"},
            },
            {"type": "namespace", "name": "mcp", "tools": [{"type": "function", "name": "find"}]},
        ],
        tool_choice={"type": "function", "name": "look"},
        reasoning={"effort": "low", "summary": "auto"},
        include=["reasoning.encrypted_content"],
        max_output_tokens=40,
        store=False,
    ),
    response(background=True, parallel_tool_calls=False),
    message(),
    message(
        messages=BLOCKS,
        system=[{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}],
        tools=[CUSTOM],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        stream=True,
        metadata={"user_id": "u"},
    ),
    message(tools=[CUSTOM], tool_choice={"type": "tool", "name": "look"}, max_tokens=40, stream=True),
    message(
        system="Be short.",
        stop_sequences=["\n\n"],
        temperature=0.5,
        top_k=5,
        top_p=0.9,
        thinking={"type": "enabled", "budget_tokens": 1024, "display": "summarized"},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
        seed=1,
        speculative={"n_max": 2},
    ),
    message(messages=[BLOCKS[0], {"role": "assistant", "content": "It"}], stream=True),
    ("/v1/messages/count_tokens", {"messages": BLOCKS, "tools": [CUSTOM]}),
    ("/v1/responses/input_tokens", {"input": ITEMS}),
    native(),
    native(stream=True, return_progress=True, timings_per_token=True, n_probs=2, id_slot=1),
    native(prompt=["a", 7, "b"], n_cmpl=2, samplers=["top_k", "temperature"], repeat_last_n=-1),
    native(
        prompt=[[5, "a"], "b"],
        logit_bias=[["a", False], [7, 1.5]],
        response_fields=["content", "timings/prompt_n"],
        return_tokens=True,
    ),
    native(n_indent=4, t_max_predict_ms=500, samplers="kpt", **{"speculative.n_max": 2}),
    (
        "/infill",
        {
            "input_prefix": "def f(",
            "input_suffix": "",
            "prompt": "x",
            "n_predict": 6,
            "input_extra": [{"filename": "a.py", "text": "x = 1"}],
        },
    ),
    ("/v1/chat/completions/input_tokens", {"messages": TURNS}),
    ("/apply-template", {"messages": TURNS}),
    ("/tokenize", {"content": "def add(a, b):", "with_pieces": True, "add_special": True}),
    ("/tokenize", {"prompt": "def add(a, b):", "add_special_tokens": False}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
)
