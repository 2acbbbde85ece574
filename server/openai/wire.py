"""What clients may send to the OpenAI endpoints, as strict models: no coercion, every number in a range.

null means absent everywhere. Names of llama.cpp and vLLM stand beside OpenAI's; `convert.py` joins them. A field's
description is its meaning in the OpenAPI document and in docs/api.md.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, model_validator

from slipstream.engine.api import MOST_LOGPROBS
from slipstream.engine.settings import Settings
from slipstream.server.http.body import shown, wrong
from slipstream.server.http.error_table import bad_request
from slipstream.server.openai import readers, refuse
from slipstream.server.openai.readers import INT32, MaxTokens
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

MAX_MESSAGES = 4096

_SETTINGS = {one.name: one.metadata for one in dataclasses.fields(Settings)}


def bounds(name: str) -> dict[str, Any]:
    """The range of a setting that is also a request field."""
    return {"ge": _SETTINGS[name]["least"], "le": _SETTINGS[name]["most"]}


class Wire(BaseModel):
    """Strict reading; unknown fields are kept aside for the caller to report."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())


class Speculative(BaseModel):
    """`speculative` of a request. Unknown keys are errors: a misspelt one would show as lost speed only."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    types: readers.Types = Field(
        None, description="names of loaded drafters; `none`: plain decoding; `auto`: the server's"
    )
    n_max: int | None = Field(
        None,
        ge=0,
        le=INT32,
        description="most drafted tokens in a step; above the server's it is lowered, as the reply shows",
    )
    n_min: int | None = Field(None, ge=0, le=INT32, description="shorter drafts are thrown away")
    p_min: float | None = Field(
        None,
        **bounds("draft_p_min"),
        description="a model drafter stops where its own probability is below this",
    )
    ngram_size_n: int | None = Field(
        None,
        **bounds("spec_ngram_simple_size_n"),
        description="of the n-gram drafters: tokens that must match",
    )
    ngram_size_m: int | None = Field(
        None, **bounds("spec_ngram_simple_size_m"), description="of the n-gram drafters: most tokens copied"
    )
    ngram_min_hits: int | None = Field(
        None,
        **bounds("spec_ngram_simple_min_hits"),
        description="of the n-gram drafters: earlier occurrences needed",
    )


class Prediction(BaseModel):
    """`prediction`, OpenAI's Predicted Outputs: text the reply is expected to resemble. It speeds up what comes
    true and changes nothing, so it may stand beside every other field.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    type: readers.PredictionType = Field(description="the kind of prediction")
    content: readers.Pieces = Field(description="the text, or a list of pieces of it")


class StreamOptions(Wire):
    include_usage: bool | None = Field(None, description="a last chunk with the token counts")
    include_obfuscation: bool | None = Field(None, description="accepted, without influence")
    continuous_usage_stats: bool | None = Field(None, description="token counts so far in every chunk")


def _with_fields_of_no_model(schema: dict[str, Any]) -> None:
    """Adds to the document what a body may hold beside the model's fields: dotted names, refused and ignored ones."""
    dotted = Speculative.model_json_schema()["properties"]
    schema["properties"] |= refuse.described() | {f"speculative.{name}": one for name, one in dotted.items()}


class Generate(Wire):
    """Fields that chat and plain completions share."""

    model_config = ConfigDict(json_schema_extra=_with_fields_of_no_model)

    model: str | None = Field(None, max_length=512, description="any name; the reply names the one served")
    stream: bool | None = Field(
        None, description="send the reply as server-sent events while it is made, one per step"
    )
    stream_options: StreamOptions | None = Field(None, description="what else the stream holds")
    n: int | None = Field(
        None, ge=1, description="choices per prompt, at most one per slot; choice i has the seed plus i"
    )
    max_tokens: MaxTokens = Field(None, description="most tokens of a reply; -1: up to the context's end")
    n_predict: MaxTokens = Field(None, description="llama-server's name of `max_tokens`; the others win")
    temperature: float | None = Field(
        None, **bounds("temperature"), description="0: the likeliest token always"
    )
    top_k: readers.TopK = Field(None, ge=0, le=INT32, description="only the k likeliest tokens; 0 or -1: all")
    top_p: float | None = Field(
        None,
        **bounds("top_p"),
        description="only the likeliest tokens that together have this probability; 1: all",
    )
    min_p: float | None = Field(
        None,
        **bounds("min_p"),
        description="only tokens at least this probable relative to the likeliest; 0: all",
    )
    repeat_penalty: float | None = Field(
        None, gt=0, le=100, description="divides logits of tokens among the last `repeat_last_n`; 1: off"
    )
    repetition_penalty: float | None = Field(
        None, gt=0, le=100, description="vLLM's name of `repeat_penalty`, which wins"
    )
    repeat_last_n: int | None = Field(
        None, ge=0, le=INT32, description="window of the repeat penalty, prompt included"
    )
    presence_penalty: float | None = Field(
        None, ge=-2, le=2, description="taken off the logits of tokens the reply already has"
    )
    frequency_penalty: float | None = Field(
        None,
        ge=-2,
        le=2,
        description="taken off the logits of tokens for each time the reply already has them",
    )
    logit_bias: readers.LogitBias = Field(None, description="added to the logits of tokens, by token id")
    seed: readers.Seed = Field(
        None,
        description="the same seed gives the same text, with speculation on or off; -1: drawn at random and returned",
    )
    ignore_eos: bool | None = Field(None, description="go on after end tokens")
    stop: readers.Stops = Field(None, description="strings that end the reply; they are not part of it")
    speculative: Speculative | None = Field(
        None, description="narrows for this request what the server has loaded"
    )
    prediction: Prediction | None = Field(
        None,
        description="text the reply is expected to resemble: what comes true of it is faster, the text stays the"
        " same",
    )
    spec_detail: bool | None = Field(None, description="add to the reply which drafter guessed each token")
    cache_prompt: bool | None = Field(None, description="false: share no cached prompt with other requests")
    cache_salt: str | None = Field(
        None,
        max_length=256,
        description="share cached prompts and slot files only with requests of the same salt",
    )
    n_probs: int | None = Field(
        None,
        ge=0,
        le=MOST_LOGPROBS,
        description="llama-server's name of `logprobs` and `top_logprobs` in one",
    )
    min_tokens: int | None = Field(
        None, ge=0, le=INT32, description="nothing but the context's end ends the reply before so many tokens"
    )
    stop_token_ids: readers.StopIds = Field(
        None, description="tokens that end the reply like the model's own end tokens"
    )
    skip_special_tokens: bool | None = Field(
        None, description="leave control tokens out of the text; on by default"
    )
    return_token_ids: bool | None = Field(None, description="add the token ids of prompt and reply")
    service_tier: str | None = Field(
        None, max_length=64, description="accepted; the reply then says `default`, the only one there is"
    )
    response_format: ResponseFormat = Field(
        None, description="what the reply must be: text, any JSON object, or JSON of a schema"
    )
    json_schema: JsonSchema = Field(
        None, description="a JSON schema that the reply must follow; llama-server's name"
    )
    grammar: GrammarText = Field(
        None, description="a grammar that the reply must follow, in GBNF or in llguidance's Lark dialect"
    )
    guided_json: JsonSchema = Field(
        None, description="a JSON schema that the reply must follow; vLLM's older name"
    )
    guided_regex: Regex = Field(None, description="a regular expression that the whole reply must match")
    guided_choice: Choices = Field(None, description="texts of which the reply must be one")
    guided_grammar: GrammarText = Field(None, description="vLLM's older name of `grammar`")
    structured_outputs: StructuredOutputs = Field(None, description="what the reply must be, in vLLM's form")


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

    role: Literal["developer", "system", "user", "assistant", "tool", "function"] = Field(
        description="who speaks; `developer` is `system` where the template knows no such role"
    )
    tool_calls: Annotated[list[dict[str, Any]] | None, BeforeValidator(read_calls, CallsSent)] = Field(
        None, description="calls an earlier turn of the assistant made"
    )
    content: readers.Turn = Field(
        description="a text, or a list of text parts; may be missing where the assistant called tools"
    )
    name: str | None = Field(None, description="who of that role speaks, for templates that show it")
    tool_call_id: str | None = Field(
        None, max_length=256, description="the call that a tool's message answers"
    )
    reasoning_content: str | None = Field(
        None, description="an earlier turn's reasoning, for templates that show it"
    )
    reasoning: str | None = Field(None, description="vLLM's name of `reasoning_content`")

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
    messages: Annotated[list[Message], FailFast()] = Field(
        min_length=1, max_length=MAX_MESSAGES, description="the conversation"
    )
    logprobs: bool | None = Field(None, description="add the log-probability of each token")
    top_logprobs: int | None = Field(
        None,
        ge=0,
        le=MOST_LOGPROBS,
        description="so many of the likeliest tokens per token; needs `logprobs`",
    )
    max_completion_tokens: MaxTokens = Field(
        None, description="OpenAI's newer name of `max_tokens`; wins over it"
    )
    reasoning_effort: str | None = Field(
        None, max_length=32, description="passed to the template; `none` also switches thinking off"
    )
    chat_template_kwargs: readers.TemplateKwargs = Field(
        None, description="values for the template; names the renderer uses itself are refused"
    )
    add_generation_prompt: bool | None = Field(
        None, description="end the prompt with the opening of the assistant's turn; on by default"
    )
    continue_final_message: bool | None = Field(
        None, description="go on with the last message, which must be the assistant's"
    )
    tools: Annotated[list[dict[str, Any]] | None, BeforeValidator(read_tools, ToolsSent)] = Field(
        None, description="functions the model may call"
    )
    tool_choice: Annotated[ToolChoice | None, BeforeValidator(read_tool_choice, ToolChoiceSent)] = Field(
        None, description="whether the model may, must or must not call tools, or which"
    )
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most")


class CompletionRequest(Generate):
    prompt: readers.Prompts = Field(
        description="a text, token ids, or a list of either; each is continued by itself"
    )
    logprobs: readers.Logprobs = Field(
        None,
        ge=0,
        le=MOST_LOGPROBS,
        description="so many of the likeliest tokens per token, with log-probabilities",
    )
    echo: bool | None = Field(
        None,
        description="begin with the prompt; with `logprobs` its log-probabilities too, which are computed afresh",
    )
    suffix: str | None = Field(
        None, description="what follows the gap to fill, for models with fill-in-the-middle tokens"
    )
