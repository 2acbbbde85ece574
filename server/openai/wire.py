"""What clients may send to the OpenAI endpoints, as strict models: no coercion, every number in a range.

null means absent everywhere. Names of llama.cpp and vLLM stand beside OpenAI's; `convert.py` joins them.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationInfo, model_validator

from slipstream.engine.api import MOST_LOGPROBS
from slipstream.engine.settings import Settings
from slipstream.server.http.body import shown, wrong
from slipstream.server.http.error_table import bad_request
from slipstream.server.openai.structured import (
    Choices,
    GrammarText,
    JsonSchema,
    Regex,
    ResponseFormat,
    StructuredOutputs,
)
from slipstream.server.openai.tools import (
    CallsSent,
    ToolChoice,
    ToolChoiceSent,
    ToolsSent,
    read_calls,
    read_tool_choice,
    read_tools,
)

MAX_STOPS = 16  # OpenAI allows 4; local clients send more
MAX_STOP_LENGTH = 256
MAX_STOP_IDS = 64
MAX_BIASES = 1024
MAX_MESSAGES = 4096
MAX_TEMPLATE_KWARGS = 32
MAX_TYPES = 16
TYPE = re.compile(r"(?!(none|auto)$)[a-z0-9-]{1,32}")
INT32 = 2**31 - 1
# Names the template renderer itself gives a meaning; a request may not redefine them.
TEMPLATE_INTERNALS = frozenset(
    {
        *("messages", "conversation", "tools", "documents", "tokenize", "add_generation_prompt"),
        *("continue_final_message", "chat_template", "template", "bos_token", "eos_token", "pad_token"),
        *("unk_token", "return_tensors", "return_dict", "return_assistant_tokens_mask", "padding"),
        *("truncation", "max_length", "tokenizer", "tokenizer_kwargs", "self", "namespace", "range"),
        *("raise_exception", "strftime_now"),
    }
)

# What the readers below take in place of the field's own type, for the OpenAPI document.
Count = Annotated[int, Field(ge=1, le=INT32)] | Literal[-1] | None
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
TokenId = Annotated[int, Field(ge=0, le=INT32)]
Ids = Annotated[list[TokenId], Field(min_length=1)]
StopIds = Annotated[list[TokenId], Field(max_length=MAX_STOP_IDS)]
Words = Annotated[str, Field(min_length=1)]
BiasByToken = Annotated[
    dict[Annotated[str, Field(pattern="^[0-9]{1,10}$")], Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=MAX_BIASES, json_schema_extra={"additionalProperties": False}),
]
TemplateKwargs = Annotated[dict[str, str | bool | float | None], Field(max_length=MAX_TEMPLATE_KWARGS)]
TypeNames = Annotated[
    list[Annotated[str, Field(pattern="^[a-z0-9-]{1,32}$")]], Field(min_length=1, max_length=MAX_TYPES)
]

_SETTINGS = {one.name: one.metadata for one in dataclasses.fields(Settings)}


def bounds(name: str) -> dict[str, Any]:
    """The range of a setting that is also a request field."""
    return {"ge": _SETTINGS[name]["least"], "le": _SETTINGS[name]["most"]}


def read_seed(value: Any) -> Any:
    """-1 is the other servers' way to say "random"."""
    if value is None or (value == -1 and type(value) is int):
        return None
    if type(value) is not int or not 0 <= value < 2**64:
        raise wrong("Input should be an integer from 0 to 2^64 - 1, or -1 for a random seed")
    return value


def read_max_tokens(value: Any) -> Any:
    if value is None or (value == -1 and type(value) is int):
        return None
    if type(value) is not int or not 1 <= value <= INT32:
        raise wrong(f"Input should be an integer from 1 to {INT32}, or -1 for no limit but the context")
    return value


def read_top_k(value: Any) -> Any:
    return 0 if value == -1 and type(value) is int else value


def read_stop(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return None
    if not isinstance(stops, list) or not all(isinstance(one, str) for one in stops):
        raise wrong("Input should be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise wrong(f"Input should have at most {MAX_STOPS} strings")
    if not all(0 < len(one) <= MAX_STOP_LENGTH for one in stops):
        raise wrong(f"Each string should have 1 to {MAX_STOP_LENGTH} characters")
    return stops


def read_stop_ids(value: Any) -> Any:
    if value is None or value == []:
        return None
    if not _are_ids(value) or len(value) > MAX_STOP_IDS:
        raise wrong(f"Input should be a list of at most {MAX_STOP_IDS} token ids")
    return value


def read_logit_bias(value: Any) -> Any:
    """`{"token id": bias}` as a dict of numbers."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise wrong("Input should map token ids to numbers")
    if len(value) > MAX_BIASES:
        raise wrong(f"Input should have at most {MAX_BIASES} entries")
    if not all(key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) <= INT32 for key in value):
        raise wrong('Each key should be a token id, such as "42"')
    if not all(type(bias) in (int, float) and -100 <= bias <= 100 for bias in value.values()):
        raise wrong("Each bias should be a number from -100 to 100")
    return {int(key): float(bias) for key, bias in value.items()}


def read_content(value: Any) -> Any:
    """A string, or a list of text parts joined by line breaks."""
    return "\n".join(read_texts(value))


def read_turn(value: Any, info: ValidationInfo) -> Any:
    """A message's content, which may be null beside tool calls."""
    return None if value is None and info.data.get("tool_calls") else read_content(value)


def read_pieces(value: Any) -> Any:
    """A string, or a list of text parts that are pieces of one text."""
    return "".join(read_texts(value))


def read_texts(value: Any) -> list[str]:
    """The texts of a string or of a list of text parts."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise wrong("Input should be a string or a list of text parts")
    for part in value:
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise wrong("Each part should be an object with a type")
        if part["type"] != "text":
            raise wrong("only parts of type 'text' are supported", code="unsupported_value")
        if not isinstance(part.get("text"), str):
            raise wrong("Each text part should have a string in 'text'")
    return [part["text"] for part in value]


def read_prediction_type(value: Any) -> Any:
    """A kind of prediction; OpenAI knows only one so far."""
    if isinstance(value, str) and value != "content":
        raise wrong("only the type 'content' is supported", code="unsupported_value")
    return value


def read_prompt(value: Any) -> Any:
    """The four forms of a prompt as a list of strings and of token lists."""
    prompts = value if isinstance(value, list) and not _are_ids(value) else [value]
    if not prompts or not all(isinstance(one, str) or _are_ids(one) for one in prompts):
        raise wrong("Input should be a string, a list of token ids, or a list of those")
    if not all(prompts):
        raise wrong("A prompt should not be empty")
    return prompts


def _are_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(one) is int and 0 <= one <= INT32 for one in value)
    )


def read_logprobs(value: Any) -> Any:
    """A plain completion's `logprobs`; false is what some clients say for none."""
    return None if value is False else value


def read_types(value: Any) -> Any:
    """Drafter names from a comma string or a list; `none` is the empty list, `auto` the server's own."""
    names = value.split(",") if isinstance(value, str) else value
    if names is None:
        return None
    if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
        raise wrong("Input should be a comma list or a list of drafter names")
    names = [one.strip() for one in names]
    if names == ["auto"]:
        return None
    if names == ["none"]:
        return []
    if not 0 < len(names) <= MAX_TYPES or not all(TYPE.fullmatch(one) for one in names):
        raise wrong("Input should be names of loaded drafters, or 'none' or 'auto' alone")
    return names


def read_template_kwargs(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, dict) or len(value) > MAX_TEMPLATE_KWARGS:
        raise wrong(f"Input should be an object of at most {MAX_TEMPLATE_KWARGS} values")
    for name, one in value.items():
        if name in TEMPLATE_INTERNALS or name.startswith("_") or not name.isidentifier() or len(name) > 64:
            raise wrong(f"{shown(name)} may not be set by a request")
        if one is not None and not isinstance(one, str | bool | int | float):
            raise wrong(f"{shown(name)} should be a string, a number, a boolean or null")
    return value


class Wire(BaseModel):
    """Strict reading; unknown fields are kept aside for the caller to report."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())


class TextPart(BaseModel):
    """A part of a content list; of other types there are none."""

    type: Literal["text"]
    text: str


class Speculative(BaseModel):
    """`speculative` of a request. Unknown keys are errors: a misspelt one would show as lost speed only."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    types: Annotated[list[str] | None, BeforeValidator(read_types, str | TypeNames | None)] = None
    n_max: int | None = Field(None, ge=0, le=INT32)  # above the server's: lowered by the engine, and told
    n_min: int | None = Field(None, ge=0, le=INT32)
    p_min: float | None = Field(None, **bounds("draft_p_min"))
    ngram_size_n: int | None = Field(None, **bounds("spec_ngram_simple_size_n"))
    ngram_size_m: int | None = Field(None, **bounds("spec_ngram_simple_size_m"))
    ngram_min_hits: int | None = Field(None, **bounds("spec_ngram_simple_min_hits"))


class Prediction(BaseModel):
    """`prediction`, OpenAI's Predicted Outputs: text the reply is expected to resemble. It speeds up what comes
    true and changes nothing, so it may stand beside every other field.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    type: Annotated[str, BeforeValidator(read_prediction_type, Literal["content"])]
    content: Annotated[str, BeforeValidator(read_pieces, str | list[TextPart])]


class StreamOptions(Wire):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # accepted, ignored
    continuous_usage_stats: bool | None = None


class Generate(Wire):
    """Fields that chat and plain completions share."""

    model: str | None = Field(None, max_length=512)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1)
    max_tokens: Annotated[int | None, BeforeValidator(read_max_tokens, Count)] = None
    n_predict: Annotated[int | None, BeforeValidator(read_max_tokens, Count)] = None
    temperature: float | None = Field(None, **bounds("temperature"))
    top_k: Annotated[
        int | None, BeforeValidator(read_top_k, Annotated[int, Field(ge=-1, le=INT32)] | None)
    ] = Field(None, ge=0, le=INT32)
    top_p: float | None = Field(None, **bounds("top_p"))
    min_p: float | None = Field(None, **bounds("min_p"))
    repeat_penalty: float | None = Field(None, gt=0, le=100)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    repeat_last_n: int | None = Field(None, ge=0, le=INT32)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[int, float] | None, BeforeValidator(read_logit_bias, BiasByToken | None)] = (
        None
    )
    seed: Annotated[
        int | None, BeforeValidator(read_seed, Annotated[int, Field(ge=-1, le=2**64 - 1)] | None)
    ] = None
    ignore_eos: bool | None = None
    stop: Annotated[
        list[str] | None,
        BeforeValidator(read_stop, Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None),
    ] = None
    speculative: Speculative | None = None
    prediction: Prediction | None = None
    spec_detail: bool | None = None
    cache_prompt: bool | None = None
    cache_salt: str | None = Field(None, max_length=256)
    n_probs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    min_tokens: int | None = Field(None, ge=0, le=INT32)
    stop_token_ids: Annotated[list[int] | None, BeforeValidator(read_stop_ids, StopIds | None)] = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    service_tier: str | None = Field(None, max_length=64)  # there is one, and it is told where asked for
    response_format: ResponseFormat = None
    json_schema: JsonSchema = None
    grammar: GrammarText = None
    guided_json: JsonSchema = None
    guided_regex: Regex = None
    guided_choice: Choices = None
    guided_grammar: GrammarText = None
    structured_outputs: StructuredOutputs = None


def gathered(data: dict[str, Any]) -> dict[str, Any]:
    """`{"speculative.n_max": 4}` as `{"speculative": {"n_max": 4}}`. Raises `Refused` for a key given twice."""
    dotted = {key: value for key, value in data.items() if key.startswith("speculative.")}
    nested = data.get("speculative")
    if not dotted or not isinstance(nested, dict | None):
        return data
    merged = dict(nested or {})
    for key, value in dotted.items():
        name = key.removeprefix("speculative.")
        if name in merged:
            raise bad_request(f"{shown(key)}: given twice, dotted and nested", param=shown(key))
        merged[name] = value
    return {**{key: value for key, value in data.items() if key not in dotted}, "speculative": merged}


class Message(BaseModel):
    """One turn of a conversation. What a template cannot show (a name, a refusal, …) is ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")

    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    tool_calls: Annotated[list[dict[str, Any]] | None, BeforeValidator(read_calls, CallsSent)] = None
    content: Annotated[str | None, BeforeValidator(read_turn, str | list[TextPart] | None)]
    name: str | None = None
    tool_call_id: str | None = Field(None, max_length=256)
    reasoning_content: str | None = None
    reasoning: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_calls(cls, data: Any) -> Any:
        """A turn that calls tools may go without content."""
        if isinstance(data, dict) and data.get("function_call"):
            raise wrong("function_call is not supported, use tool_calls", code="unsupported_value")
        if isinstance(data, dict) and data.get("tool_calls"):
            return {"content": None, **data}
        return data


class ChatRequest(Generate):
    messages: Annotated[list[Message], FailFast()] = Field(min_length=1, max_length=MAX_MESSAGES)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    max_completion_tokens: Annotated[int | None, BeforeValidator(read_max_tokens, Count)] = None
    reasoning_effort: str | None = Field(None, max_length=32)
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, BeforeValidator(read_template_kwargs, TemplateKwargs | None)
    ] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Annotated[list[dict[str, Any]] | None, BeforeValidator(read_tools, ToolsSent)] = None
    tool_choice: Annotated[ToolChoice | None, BeforeValidator(read_tool_choice, ToolChoiceSent)] = None
    parallel_tool_calls: bool | None = None


class CompletionRequest(Generate):
    prompt: Annotated[
        list[str | list[int]],
        BeforeValidator(read_prompt, Words | Ids | Annotated[list[Words | Ids], Field(min_length=1)]),
    ]
    logprobs: Annotated[
        int | None,
        BeforeValidator(read_logprobs, Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | Literal[False] | None),
    ] = Field(None, ge=0, le=MOST_LOGPROBS)
    echo: bool | None = None
    suffix: str | None = None
