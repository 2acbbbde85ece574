"""Wire models (what a client sent) to engine requests, by functions without side effects.

An endpoint with wire models of its own makes a `ChatRequest` of them, and gives `chat_job` the form of its replies.
"""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from slipstream.engine.api import Chat, Image, Infill, ModelInfo, Prompt, Request, Sampling, Speculate
from slipstream.engine.constraints import Grammar
from slipstream.engine.settings import Settings
from slipstream.server.http.auth import salted
from slipstream.server.http.error_table import bad_field, unsupported
from slipstream.server.images.image_part import for_template
from slipstream.server.openai.formats.call_ids import with_naming_ids
from slipstream.server.openai.formats.enforce import or_json
from slipstream.server.openai.formats.generic import instructed
from slipstream.server.openai.formats.reading import Known
from slipstream.server.openai.forms import CHAT, TEXT
from slipstream.server.openai.job import Form, Job, Wanted
from slipstream.server.openai.readers import NO_LIMIT, template_defaults
from slipstream.server.openai.reasoning import reasoning_fields, thinking_budget
from slipstream.server.openai.reply_text import Reading
from slipstream.server.openai.structured import grammar_of
from slipstream.server.openai.tools import Asked, asked
from slipstream.server.openai.wire import ChatRequest, CompletionRequest, Generate, Message

T = TypeVar("T")
SEED_BITS = 53  # a drawn seed is in the reply, and JavaScript's integers are exact only up to 2^53


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """What a conversion needs that is not in the body: the caller, the server's settings, the model."""

    request_id: str
    tenant: str
    settings: Settings
    info: ModelInfo
    known: Known  # the model's format
    images: Mapping[str, Image] = field(default_factory=dict)  # what the request shows, by its addresses


def chat_job(wire: ChatRequest, caller: Caller, form: Form = CHAT) -> Job:
    """The job of a conversation. Raises `Refused`."""
    if wire.top_logprobs and not wire.logprobs:
        raise bad_field("top_logprobs", "only allowed with logprobs")
    tools = asked_tools(wire, caller.known)
    shared = replace(
        _shared(wire, caller),
        **_limits(wire, wire.max_completion_tokens, caller.settings),
        logprobs=_logprobs(wire, (wire.top_logprobs or 0) if wire.logprobs else None),
        grammar=_chat_grammar(wire, tools, caller.known),
    )
    reading = _reading(wire, tools, caller, shared)
    chat = read_chat(wire, tools, caller)
    if reading is None:
        return _job(wire, form, [chat], shared, caller)
    seen = replace(shared, skip_special=shared.skip_special and not caller.known.needs_controls)
    job = _job(wire, form, [chat], seen, caller)
    wanted = replace(
        job.wanted,
        text=reading,
        silent=reading.silent,
        has_content=not tools.is_forced,
        reasoning_fields=reasoning_fields(wire, caller.settings) or (),
    )
    return replace(job, wanted=wanted)


def _reading(wire: ChatRequest, tools: Asked, caller: Caller, shared: Request) -> Reading | None:
    """How the text of replies is read; None if it can only be content."""
    known, thinks_aloud = caller.known, reasoning_fields(wire, caller.settings) is None
    last = wire.messages[-1].content if wire.continue_final_message else None
    thinks = known.format.reasoning is not None and not thinks_aloud
    if not (tools.shown or thinks or known.format.channels):
        return None
    return Reading(
        known=known,
        tools=tools.tools,
        most_calls=None if tools.many else 1,
        thinks_aloud=thinks_aloud,
        is_forced=shared.grammar is not None,
        continued=last if isinstance(last, str) else None,
        # A request that wants control tokens in the text also gets those that the format does not use.
        silent=known.silent if shared.skip_special and known.needs_controls else frozenset(),
    )


def _chat_grammar(wire: ChatRequest, tools: Asked, known: Known) -> Grammar | None:
    """The grammar of the reply: structured output, forced calls, or a choice between both; None if it is free."""
    grammar = grammar_of(wire, known.format.reasoning)
    if grammar is not None and known.format.channels:
        raise unsupported(grammar.param, f"cannot be enforced in this model's format ({known.format.name})")
    if grammar is not None and tools.is_forced:
        raise bad_field(grammar.param, "cannot be combined with a tool_choice that forces a call")
    if tools.is_forced:
        source = known.forced(list(tools.tools.values()), many=tools.many)
        return Grammar("lark", source, known.format.reasoning, "tools")
    if grammar is None or not tools.shown:
        return grammar
    if grammar.kind != "json_schema":
        raise bad_field(grammar.param, "cannot be combined with tools")
    calls = known.forced(list(tools.tools.values()), many=tools.many)
    return replace(grammar, kind="lark", source=or_json(calls, grammar.source))


def asked_tools(wire: ChatRequest, known: Known) -> Asked:
    """What the request asks of tools. There is one call at most where the next turn could not show more.

    Raises `Refused` for an impossible `tool_choice`, and for tools if `--chat-format` names a format that has none, or
    that the chat template has no place for.
    """
    many = wire.parallel_tool_calls is not False and not known.format.lone
    try:
        tools = asked(wire.tools, wire.tool_choice, many=many)
    except ValueError as error:
        raise bad_field("tool_choice", str(error)) from None
    name = known.format.name
    if tools.shown and not known.can_call:
        raise unsupported("tools", f"calls in this format ({name}) cannot be read (see --chat-format)")
    if tools.shown and not known.has_tools and not known.format.instructs:
        raise unsupported(
            "tools", f"the chat template has no place for tools, which --chat-format {name} needs"
        )
    return tools


# Fields that only shape replies with `choices`.
_SHAPES = ("prompt_logprobs", "return_token_ids", "spec_detail", "return_progress", "timings_per_token")
# What a sampler is switched off by that a request's `samplers` do not name.
_OFF: Mapping[str, Mapping[str, float]] = {
    "penalties": {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "temperature": {"temperature": 1.0},
}


def chat_fields(wire: Generate, shown: Collection[str] = ()) -> dict[str, Any]:
    """The fields of `wire` that a `ChatRequest` has too, for a dialect whose replies are one message.

    shown: fields that these replies have a place for, of those that shape OpenAI's. Raises `Refused` for the others.
    """
    if (wire.n or 1) > 1:
        raise unsupported("n", "a reply is one message here; /v1/chat/completions has choices")
    for name in _SHAPES:
        value = getattr(wire, name)  # 0 asks for something, false does not
        if value is not None and value is not False and name not in shown:
            raise unsupported(name, "only replies with choices have a place for it")
    return {name: getattr(wire, name) for name in Generate.model_fields}


def completion_job(wire: CompletionRequest, caller: Caller, form: Form = TEXT) -> Job:
    """The job of a plain completion. Raises `Refused`."""
    shared = replace(
        _shared(wire, caller),
        **_limits(wire, None, caller.settings),
        logprobs=_logprobs(wire, wire.logprobs),
        echo=bool(wire.echo),
        grammar=grammar_of(wire, None),
    )
    if shared.echo and shared.logprobs is not None:
        shared = replace(shared, prompt_logprobs=max(shared.logprobs, shared.prompt_logprobs or 0))
    for name in ("tools", "tool_choice"):
        if (wire.model_extra or {}).get(name) not in (None, [], "none", "auto"):
            raise unsupported(name, "only /v1/chat/completions has tools")
    if wire.add_special_tokens is False and caller.info.bos_token is not None:
        raise unsupported("add_special_tokens", "give the prompt as token ids, to which none are added")
    return _job(wire, form, _prompts(wire), shared, caller)


def _prompts(wire: CompletionRequest) -> list[Prompt]:
    if not wire.suffix:
        return [one if isinstance(one, str) else tuple(one) for one in wire.prompt]
    if wire.echo:
        raise bad_field("suffix", "cannot be combined with echo")
    texts = [one for one in wire.prompt if isinstance(one, str)]
    if len(texts) != len(wire.prompt):
        raise bad_field("suffix", "only allowed with a prompt of text, not of token ids")
    return [Infill(one, wire.suffix) for one in texts]


def read_chat(wire: ChatRequest, tools: Asked, caller: Caller) -> Chat:
    """The conversation with the arguments of the chat template. Raises `Refused`."""
    going_on = bool(wire.continue_final_message)
    if going_on and wire.add_generation_prompt:
        raise bad_field("continue_final_message", "cannot be true together with add_generation_prompt")
    if going_on and wire.messages[-1].role != "assistant":
        raise bad_field("continue_final_message", "the last message must be the assistant's")
    kwargs = template_defaults(caller.settings)
    if wire.reasoning_effort is not None:
        kwargs["reasoning_effort"] = wire.reasoning_effort
        if wire.reasoning_effort == "none":
            kwargs["enable_thinking"] = False
    kwargs |= wire.chat_template_kwargs or {}
    knows_developer = "developer" in (caller.info.chat_template or "")
    messages = [_message(one, knows_developer=knows_developer) for one in wire.messages]
    if caller.known.by_id:
        messages = with_naming_ids(messages)
    if caller.known.format.instructs:
        messages = instructed(messages, tools.shown, many=tools.many, has_system=caller.known.has_system)
    elif tools.shown:
        kwargs["tools"] = list(tools.shown)
    return Chat(
        messages=messages,
        template_kwargs=kwargs,
        add_generation_prompt=not going_on and wire.add_generation_prompt is not False,
        continue_final_message=going_on,
        images=tuple(caller.images[one.url] for _, one in wire.images()),
    )


def _message(message: Message, *, knows_developer: bool) -> dict[str, Any]:
    """A message as chat templates read it. The legacy role `function` becomes `tool`."""
    role = "system" if message.role == "developer" and not knows_developer else message.role
    told: dict[str, Any] = {
        "reasoning_content": first(message.reasoning_content, message.reasoning),
        "name": message.name,
        "tool_calls": message.tool_calls or None,
        "tool_call_id": message.tool_call_id,
    }
    given = {name: value for name, value in told.items() if value is not None}
    return {"role": "tool" if role == "function" else role, "content": for_template(message.content), **given}


def _shared(wire: Generate, caller: Caller) -> Request:
    """The engine request that all choices are made from, with the fields that both endpoints have."""
    if caller.settings.strict_api and wire.stream_options and not wire.stream:
        raise bad_field("stream_options", "only allowed with stream")
    if wire.stream and wire.prompt_logprobs is not None:
        raise bad_field("prompt_logprobs", "not available with stream")
    return Request(
        id="",
        prompt="",
        speculate=_speculate(wire),
        stop=tuple(wire.stop or ()),
        stop_token_ids=tuple(wire.stop_token_ids or ()),
        include_stop=bool(wire.include_stop_str_in_output or wire.no_stop_trim),
        thinking_budget=thinking_budget(wire, caller.known, caller.settings),
        skip_special=wire.skip_special_tokens is not False,
        prompt_logprobs=wire.prompt_logprobs,
        prediction=(wire.prediction and wire.prediction.content) or None,
        slot=None if wire.id_slot in (None, -1) else wire.id_slot % caller.info.n_slots,
        progress=bool(wire.stream and (wire.return_progress or wire.timings_per_token)),
        steps=bool(wire.spec_detail),
        owner=caller.tenant,
        tenant=_tenant(wire, caller.tenant),
    )


def _limits(wire: Generate, asked: int | None, settings: Settings) -> dict[str, Any]:
    """The fewest and the most tokens of a reply. `asked`: an endpoint's own limit, which wins. Raises `Refused`."""
    most = first(asked, wire.max_tokens, wire.n_predict, settings.n_predict)
    most = None if most == NO_LIMIT else most
    fewest = wire.min_tokens or 0
    if most is not None and fewest > most:
        raise bad_field("min_tokens", f"must not be above max_tokens ({most})")
    return {"max_tokens": most, "min_tokens": fewest}


def _logprobs(wire: Generate, asked: int | None) -> int | None:
    """How many of the likeliest tokens to report per token; None for no log-probabilities at all.

    `asked`: the number by OpenAI's fields; llama-server's `n_probs` is the other way to ask. Raises `Refused` for both.
    """
    if wire.n_probs and asked is not None:
        raise bad_field("n_probs", "cannot be combined with logprobs")
    return asked if asked is not None else wire.n_probs or None


def _job(wire: Generate, form: Form, prompts: Sequence[Prompt], shared: Request, caller: Caller) -> Job:
    """A job with a copy of `shared` per choice, and with the fields that only shape the reply."""
    n = wire.n or 1
    _check_count(n, len(prompts), caller.settings)
    seed = first(wire.seed, caller.settings.seed)
    seed = secrets.randbits(SEED_BITS) if seed is None else seed
    job_id = form.id_prefix + uuid.uuid4().hex
    requests = [
        replace(
            shared,
            id=f"{job_id}-{index}-{i}",
            prompt=prompt,
            sampling=_sampling(wire, (seed + i) % 2**64),
            slot=shared.slot if i == 0 else None,  # further choices run beside the first
        )
        for index, prompt in enumerate(prompts)
        for i in range(n)
    ]
    options = wire.stream_options
    return Job(
        id=job_id,
        request_id=caller.request_id,
        form=form,
        wanted=Wanted(
            logprobs=shared.logprobs,
            prompt_logprobs=wire.prompt_logprobs,
            echo=shared.echo,
            token_ids=bool(wire.return_token_ids),
        ),
        requests=tuple(requests),
        n=n,
        seed=seed,
        stream=bool(wire.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
        detail=bool(wire.spec_detail),
        progress=bool(wire.return_progress),
        timings=bool(wire.timings_per_token),
        predicted=wire.prediction is not None,
        service_tier=wire.service_tier is not None,
    )


def _check_count(n: int, n_prompts: int, settings: Settings) -> None:
    """Raises `Refused` for more choices than slots and queue hold together: no retry could ever get them admitted."""
    if n > settings.parallel:
        raise bad_field("n", f"at most {settings.parallel}, the number of slots (--parallel)")
    most = settings.parallel + settings.max_queue
    if n * n_prompts > most:
        raise bad_field("prompt", f"at most {most} choices in one request (--parallel plus --max-queue)")


def _sampling(wire: Generate, seed: int) -> Sampling:
    values: dict[str, Any] = {
        "temperature": wire.temperature,
        "top_k": wire.top_k,
        "top_p": wire.top_p,
        "min_p": wire.min_p,
        "repeat_penalty": first(wire.repeat_penalty, wire.repetition_penalty),
        "presence_penalty": wire.presence_penalty,
        "frequency_penalty": wire.frequency_penalty,
    }
    for sampler, off in _OFF.items():
        if wire.samplers is not None and sampler not in wire.samplers:
            values |= off
    return Sampling(
        **values,
        repeat_last_n=wire.repeat_last_n,
        logit_bias=tuple(wire.logit_bias or ()),
        allowed_token_ids=None if wire.allowed_token_ids is None else tuple(wire.allowed_token_ids),
        bad_words=tuple(wire.bad_words or ()),
        seed=seed,
        ignore_eos=bool(wire.ignore_eos),
    )


def _speculate(wire: Generate) -> Speculate:
    asked = wire.speculative
    if asked is None:
        return Speculate()
    types = None if asked.types is None else tuple(asked.types)
    return Speculate(**{**asked.model_dump(), "types": types})


def _tenant(wire: Generate, tenant: str) -> str:
    """The tenant, whose cached prompts a request shares. With `cache_prompt` false it is unique to the request."""
    if wire.cache_prompt is False:
        return uuid.uuid4().hex
    return salted(tenant, wire.cache_salt)


def first(*values: T | None) -> T | None:
    """The first value that is not None; None if all are."""
    return next((value for value in values if value is not None), None)
