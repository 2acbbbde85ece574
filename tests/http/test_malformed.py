"""Malformed requests: for each its status, type, code, field and reason. No answer tells the input back or how the
server is made, none takes long, none reaches the engine, and the next good request is served.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import orjson
import pytest

from slipstream.server.openai.wire import ChatRequest, CompletionRequest
from tests.http.serving import Served, chat

ABOUT = ("server/openai/*.py", "server/native/*.py", "server/responses/*.py")

CANARY = "qzCanary"
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
NATIVE, INFILL = "/completion", "/infill"
UNSUPPORTED = "unsupported_value"
INTERNALS = re.compile(
    rb"Traceback|File \"|0x[0-9a-f]{6}|pydantic|orjson|site-packages|\.py\b", re.IGNORECASE
)


class Row(NamedTuple):
    """Fields of a request that is otherwise good, and what is said of them."""

    fields: dict[str, Any]
    param: str | None
    reason: str  # a part of the message
    code: str = "invalid_value"
    path: str = CHAT


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content, **more}]}


def text(param: str, reason: str, code: str = "invalid_value", **fields: Any) -> Row:
    return Row({"prompt": "a", **fields}, param, reason, code, TEXT)


SAMPLING = [
    Row({"temperature": CANARY}, "temperature", "valid number"),
    Row({"temperature": True}, "temperature", "valid number"),
    Row({"temperature": [0.5]}, "temperature", "valid number"),
    Row({"temperature": -0.1}, "temperature", "greater than or equal to 0"),
    Row({"temperature": 100.1}, "temperature", "less than or equal to 100"),
    Row({"top_p": 1.01}, "top_p", "less than or equal to 1"),
    Row({"min_p": -1}, "min_p", "greater than or equal to 0"),
    Row({"top_k": -2}, "top_k", "greater than or equal to 0"),
    Row({"top_k": 1.5}, "top_k", "valid integer"),
    Row({"max_tokens": 1e300}, "max_tokens", "from 0 to"),
    Row({"repeat_penalty": 0}, "repeat_penalty", "greater than or equal to 0.001"),
    Row({"repetition_penalty": -1}, "repetition_penalty", "greater than or equal to 0.001"),
    Row({"repeat_last_n": -2}, "repeat_last_n", "greater than or equal to 0"),
    Row({"presence_penalty": 2.5}, "presence_penalty", "less than or equal to 2"),
    Row({"frequency_penalty": -2.5}, "frequency_penalty", "greater than or equal to -2"),
    Row({"seed": -2}, "seed", "from 0 to 2^64 - 1"),
    Row({"seed": 2**64}, "seed", "from 0 to 2^64 - 1"),
    Row({"seed": 10**100}, "seed", "from 0 to 2^64 - 1"),
    Row({"seed": 1.5}, "seed", "from 0 to 2^64 - 1"),
    Row({"seed": CANARY}, "seed", "from 0 to 2^64 - 1"),
    Row({"logit_bias": {"1": 101}}, "logit_bias", "from -100 to 100"),
    Row({"logit_bias": {"": 1}}, "logit_bias", "token id"),
    Row({"logit_bias": {CANARY * 40: 1}}, "logit_bias", "token id"),
    Row({"logit_bias": {"9" * 10: 1}}, "logit_bias", "token id"),
    Row({"logit_bias": {"1": True}}, "logit_bias", "from -100 to 100"),
    Row({"logit_bias": [[1, 2, 3]]}, "logit_bias", "map token ids"),
    Row({"logit_bias": [1, 2]}, "logit_bias", "map token ids"),
    Row({"logit_bias": [[-1, 2]]}, "logit_bias", "token id"),
    Row({"logit_bias": [[1.5, 2]]}, "logit_bias", "token id"),
    Row({"logit_bias": [[1, True]]}, "logit_bias", "or false"),
    Row({"logit_bias": [["a", "b"]]}, "logit_bias", "or false"),
    Row({"id_slot": -2}, "id_slot", "greater than or equal to -1"),
    Row({"id_slot": "0"}, "id_slot", "valid integer"),
    Row({"return_progress": 1}, "return_progress", "valid boolean"),
    Row({"timings_per_token": "yes"}, "timings_per_token", "valid boolean"),
    Row({"samplers": 7}, "samplers", "list of names"),
    Row({"samplers": ["top_k", 1]}, "samplers", "list of names"),
    Row({"samplers": "kq"}, "samplers", "should be one of"),
    Row({"samplers": ["temperature", "top_k"]}, "samplers", "only the order", UNSUPPORTED),
    Row({"samplers": ["top_k", "top_k"]}, "samplers", "only the order", UNSUPPORTED),
    Row({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "at most 1024"),
    Row({"logit_bias": {"1000": 1}}, "logit_bias", "outside the vocabulary"),  # the engine's word
    Row({"ignore_eos": 1}, "ignore_eos", "boolean"),
    Row({"skip_special_tokens": CANARY}, "skip_special_tokens", "boolean"),
]
SIZES = [
    Row({"n": True}, "n", "valid integer"),
    Row({"n": 0}, "n", "greater than or equal to 1"),
    Row({"n": 5}, "n", "at most 4, the number of slots (--parallel)"),
    Row({"n": 10**6}, "n", "--parallel"),
    Row({"n": 2**63}, "n", "--parallel"),
    Row({"max_tokens": "0"}, "max_tokens", "from 0 to"),
    Row({"max_tokens": -2}, "max_tokens", "from 0 to"),
    Row({"max_tokens": 2**63}, "max_tokens", "from 0 to"),
    Row({"max_tokens": CANARY}, "max_tokens", "from 0 to"),
    Row({"max_completion_tokens": 1.5}, "max_completion_tokens", "from 0 to"),
    Row({"n_predict": -5}, "n_predict", "from 0 to"),
    Row({"allowed_token_ids": []}, "allowed_token_ids", "1 to 65536 token ids"),
    Row({"allowed_token_ids": [CANARY]}, "allowed_token_ids", "1 to 65536 token ids"),
    Row({"allowed_token_ids": [1000]}, "allowed_token_ids", "outside the vocabulary"),  # the engine's word
    Row({"bad_words": CANARY}, "bad_words", "at most 128 strings"),
    Row({"bad_words": [""]}, "bad_words", "of 1 to 256 characters"),
    Row({"bad_words": [CANARY] * 129}, "bad_words", "at most 128 strings"),
    Row({"min_tokens": -1}, "min_tokens", "greater than or equal to 0"),
    Row({"min_tokens": 2**31}, "min_tokens", "less than or equal to"),
    Row({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "above max_tokens (4)"),
    Row({"stop": ""}, "stop", "1 to 256 characters"),
    Row({"stop": [CANARY] * 33}, "stop", "at most 32"),
    Row({"stop": [CANARY] * 10_000}, "stop", "at most 32"),
    Row({"stop": ["a" * 257]}, "stop", "1 to 256 characters"),
    Row({"stop": CANARY * 125_000}, "stop", "1 to 256 characters"),
    Row({"stop": [1]}, "stop", "list of strings"),
    Row({"stop": {CANARY: 1}}, "stop", "list of strings"),
    Row({"stop_token_ids": [1] * 65}, "stop_token_ids", "at most 64"),
    Row({"stop_token_ids": [CANARY]}, "stop_token_ids", "token ids"),
    Row({"stop_token_ids": [-1]}, "stop_token_ids", "token ids"),
    Row({"stop_token_ids": 5}, "stop_token_ids", "token ids"),
    Row({"stop_token_ids": [1000]}, "stop_token_ids", "outside the vocabulary"),  # the engine's word
    Row({"model": CANARY * 65}, "model", "at most 512"),
    Row({"cache_salt": CANARY * 33}, "cache_salt", "at most 256"),
    Row({"service_tier": CANARY * 9}, "service_tier", "at most 64"),
]
LOGPROBS = [
    Row({"logprobs": 2}, "logprobs", "boolean"),
    Row({"logprobs": CANARY}, "logprobs", "boolean"),
    Row({"top_logprobs": 2}, "top_logprobs", "only allowed with logprobs"),
    Row({"logprobs": False, "top_logprobs": 2}, "top_logprobs", "only allowed with logprobs"),
    Row({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    Row({"logprobs": True, "top_logprobs": 10**6}, "top_logprobs", "less than or equal to 20"),
    Row({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "greater than or equal to 0"),
    Row({"logprobs": True, "n_probs": 2}, "n_probs", "cannot be combined with logprobs"),
    Row({"n_probs": 21}, "n_probs", "less than or equal to 20"),
    Row({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "not available with stream"),
    Row({"prompt_logprobs": 21}, "prompt_logprobs", "less than or equal to 20"),
    Row({"prompt_logprobs": -1}, "prompt_logprobs", "greater than or equal to 0"),
    Row({"prompt_logprobs": True}, "prompt_logprobs", "valid integer"),
    Row({"post_sampling_probs": True}, "post_sampling_probs", "supported", UNSUPPORTED),
    text("logprobs", "valid integer", logprobs=True),
    text("logprobs", "less than or equal to 20", logprobs=21),
    text("logprobs", "greater than or equal to 0", logprobs=-1),
]
MESSAGES = [
    Row({"messages": []}, "messages", "at least 1"),
    Row({"messages": CANARY}, "messages", "valid list"),
    Row({"messages": {CANARY: CANARY}}, "messages", "valid list"),
    Row({"messages": None}, "messages", "valid list"),
    Row({"messages": [CANARY] * 100_000}, "messages[0]", "valid dictionary"),
    Row({"messages": [{"role": "user", "content": "x"}] * 4097}, "messages", "at most 4096"),
    Row({"messages": [{"role": CANARY, "content": "x"}]}, "messages[0].role", "'user'"),
    Row({"messages": [{"content": "x"}]}, "messages[0].role", "required", "missing_field"),
    Row({"messages": [{"role": "user"}]}, "messages[0].content", "required", "missing_field"),
    Row(user(None), "messages[0].content", "string or a list of text parts"),
    Row(user(7), "messages[0].content", "string or a list of text parts"),
    Row(user([CANARY]), "messages[0].content", "object with a type"),
    Row(user([{"type": "text"}]), "messages[0].content", "string in 'text'"),
    Row(
        user([{"type": "image_url", "image_url": {"url": CANARY}}]),
        "messages[0].content[0].image_url",
        "sees no images",
        UNSUPPORTED,
    ),
    Row(user([{"type": "input_audio", CANARY: 1}]), "messages[0].content", "text", UNSUPPORTED),
    Row(user("x", name=[CANARY]), "messages[0].name", "valid string"),
    Row(user("x " * 600), "messages", "--ctx-size", "context_length_exceeded"),
    Row({**user("x " * 600), "stream": True}, "messages", "--ctx-size", "context_length_exceeded"),
    Row({"chat_template_kwargs": {"tokenize": CANARY}}, "chat_template_kwargs", "may not be set"),
    Row({"chat_template_kwargs": {"messages": CANARY}}, "chat_template_kwargs", "may not be set"),
    Row({"chat_template_kwargs": {"__class__": CANARY}}, "chat_template_kwargs", "may not be set"),
    Row(
        {"chat_template_kwargs": {"a": json.loads("[" * 65 + "]" * 65)}},
        "chat_template_kwargs",
        "at most 64 deep",
    ),
    Row({"chat_template_kwargs": CANARY}, "chat_template_kwargs", "an object"),
    Row({"chat_template": CANARY}, "chat_template", "not supported", UNSUPPORTED),
    Row(
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
        "together with add_generation_prompt",
    ),
    Row({"continue_final_message": True}, "continue_final_message", "the assistant's"),
    Row({"reasoning_effort": 5}, "reasoning_effort", "valid string"),
]
SPECULATION = [
    Row({"speculative": 3}, "speculative", "valid dictionary"),
    Row({"speculative": {"n_max": -1}}, "speculative.n_max", "greater than or equal to 0"),
    Row({"speculative.n_max": True}, "speculative.n_max", "valid integer"),
    Row({"speculative.p_min": 1.5}, "speculative.p_min", "less than or equal to 1"),
    Row({"speculative.k": CANARY}, "speculative.k", "not permitted"),
    Row({"speculative.ngram_size_n": 0}, "speculative.ngram_size_n", "greater than or equal to 1"),
    Row({"speculative": {"ngram_size_m": 1025}}, "speculative.ngram_size_m", "less than or equal to 1024"),
    Row({"speculative.ngram_min_hits": 1.5}, "speculative.ngram_min_hits", "valid integer"),
    Row({"speculative": {"ngram_size": 3}}, "speculative.ngram_size", "not permitted"),
    Row({"speculative": {"type": CANARY}}, "speculative.type", "not permitted"),
    Row({"speculative": {"n_max": 1}, "speculative.n_max": 1}, "speculative.n_max", "given twice"),
    Row({"speculative.types": "none,ngram-simple"}, "speculative.types", "'none' or 'auto' alone"),
    Row({"speculative.types": ""}, "speculative.types", "names of loaded drafters"),
    Row({"speculative.types": [CANARY]}, "speculative.types", "names of loaded drafters"),
    Row({"speculative.types": "warp"}, "speculative.types", "not loaded", UNSUPPORTED),  # the engine's word
    Row({"prediction": CANARY}, "prediction", "valid dictionary"),
    Row({"prediction": {}}, "prediction.type", "required", "missing_field"),
    Row({"prediction": {"type": "content"}}, "prediction.content", "required", "missing_field"),
    Row({"prediction": {"type": CANARY, "content": "x"}}, "prediction.type", "'content'", UNSUPPORTED),
    Row({"prediction": {"type": 1, "content": "x"}}, "prediction.type", "valid string"),
    Row({"prediction": {"type": "content", "content": None}}, "prediction.content", "string or a list"),
    Row({"prediction": {"type": "content", "content": [CANARY]}}, "prediction.content", "object with a type"),
    Row(
        {"prediction": {"type": "content", "content": [{"type": "text"}]}},
        "prediction.content",
        "string in 'text'",
    ),
    Row(
        {"prediction": {"type": "content", "content": [{"type": "image_url"}]}},
        "prediction.content",
        "'text'",
        UNSUPPORTED,
    ),
    Row(
        {"prediction": {"type": "content", "content": "x", "weight": CANARY}},
        "prediction.weight",
        "not permitted",
    ),
]
STREAMS = [
    Row({"stream": CANARY}, "stream", "boolean"),
    Row({"stream": 1}, "stream", "boolean"),
    Row({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "boolean"),
    Row({"stream_options": [CANARY]}, "stream_options", "valid dictionary"),
    Row({"return_token_ids": CANARY}, "return_token_ids", "boolean"),
    Row({"spec_detail": CANARY}, "spec_detail", "boolean"),
]
REFUSED = [
    Row({"audio": {"voice": CANARY}}, "audio", "supported", UNSUPPORTED),
    Row({"modalities": ["text", "audio"]}, "modalities", "supported", UNSUPPORTED),
    Row({"web_search_options": {CANARY: 1}}, "web_search_options", "not supported", UNSUPPORTED),
    Row({"mirostat": 2}, "mirostat", "not supported", UNSUPPORTED),
    Row({"samplers": [CANARY]}, "samplers", "should be one of"),
    Row({"lora": [{CANARY: 1}]}, "lora", "not supported", UNSUPPORTED),
    Row({"documents": [CANARY]}, "documents", "not supported", UNSUPPORTED),
    text("best_of", "not supported", UNSUPPORTED, best_of=2),
]
PROMPTS = [
    Row({}, "prompt", "required", "missing_field", TEXT),
    text("prompt", "a string, a list of token ids", prompt=None),
    text("prompt", "a string, a list of token ids", prompt={CANARY: 1}),
    text("prompt", "not be empty", prompt=""),
    text("prompt", "a string, a list of token ids", prompt=[]),
    text("prompt", "a string, a list of token ids", prompt=[[]]),
    text("prompt", "a string, a list of token ids", prompt=[-1]),
    text("prompt", "a string, a list of token ids", prompt=[True]),
    text("prompt", "a string, a list of token ids", prompt=[2**31]),
    text("prompt", "outside the vocabulary", prompt=[1000]),  # the engine's word
    text("prompt", "at most 68 choices in one request (--parallel plus --max-queue)", prompt=[CANARY] * 69),
    text("prompt", "--ctx-size", "context_length_exceeded", prompt=[1] * 600),
    text("prompt", "--ctx-size", "context_length_exceeded", prompt=["a", CANARY + " x" * 600]),
    text("echo", "boolean", echo=CANARY),
    text("suffix", "valid string", suffix=[CANARY]),
    text("suffix", "with echo", suffix=CANARY, echo=True),
    text("suffix", "not of token ids", suffix=CANARY, prompt=[1, 2]),
    text("min_tokens", "above max_tokens (1)", min_tokens=2, max_tokens=1),
]


def response(param: str | None, reason: str, code: str = "invalid_value", **fields: Any) -> Row:
    return Row({"input": "a", **fields}, param, reason, code, RESPONSES)


def item(param: str, reason: str, code: str = "invalid_value", **fields: Any) -> Row:
    return response(f"input[0]{param}", reason, code, input=[fields])


def format_(reason: str, code: str = "invalid_value", **fields: Any) -> Row:
    return response("text.format", reason, code, text={"format": fields})


def native(param: str, reason: str, code: str = "invalid_value", **fields: Any) -> Row:
    return Row({"prompt": "a", **fields}, param, reason, code, NATIVE)


def infill(param: str, reason: str, code: str = "invalid_value", **fields: Any) -> Row:
    return Row({"input_prefix": "a", "input_suffix": "b", **fields}, param, reason, code, INFILL)


OF_LLAMA = [
    Row({}, "prompt", "required", "missing_field", NATIVE),
    native("prompt", "a string, a list", prompt={"prompt_string": 7}),
    native("prompt", "a string, a list", prompt={"prompt_string": "a", "multimodal_data": ["b"]}),
    native("prompt", "a string, a list", prompt={"prompt_string": "a", "multimodal_data": {}}),
    native("prompt", "a string, a list", prompt=["a", {}]),
    native("prompt", "not be empty", prompt=""),
    native("prompt", "a string, a list", prompt=[]),
    native("prompt", "a string, a list", prompt=["a", -7]),
    native("prompt", "a string, a list", prompt=[["a"], "b"]),
    native("prompt", "outside the vocabulary", prompt=["a", 5000]),
    native("n_predict", "from 0", n_predict=-2),
    native("n_cmpl", "greater than or equal to 1", n_cmpl=0),
    native("n", "at most 4", n_cmpl=5),
    native("n_probs", "less than or equal to 20", n_probs=21),
    native("response_fields", "valid list", response_fields="content"),
    native("response_fields", "at most 64", response_fields=["a"] * 65),
    native("return_tokens", "valid boolean", return_tokens=1),
    native("n_indent", "greater than or equal to 0", n_indent=-1),
    native("t_max_predict_ms", "greater than or equal to -1", t_max_predict_ms=-2),
    native("spec_detail", "choices", UNSUPPORTED, spec_detail=True),
    native("return_token_ids", "choices", UNSUPPORTED, return_token_ids=True),
    native("prompt_logprobs", "choices", UNSUPPORTED, prompt_logprobs=0),
    native("prompt", "maximum context length", "context_length_exceeded", prompt="a " * 600),
    Row({"input_prefix": "a"}, "input_suffix", "required", "missing_field", INFILL),
    Row({"input_suffix": "a"}, "input_prefix", "required", "missing_field", INFILL),
    infill("input_prefix", "valid string", input_prefix=7),
    infill("input_suffix", "valid string", input_suffix=None),
    infill("input_prefix", "is empty", input_prefix="", input_suffix=""),
    infill("input_extra", "valid list", input_extra="ok"),
    infill("input_extra[0]", "dictionary", input_extra=["ok"]),
    infill("input_extra[0].text", "required", "missing_field", input_extra=[{"filename": "a"}]),
    infill("input_extra[0].filename", "valid string", input_extra=[{"filename": 1, "text": "a"}]),
    infill("prompt", "valid string", prompt=[1]),
    infill("input_prefix", "maximum context length", "context_length_exceeded", input_prefix="a " * 600),
]
LOOK = {"type": "function", "name": "look"}
OF_RESPONSES = [
    Row({}, "input", "required", "missing_field", RESPONSES),
    response("input", "string or a list", input=None),
    response("input", "string or a list", input=[]),
    response("input", "string or a list", input={"role": "user", "content": "a"}),
    response("input", "at most", input=[{"role": "user", "content": "a"}] * 5000),
    response("input[0]", "object with a type", input=["a"]),
    item(".input", "field is required", "missing_field", type="custom_tool_call", call_id="c", name="a"),
    item("", "only items of the types", UNSUPPORTED, type="computer_call", call_id="c"),
    item("", "only items of the types", UNSUPPORTED, type=7),
    item(".role", "Input should be", role="tool", content="a"),
    item(".content", "string or a list", role="user", content=7),
    item(".content", "required", "missing_field", role="user"),
    item(".content", "object with a type", role="user", content=["a"]),
    item(".content", "and input_image", UNSUPPORTED, role="user", content=[{"type": "input_audio"}]),
    item(".content", "image_url", role="user", content=[{"type": "input_image"}]),
    item(".content", "text as a string", role="user", content=[{"type": "input_text", "text": 1}]),
    item(".name", "required", "missing_field", type="function_call", call_id="c", arguments="{}"),
    item(".name", "pattern", type="function_call", call_id="c", arguments="{}", name="a b"),
    item(".arguments", "valid string", type="function_call", call_id="c", arguments={}, name="look"),
    item(".call_id", "required", "missing_field", type="function_call_output", output="a"),
    item(".output", "required", "missing_field", type="function_call_output", call_id="c"),
    item(".id", "required", "missing_field", type="item_reference"),
    response("instructions", "valid string", instructions=["a"]),
    response("previous_response_id", "valid string", previous_response_id=7),
    response("store", "valid boolean", store="no"),
    response("background", "valid boolean", background=1),
    response("background", "stream", UNSUPPORTED, background=True, stream=True),
    response("background", "needs store", background=True, store=False),
    response("max_output_tokens", "from 0", max_output_tokens=-2),
    response("max_output_tokens", "from 0", max_output_tokens="5"),
    response("max_tool_calls", "greater than or equal to 1", max_tool_calls=0),
    response("text", "valid dictionary", text="json"),
    format_("object with a type", type=3),
    format_("only the types", UNSUPPORTED, type="xml"),
    format_("a schema", type="json_schema"),
    format_("JSON schema", type="json_schema", name="a", schema=7),
    format_("'description'", type="json_schema", name="a", description={}),
    response(
        "text.format",
        "response_format",
        text={"format": {"type": "json_object"}},
        response_format={"type": "json_object"},
    ),
    response("reasoning", "valid dictionary", reasoning="low"),
    response("reasoning.effort", "valid string", reasoning={"effort": 3}),
    response("tools", "list of at most", tools=LOOK),
    response("tools", "object with a type", tools=["look"]),
    response("tools", "only tools of type", UNSUPPORTED, tools=[{"type": "telepathy"}]),
    response("tools", "1 to 64 letters", tools=[{"type": "function", "name": "a b"}]),
    response("tools", "name of its own", tools=[LOOK, LOOK]),
    response("tools", "A namespace's name", tools=[{"type": "namespace", "name": "a b", "tools": []}]),
    response("tools", "A namespace's name", tools=[{"type": "namespace", "tools": [LOOK]}]),
    response("tools", "a list of at most 128", tools=[{"type": "namespace", "name": "a", "tools": LOOK}]),
    response(
        "tools", "its description", tools=[{"type": "namespace", "name": "a", "tools": [], "description": 1}]
    ),
    response(
        "tools",
        "1 to 64 letters",
        tools=[{"type": "namespace", "name": "a", "tools": [{**LOOK, "name": "a b"}]}],
    ),
    response("tools", "at most 128 tools", tools=[{"type": "namespace", "name": "a", "tools": [LOOK] * 129}]),
    response("tools", "an object with a name", tools=[{"type": "custom"}]),
    response("tools", "A description should be", tools=[{"type": "custom", "name": "a", "description": 1}]),
    response("tools", "A format should be", tools=[{"type": "custom", "name": "a", "format": "text"}]),
    response("tools", "A format should be", tools=[{"type": "custom", "name": "a", "format": {"type": "x"}}]),
    response(
        "tools",
        "A format should be",
        tools=[{"type": "custom", "name": "a", "format": {"syntax": "lark", "definition": "a"}}],
    ),
    response("tool_choice", "not among the tools", tools=[LOOK], tool_choice={"type": "custom", "name": "a"}),
    response(
        "tool_choice",
        "not among the tools",
        tools=[LOOK],
        tool_choice={"type": "function", "name": LOOK["name"], "namespace": "a"},
    ),
    response("tool_choice", "only allowed with tools", tool_choice="required"),
    response("tool_choice", "object", tool_choice="maybe"),
    response("tool_choice", "only tools of type", UNSUPPORTED, tool_choice={"type": "file_search"}),
    response("tool_choice", "mode", tool_choice={"type": "allowed_tools", "mode": "all", "tools": [LOOK]}),
    response("include", "valid list", include="message.output_text.logprobs"),
    response("top_logprobs", "less than or equal to 20", top_logprobs=21),
    response("truncation", "'auto' or 'disabled'", truncation="half"),
    response("metadata", "object", metadata=["a"]),
    response("metadata", "object", metadata={str(i): "a" for i in range(17)}),
    response("metadata", "string", metadata={"a": 7}),
    response("conversation", "not supported", UNSUPPORTED, conversation="c"),
    response("prompt", "not supported", UNSUPPORTED, prompt={"id": "p"}),
    response("n", "one message", UNSUPPORTED, n=2),
    response("return_token_ids", "choices", UNSUPPORTED, return_token_ids=True),
    response("prompt_logprobs", "choices", UNSUPPORTED, prompt_logprobs=0),
    response("spec_detail", "choices", UNSUPPORTED, spec_detail=True),
    response("input", "maximum context length", "context_length_exceeded", input="a " * 600),
    response("temperature", "greater than or equal to 0", temperature=-1),
    response("modalities", "text output", UNSUPPORTED, modalities=["audio"]),
]

ROWS = [
    *SAMPLING,
    *SIZES,
    *LOGPROBS,
    *MESSAGES,
    *SPECULATION,
    *STREAMS,
    *REFUSED,
    *PROMPTS,
    *OF_RESPONSES,
    *OF_LLAMA,
]


def answered(server: Served, path: str, content: bytes, kind: str = "application/json") -> tuple[int, bytes]:
    """Status and body of an answer."""
    answer = server.http.post(path, content=content, headers={"content-type": kind})
    assert answer.headers["x-request-id"]
    return answer.status_code, answer.content


def refused(server: Served, path: str, content: bytes, kind: str = "application/json") -> tuple[int, Any]:
    """Status and error of a request that must be refused before the engine has it, and leave no trace."""
    status, body = answered(server, path, content, kind)
    assert CANARY.encode().lower() not in body.lower()
    assert not INTERNALS.search(body), body
    assert len(body) < 600
    told = json.loads(body)
    assert list(told) == ["error"]
    assert {"message", "type", "param", "code"} <= set(told["error"])
    assert not server.engine.running
    assert server.chat().status_code == 200
    return status, told["error"]


@pytest.mark.sampled(keep=24)
@pytest.mark.parametrize(
    "row", ROWS, ids=[f"{i}-{row.path.split('/')[-1]}-{row.param}" for i, row in enumerate(ROWS)]
)
def test_fields(server: Served, row: Row) -> None:
    body = chat(**row.fields) if row.path == CHAT else row.fields
    status, error = refused(server, row.path, dumped(body))
    kind = "exceed_context_size_error" if row.code == "context_length_exceeded" else "invalid_request_error"
    assert (status, error["type"], error["code"], error["param"]) == (400, kind, row.code, row.param)
    assert row.reason in error["message"], error["message"]
    if row.param and kind == "invalid_request_error":
        assert error["message"].startswith(f"{row.param}: ")


def dumped(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


def test_the_table_is_long_enough() -> None:
    assert len(ROWS) >= 80
    assert len({(row.path, repr(row.fields)) for row in ROWS}) == len(ROWS)


SIGNED = {"presence_penalty", "frequency_penalty", "logit_bias"}


@pytest.mark.sampled(keep=24)
@pytest.mark.parametrize(
    "name", sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields} - SIGNED)
)
@pytest.mark.parametrize("value", [-5, -(2**63), -1e308, 1e308], ids=["-5", "-2^63", "-1e308", "1e308"])
def test_no_field_takes_a_number_out_of_range(server: Served, name: str, value: float) -> None:
    path = CHAT if name in ChatRequest.model_fields else TEXT
    body = chat(**{name: value}) if path == CHAT else {"prompt": "a", name: value}
    status, error = refused(server, path, orjson.dumps(body))
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert error["param"] == name


@pytest.mark.sampled(keep=24)
@pytest.mark.parametrize("value", [f"{CANARY} " * 9, {"x": CANARY}, [CANARY] * 1000, f"{CANARY}\n\x1b[31m"])
@pytest.mark.parametrize("name", sorted(ChatRequest.model_fields))
def test_input_is_never_told_back(server: Served, name: str, value: Any) -> None:
    status, body = answered(server, CHAT, dumped(chat(**{name: value})))
    assert status in (200, 400)
    if status == 400:
        assert CANARY.encode() not in body
        assert not INTERNALS.search(body), body


def test_field_names_are_told_back_short_and_printable(server: Served) -> None:
    error = server.error(400, **{"speculative." + "x\n\x1b" * 100: 1})
    assert "\n" not in error["message"]
    assert len(error["param"]) < 80
