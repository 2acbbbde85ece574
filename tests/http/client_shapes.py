"""Requests of editors and chat programs, in the shapes that these send them, cut down to a turn or two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SYSTEM, ASKED = (
    {"role": "system", "content": "You are a coding agent."},
    {"role": "user", "content": "Fix it."},
)
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
READ = {"type": "function", "function": {"name": "read_file", "description": "d", "parameters": PARAMETERS}}
ARGUMENTS = '{"path": "a.py"}'
CALL = {"id": "call_1", "type": "function", "function": {"name": "read_file", "arguments": ARGUMENTS}}
FOUND = {"role": "tool", "tool_call_id": "call_1", "content": "x = 1"}


def said(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}]


@dataclass(frozen=True)
class Shape:
    """`told`: role and text of each message of the conversation, a call as its name and arguments."""

    client: str
    fields: Mapping[str, Any]
    told: Sequence[tuple[str, str]] = (("system", SYSTEM["content"]), ("user", "Fix it."))
    path: str = "/v1/chat/completions"
    tools: Sequence[str] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    stop: Sequence[str] = ()


CALLED = (
    ("system", "You are a coding agent."),
    ("user", "Fix it."),
    ("assistant", f"read_file{ARGUMENTS}"),
    ("tool", "x = 1"),
)
STOPS = [
    *("<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>"),
    *(
        "<|file_sep|>",
        "<|im_start|>",
        "<|im_end|>",
        "/src/",
        "#- coding: utf-8",
        "```",
        "\nfunction",
        "\nclass",
    ),
    *("\nmodule", "\nexport", "\nimport"),
]

CHATS = (
    Shape(
        "Open WebUI",
        {
            "stream": True,
            "model": "local",
            "messages": [SYSTEM, ASKED],
            "temperature": 0.8,
            "top_k": 40,
            "min_p": 0.05,
            "repeat_penalty": 1.1,
            "repeat_last_n": 64,
            "logit_bias": {"5": -100},
            "stop": ["</s>"],
            "seed": 3,
            "stream_options": {"include_usage": True},
        },
        sampling={"temperature": 0.8, "top_k": 40, "seed": 3},
        stop=["</s>"],
    ),
    Shape(
        "Open WebUI: tools it runs itself",
        {
            "stream": True,
            "model": "local",
            "messages": [
                SYSTEM,
                ASKED,
                {"role": "assistant", "content": "", "tool_calls": [{**CALL, "index": 0}]},
                FOUND,
            ],
            "tools": [READ],
            "max_completion_tokens": 1000,
        },
        told=CALLED,
        tools=["read_file"],
    ),
    Shape(
        "Cline and Roo Code",
        {
            "model": "local",
            "temperature": 0,
            "messages": [
                {
                    "role": "system",
                    "content": [
                        {**said("You are a coding agent.")[0], "cache_control": {"type": "ephemeral"}}
                    ],
                },
                {"role": "user", "content": [*said("Fix it."), *said("<environment_details>")]},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [CALL],
                    "reasoning_details": [],
                    "reasoning_content": "hm",
                },
                {**FOUND, "content": said("x = 1")},
            ],
            "stream": True,
            "stream_options": {"include_usage": True},
            "tools": [READ],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "reasoning_effort": "high",
        },
        told=[CALLED[0], ("user", "Fix it.\n<environment_details>"), *CALLED[2:]],
        tools=["read_file"],
        sampling={"temperature": 0.0},
    ),
    Shape(
        "Continue: completing code",
        {
            "model": "local",
            "prompt": "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>",
            "max_tokens": 256,
            "temperature": 0.01,
            "stop": STOPS,
            "stream": True,
        },
        told=(),
        path="/v1/completions",
        sampling={"temperature": 0.01},
        stop=STOPS,
    ),
    Shape(
        "Zed",
        {
            "model": "local",
            "messages": [
                SYSTEM,
                {"role": "user", "content": said("Fix it.")},
                {"role": "assistant", "content": "Done.", "tool_calls": []},
                {"role": "user", "content": "Again."},
            ],
            "stream": True,
            "max_completion_tokens": 4096,
            "stop": [],
            "temperature": 1.0,
            "tool_choice": None,
            "parallel_tool_calls": None,
            "tools": [],
            "prompt_cache_key": "k",
            "reasoning_effort": None,
        },
        told=[*CALLED[:2], ("assistant", "Done."), ("user", "Again.")],
    ),
    Shape(
        "VS Code's Copilot with an own key",
        {
            "messages": [
                {**SYSTEM, "copilot_cache_control": {"type": "ephemeral"}},
                {**ASKED, "name": "user"},
            ],
            "model": "local",
            "temperature": 0.1,
            "top_p": 1,
            "max_tokens": 4096,
            "n": 1,
            "stream": True,
            "stream_options": {"include_usage": True},
            "tools": [READ],
            "tool_choice": "auto",
            "snippy": {"enabled": False},
            "intent": True,
            "prediction": {"type": "content", "content": "x = 1"},
        },
        tools=["read_file"],
    ),
    Shape(
        "aider",
        {
            "model": "local",
            "messages": [SYSTEM, ASKED],
            "temperature": 0,
            "stream": True,
            "extra_headers": {},
            "n": 1,
        },
        sampling={"temperature": 0.0},
    ),
    Shape(
        "LibreChat and SillyTavern",
        {
            "model": "local",
            "messages": [SYSTEM, ASKED],
            "user": "65f",
            "stream": True,
            "presence_penalty": 0,
            "frequency_penalty": 0,
            "top_p": 1,
            "top_k": 0,
            "min_p": 0,
            "top_a": 0,
            "repetition_penalty": 1,
            "stop": [],
            "logit_bias": {},
            "logprobs": False,
            "type": "quiet",
            "include_reasoning": True,
        },
    ),
    Shape(
        "clients that send every field they know",
        {
            "messages": [
                {**SYSTEM, "name": None},
                {**ASKED, "name": None, "tool_calls": None, "tool_call_id": None},
            ],
            "model": "local",
            **dict.fromkeys(
                (
                    *(
                        "temperature",
                        "top_p",
                        "n",
                        "stream",
                        "stop",
                        "max_tokens",
                        "max_completion_tokens",
                        "seed",
                    ),
                    *("presence_penalty", "frequency_penalty", "logit_bias", "user", "tools", "tool_choice"),
                    *("parallel_tool_calls", "response_format", "logprobs", "top_logprobs", "stream_options"),
                    *("functions", "function_call", "modalities", "audio", "prediction", "reasoning_effort"),
                    *("store", "metadata", "service_tier", "web_search_options", "verbosity", "best_of"),
                    *("prompt_cache_retention", "chat_template_kwargs", "guided_json", "grammar"),
                )
            ),
        },
    ),
    Shape(
        "clients that keep arguments as objects",
        {
            "messages": [
                SYSTEM,
                ASKED,
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [
                        {"function": {"name": "read_file", "arguments": {"path": "a.py"}}, "type": "function"}
                    ],
                },
                {"role": "tool", "content": "x = 1", "name": "read_file"},
            ],
            "tools": [READ],
        },
        told=[*CALLED[:2], ("assistant", 'read_file{"path":"a.py"}'), CALLED[3]],
        tools=["read_file"],
    ),
    Shape(
        "agents whose tools have no arguments",
        {
            "model": "local",
            "messages": [
                SYSTEM,
                ASKED,
                {
                    "role": "assistant",
                    "tool_calls": [{**CALL, "function": {"name": "list_files", "arguments": ""}}],
                },
                {**FOUND, "name": "list_files"},
            ],
            "tools": [
                {"type": "function", "function": {"name": "list_files", "parameters": None, "strict": None}}
            ],
        },
        told=[*CALLED[:2], ("assistant", "list_files"), CALLED[3]],
        tools=["list_files"],
    ),
)
