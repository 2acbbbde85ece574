"""Models of the request bodies of the OpenAI endpoints. They are strict: no coercion, every number in a range.

null means absent everywhere. Names of llama.cpp and vLLM stand beside OpenAI's; `convert.py` joins them. A field's
description is its meaning in the OpenAPI document and in docs/api.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, model_validator

from slipstream.engine.api import MOST_LOGPROBS
from slipstream.engine.ranges import SAMPLING_RANGES
from slipstream.engine.settings import SPECULATE_RANGES
from slipstream.server.describe.shape import optional
from slipstream.server.http.body import shown, wrong
from slipstream.server.http.error_table import bad_field
from slipstream.server.images.image_part import Placed, images_in
from slipstream.server.openai import readers, refuse, structured
from slipstream.server.openai.readers import INT32, MaxTokens
from slipstream.server.openai.tools import CallsField, ToolChoiceField, ToolsField

MAX_MESSAGES = 4096


def within(limits: tuple[float, float]) -> dict[str, Any]:
    """A range, which the engine checks too, as arguments of pydantic's `Field`."""
    return {"ge": limits[0], "le": limits[1]}


SAMPLING = {name: within(limits) for name, limits in SAMPLING_RANGES.items()}
SPECULATE = {name: within(limits) for name, limits in SPECULATE_RANGES.items()}


class Wire(BaseModel):
    """Strict reading; unknown fields are kept aside for the caller to report."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())


class Speculative(BaseModel):
    """`speculative` of a request. Unknown keys are errors: a misspelt one would show as lost speed only."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    types: readers.Types = optional("names of loaded drafters; `none`: plain decoding; `auto`: the server's")
    n_max: int | None = optional(
        "most drafted tokens in a step; above the server's it is lowered, as the reply shows",
        **SPECULATE["n_max"],
    )
    n_min: int | None = optional(
        "shorter drafts are thrown away; above `n_max` it is lowered to that", **SPECULATE["n_min"]
    )
    p_min: float | None = optional(
        "a model drafter stops where its own probability is below this", **SPECULATE["p_min"]
    )
    ngram_size_n: int | None = optional(
        "of the n-gram drafters: tokens that must match", **SPECULATE["ngram_size_n"]
    )
    ngram_size_m: int | None = optional(
        "of the n-gram drafters: most tokens copied", **SPECULATE["ngram_size_m"]
    )
    ngram_min_hits: int | None = optional(
        "of the n-gram drafters: earlier occurrences needed", **SPECULATE["ngram_min_hits"]
    )


class Prediction(BaseModel):
    """`prediction`, OpenAI's Predicted Outputs: text the reply is expected to resemble. It speeds up what comes
    true and changes nothing, so it may stand beside every other field.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    type: readers.PredictionType = Field(description="the kind of prediction")
    content: readers.Pieces = Field(description="the text, or a list of pieces of it")


class StreamOptions(Wire):
    include_usage: bool | None = optional("a last chunk with the token counts")
    include_obfuscation: bool | None = optional("accepted, without influence")
    continuous_usage_stats: bool | None = optional("token counts so far in every chunk")


def _with_fields_of_no_model(schema: dict[str, Any]) -> None:
    """Adds to a model's JSON schema the fields that are read without it: dotted names, refused and ignored fields."""
    dotted = Speculative.model_json_schema()["properties"]
    # What a request has itself is not refused.
    schema["properties"] = (
        refuse.described()
        | schema["properties"]
        | {f"speculative.{name}": one for name, one in dotted.items()}
    )


class Generate(Wire):
    """Fields that chat and plain completions share."""

    model_config = ConfigDict(json_schema_extra=_with_fields_of_no_model)

    @classmethod
    def prepared(cls, data: dict[str, Any]) -> dict[str, Any]:
        """A body as the model reads it. Raises `Refused`.

        To JSON 8.0 and 8 are one number, and some languages have no integers to send.
        """
        data = {
            name: int(value) if isinstance(value, float) and value.is_integer() else value
            for name, value in data.items()
        }
        return gathered(refuse.without_refused(data, cls.model_fields))

    def images(self) -> Iterator[Placed]:
        """The images that the request shows, in their order."""
        return iter(())

    model: str | None = optional("any name; the reply names the one served", max_length=512)
    stream: bool | None = optional("send the reply as server-sent events while it is made, one per step")
    stream_options: StreamOptions | None = optional("what else the stream holds")
    n: int | None = optional("choices per prompt, at most one per slot; choice i has the seed plus i", ge=1)
    max_tokens: MaxTokens = optional(
        "most tokens of a reply; 0: the prompt alone is computed; -1: up to the context's end"
    )
    n_predict: MaxTokens = optional("llama-server's name of `max_tokens`; the others win")
    temperature: float | None = optional("0: the likeliest token always", **SAMPLING["temperature"])
    top_k: readers.TopK = optional("only the k likeliest tokens; 0 or -1: all", **SAMPLING["top_k"])
    top_p: float | None = optional(
        "only the likeliest tokens that together have this probability; 1: all", **SAMPLING["top_p"]
    )
    min_p: float | None = optional(
        "only tokens at least this probable relative to the likeliest; 0: all", **SAMPLING["min_p"]
    )
    repeat_penalty: float | None = optional(
        "divides logits of tokens among the last `repeat_last_n`; 1: off", **SAMPLING["repeat_penalty"]
    )
    repetition_penalty: float | None = optional(
        "vLLM's name of `repeat_penalty`, which wins", **SAMPLING["repeat_penalty"]
    )
    repeat_last_n: readers.Window = optional(
        "window of the repeat penalty, prompt included; -1: the whole text", **SAMPLING["repeat_last_n"]
    )
    presence_penalty: float | None = optional(
        "taken off the logits of tokens the reply already has", **SAMPLING["presence_penalty"]
    )
    frequency_penalty: float | None = optional(
        "taken off the logits of tokens for each time the reply already has them",
        **SAMPLING["frequency_penalty"],
    )
    logit_bias: readers.LogitBias = optional(
        "added to the logits of tokens, by token id or by text, all of whose tokens are meant; false bans them"
    )
    allowed_token_ids: readers.AllowedIds = optional(
        "the only tokens that may come; an end token has to be among them for the reply to end by itself"
    )
    bad_words: readers.BadWords = optional(
        "texts whose tokens, with a space before them or without, never follow each other in the reply; written with"
        " other tokens such a text may come, as in vLLM"
    )
    samplers: readers.Samplers = optional(
        "the only samplers to use, of `penalties`, `top_k`, `top_p`, `min_p`, `temperature`, in this order; by name or"
        " by llama-server's letters"
    )
    seed: readers.Seed = optional(
        "the same seed gives the same text, with speculation on or off; -1: drawn at random and returned"
    )
    ignore_eos: bool | None = optional("go on after end tokens")
    stop: readers.Stops = optional("strings that end the reply; they are not part of it")
    include_stop_str_in_output: bool | None = optional(
        "the stop string that ends the reply is part of it, and so is an end token that is no control token"
    )
    no_stop_trim: bool | None = optional("SGLang's name of `include_stop_str_in_output`")
    speculative: Speculative | None = optional("narrows for this request what the server has loaded")
    prediction: Prediction | None = optional(
        "text the reply is expected to resemble: what comes true of it is faster, the text stays the same"
    )
    spec_detail: bool | None = optional(
        "add to the reply which drafter guessed each token, and what each step drafted"
    )
    id_slot: int | None = optional(
        "the slot to run in, counted round; the request waits for it; -1: any", ge=-1, le=INT32
    )
    return_progress: bool | None = optional("chunks that say how far the prompt is; of streams")
    timings_per_token: bool | None = optional("times so far in every chunk; of streams")
    cache_prompt: bool | None = optional("false: share no cached prompt with other requests")
    cache_salt: str | None = optional(
        "share cached prompts and slot files only with requests of the same salt", max_length=256
    )
    n_probs: int | None = optional(
        "llama-server's name of `logprobs` and `top_logprobs` in one", ge=0, le=MOST_LOGPROBS
    )
    min_tokens: int | None = optional(
        "nothing but the context's end ends the reply before so many tokens", ge=0, le=INT32
    )
    thinking_token_budget: int | None = optional(
        "most tokens of the thinking that begins the reply, whose end is written then; -1: no limit",
        ge=-1,
        le=INT32,
    )
    reasoning_budget_tokens: int | None = optional(
        "llama-server's name of `thinking_token_budget`, which wins", ge=-1, le=INT32
    )
    thinking_budget_tokens: int | None = optional("another name of it", ge=-1, le=INT32)
    reasoning_budget_message: str | None = optional("what is written before that end", max_length=4096)
    stop_token_ids: readers.StopIds = optional("tokens that end the reply like the model's own end tokens")
    skip_special_tokens: bool | None = optional("leave control tokens out of the text; on by default")
    prompt_logprobs: int | None = optional(
        "log-probabilities of the prompt's tokens, with so many of the likeliest tokens each, computed afresh; not of"
        " streams",
        ge=0,
        le=MOST_LOGPROBS,
    )
    return_token_ids: bool | None = optional("add the token ids of prompt and reply")
    service_tier: str | None = optional(
        "accepted; the reply then says `default`, the only one there is", max_length=64
    )
    response_format: structured.ResponseFormat = optional(
        "what the reply must be: text, any JSON object, or JSON of a schema"
    )
    json_schema: structured.JsonSchema = optional(
        "a JSON schema that the reply must follow; llama-server's name"
    )
    grammar: structured.GrammarText = optional(
        "a grammar that the reply must follow, in GBNF or in llguidance's Lark dialect"
    )
    guided_json: structured.JsonSchema = optional(
        "a JSON schema that the reply must follow; vLLM's older name"
    )
    guided_regex: structured.Regex = optional("a regular expression that the whole reply must match")
    guided_choice: structured.Choices = optional("texts of which the reply must be one")
    guided_grammar: structured.GrammarText = optional("vLLM's older name of `grammar`")
    structured_outputs: structured.StructuredOutputs = optional("what the reply must be, in vLLM's form")
    regex: structured.Regex = optional("SGLang's name of `guided_regex`")
    ebnf: structured.GrammarText = optional("SGLang's name of `grammar`")


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
            raise bad_field(shown(key), "given twice, dotted and nested")
        merged[name] = value
    return {**{key: value for key, value in data.items() if key not in dotted}, "speculative": merged}


class Message(BaseModel):
    """One turn of a conversation. What a template cannot show (a name, a refusal, …) is ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")

    role: Literal["developer", "system", "user", "assistant", "tool", "function"] = Field(
        description="who speaks; `developer` is `system` where the template knows no such role"
    )
    tool_calls: CallsField = optional("calls an earlier turn of the assistant made")
    content: readers.Turn = Field(
        description="a text, or a list of parts, texts and in turns of users and tools images; may be missing where the"
        " assistant called tools or only thought"
    )
    name: str | None = optional("who of that role speaks, for templates that show it")
    tool_call_id: str | None = optional("the call that a tool's message answers", max_length=256)
    reasoning_content: str | None = optional("an earlier turn's reasoning, for templates that show it")
    reasoning: str | None = optional("vLLM's name of `reasoning_content`")

    @model_validator(mode="before")
    @classmethod
    def _without_content(cls, data: Any) -> Any:
        """A turn that calls tools may go without content, and so may one of the assistant that only thought."""
        if not isinstance(data, dict):
            return data
        if data.get("function_call"):
            raise wrong("function_call is not supported, use tool_calls", code="unsupported_value")
        if data.get("tool_calls"):
            return {"content": None, **data}
        thought = data.get("reasoning_content") or data.get("reasoning")
        if thought and data.get("role") == "assistant" and data.get("content") is None:
            return {**data, "content": ""}
        return data


class ChatRequest(Generate):
    messages: Annotated[list[Message], FailFast()] = Field(
        min_length=1, max_length=MAX_MESSAGES, description="the conversation"
    )
    logprobs: bool | None = optional("add the log-probability of each token")
    top_logprobs: int | None = optional(
        "so many of the likeliest tokens per token; needs `logprobs`", ge=0, le=MOST_LOGPROBS
    )
    max_completion_tokens: MaxTokens = optional("OpenAI's newer name of `max_tokens`; wins over it")
    reasoning_effort: str | None = optional(
        "passed to the template; `none` also switches thinking off", max_length=32
    )
    chat_template_kwargs: readers.TemplateKwargs = optional(
        "values for the template; names the renderer uses itself are refused"
    )
    add_generation_prompt: bool | None = optional(
        "end the prompt with the opening of the assistant's turn; on by default"
    )
    continue_final_message: bool | None = optional(
        "go on with the last message, which must be the assistant's"
    )
    reasoning_format: Literal["auto", "none", "deepseek"] | None = optional(
        "llama-server's: `none` leaves thinking in the content, `deepseek` takes it out; `auto`: as the server is set"
    )
    separate_reasoning: bool | None = optional("SGLang's: false leaves thinking in the content")
    include_reasoning: bool | None = optional("vLLM's: false leaves thinking out of the reply")
    tools: ToolsField = optional("functions the model may call")
    tool_choice: ToolChoiceField = optional("whether the model may, must or must not call tools, or which")
    parallel_tool_calls: bool | None = optional("false: one call at most")

    def images(self) -> Iterator[Placed]:
        for index, one in enumerate(self.messages):
            yield from images_in(one.content, f"messages[{index}].content", ".image_url")


class CompletionRequest(Generate):
    prompt: readers.Prompts = Field(
        description="a text, token ids, or a list of either; each is continued by itself"
    )
    logprobs: readers.Logprobs = optional(
        "so many of the likeliest tokens per token, with log-probabilities", ge=0, le=MOST_LOGPROBS
    )
    echo: bool | None = optional(
        "begin with the prompt; with `logprobs` its log-probabilities too, which are computed afresh"
    )
    suffix: str | None = optional("what follows the gap to fill, for models with fill-in-the-middle tokens")
    add_special_tokens: bool | None = optional(
        "false is refused where the tokenizer has a token for the beginning of texts: token ids have none added"
    )
