"""Wire models to engine requests: pure functions. From here on nothing is JSON or optional by accident.

A job is everything one HTTP request asks for: one engine request per choice, and how to tell the outcome.
"""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from engine.api import Chat, ModelInfo, Prompt, Request, Sampling, Speculate
from engine.settings import Settings
from server.auth import salted
from server.errors import bad_request
from server.openai.forms import CHAT, TEXT, Form
from server.openai.wire import ChatRequest, CompletionRequest, Generate, Message

T = TypeVar("T")
SEED_BITS = 53  # a drawn seed is told to the client, and JavaScript keeps integers only up to here


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks, and of what: the parts of a conversion that are not in the body."""

    request_id: str
    tenant: str
    settings: Settings
    info: ModelInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The choices to generate and the shape of the answer."""

    id: str
    request_id: str
    form: Form
    requests: tuple[Request, ...]  # n per prompt, prompt by prompt
    n: int
    seed: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    detail: bool
    predicted: bool  # the request brought a prediction, be it empty


def chat_job(wire: ChatRequest, caller: Caller) -> Job:
    limit = first(wire.max_completion_tokens, wire.max_tokens, wire.n_predict)
    return _job(wire, CHAT, [read_chat(wire, caller.info)], limit, caller)


def completion_job(wire: CompletionRequest, caller: Caller) -> Job:
    prompts = [one if isinstance(one, str) else tuple(one) for one in wire.prompt]
    return _job(wire, TEXT, prompts, first(wire.max_tokens, wire.n_predict), caller)


def read_chat(wire: ChatRequest, info: ModelInfo) -> Chat:
    """The conversation with the template's arguments."""
    going_on = bool(wire.continue_final_message)
    if going_on and wire.add_generation_prompt:
        raise bad_request(
            "continue_final_message: cannot be true together with add_generation_prompt",
            param="continue_final_message",
        )
    if going_on and wire.messages[-1].role != "assistant":
        raise bad_request(
            "continue_final_message: the last message must be the assistant's", param="continue_final_message"
        )
    kwargs = dict(wire.chat_template_kwargs or {})
    if wire.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", wire.reasoning_effort)
        if wire.reasoning_effort == "none":
            kwargs.setdefault("enable_thinking", False)
    knows_developer = "developer" in (info.chat_template or "")
    return Chat(
        messages=[_message(one, knows_developer=knows_developer) for one in wire.messages],
        template_kwargs=kwargs,
        add_generation_prompt=not going_on and wire.add_generation_prompt is not False,
        continue_final_message=going_on,
    )


def _message(message: Message, *, knows_developer: bool) -> dict[str, str]:
    role = "system" if message.role == "developer" and not knows_developer else message.role
    told = {"role": role, "content": message.content}
    reasoning = first(message.reasoning_content, message.reasoning)
    if reasoning is not None:
        told["reasoning_content"] = reasoning
    if message.name is not None:
        told["name"] = message.name
    return told


def _job(
    wire: Generate, form: Form, prompts: Sequence[Prompt], max_tokens: int | None, caller: Caller
) -> Job:
    n = wire.n or 1
    _check_count(n, len(prompts), caller.settings)
    seed = first(wire.seed, caller.settings.seed)
    seed = secrets.randbits(SEED_BITS) if seed is None else seed
    job_id = form.id_prefix + uuid.uuid4().hex
    shared = Request(
        id=job_id,
        prompt="",
        speculate=_speculate(wire),
        stop=tuple(wire.stop or ()),
        max_tokens=max_tokens,
        prediction=(wire.prediction and wire.prediction.content) or None,
        tenant=_tenant(wire, caller.tenant, job_id),
    )
    requests = [
        replace(
            shared, id=f"{job_id}-{index}-{i}", prompt=prompt, sampling=_sampling(wire, (seed + i) % 2**64)
        )
        for index, prompt in enumerate(prompts)
        for i in range(n)
    ]
    options = wire.stream_options
    return Job(
        id=job_id,
        request_id=caller.request_id,
        form=form,
        requests=tuple(requests),
        n=n,
        seed=seed,
        stream=bool(wire.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
        detail=bool(wire.spec_detail),
        predicted=wire.prediction is not None,
    )


def _check_count(n: int, n_prompts: int, settings: Settings) -> None:
    """More choices than slots and queue hold together could never be admitted, however often retried."""
    if n > settings.parallel:
        raise bad_request(f"n: at most {settings.parallel}, the number of slots (--parallel)", param="n")
    most = settings.parallel + settings.max_queue
    if n * n_prompts > most:
        raise bad_request(
            f"prompt: at most {most} choices in one request (--parallel plus --max-queue)", param="prompt"
        )


def _sampling(wire: Generate, seed: int) -> Sampling:
    return Sampling(
        temperature=wire.temperature,
        top_k=wire.top_k,
        top_p=wire.top_p,
        min_p=wire.min_p,
        repeat_penalty=first(wire.repeat_penalty, wire.repetition_penalty),
        repeat_last_n=wire.repeat_last_n,
        presence_penalty=wire.presence_penalty,
        frequency_penalty=wire.frequency_penalty,
        logit_bias=tuple((wire.logit_bias or {}).items()),
        seed=seed,
        ignore_eos=bool(wire.ignore_eos),
    )


def _speculate(wire: Generate) -> Speculate:
    asked = wire.speculative
    if asked is None:
        return Speculate()
    return Speculate(
        types=None if asked.types is None else tuple(asked.types),
        n_max=asked.n_max,
        n_min=asked.n_min,
        p_min=asked.p_min,
        ngram_size_n=asked.ngram_size_n,
        ngram_size_m=asked.ngram_size_m,
        ngram_min_hits=asked.ngram_min_hits,
    )


def _tenant(wire: Generate, tenant: str, job_id: str) -> str:
    """Prefix-cache salt. A request that wants no cached prompt gets a salt nobody else has."""
    if wire.cache_prompt is False:
        return job_id
    return salted(tenant, wire.cache_salt)


def first(*values: T | None) -> T | None:
    """The first value that was given."""
    return next((value for value in values if value is not None), None)
