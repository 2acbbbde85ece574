"""`/completion` and `/infill`: what clients send, and the job it means, which is that of a plain completion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from slipstream.engine.api import Infill
from slipstream.server.describe.shape import optional
from slipstream.server.http.error_table import bad_field
from slipstream.server.native.completion_reply import NativeReply
from slipstream.server.native.line_limits import LimitedText
from slipstream.server.openai import readers
from slipstream.server.openai.convert import Caller, chat_fields, completion_job, first
from slipstream.server.openai.job import Form, Job
from slipstream.server.openai.progress import FIELDS
from slipstream.server.openai.readers import INT32
from slipstream.server.openai.wire import CompletionRequest, Generate

MAX_FIELDS = 64
MAX_EXTRA = 256


class NativeRequest(Generate):
    """Fields of both endpoints beside those of all completions."""

    n_cmpl: int | None = optional("llama-server's name of `n`", ge=1)
    response_fields: Annotated[list[str], Field(max_length=MAX_FIELDS)] | None = optional(
        "the only fields of the reply to send; a/b: the field b of a"
    )
    return_tokens: bool | None = optional("the token ids in the last object too")
    n_indent: int | None = optional(
        "end before a line that is indented by fewer white space characters", ge=0, le=INT32
    )
    t_max_predict_ms: int | None = optional(
        "end at the first line break after so many milliseconds of generation; -1 or 0: no limit",
        ge=-1,
        le=INT32,
    )


class NativeCompletion(NativeRequest):
    prompt: readers.Prompts = Field(
        description="a text, token ids, both in a row, or a list of these; each is continued by itself"
    )


class ExtraFile(BaseModel):
    """Another file that the completion may refer to."""

    model_config = ConfigDict(strict=True, extra="ignore")

    text: str = Field(description="what it says")
    filename: str | None = optional("its name", max_length=1024)


class InfillRequest(NativeRequest):
    input_prefix: str = Field(description="the text before the gap")
    input_suffix: str = Field(description="the text behind the gap")
    input_extra: Annotated[list[ExtraFile], Field(max_length=MAX_EXTRA)] | None = optional(
        "texts of other files, before the rest"
    )
    prompt: str | None = optional("the beginning of what fills the gap")


def native_job(wire: NativeCompletion, caller: Caller) -> Job:
    """The job of `/completion`. Raises `Refused`."""
    return _job(wire, wire.prompt, caller, "prompt")


def infill_job(wire: InfillRequest, caller: Caller) -> Job:
    """The job of `/infill`. Raises `Refused`."""
    if not (wire.input_prefix or wire.input_suffix or wire.prompt):
        raise bad_field("input_prefix", "is empty, and so is input_suffix")
    files = tuple((one.filename or "tmp", one.text) for one in wire.input_extra or ())
    prompt = Infill(wire.input_prefix + (wire.prompt or ""), wire.input_suffix, files)
    job = _job(wire, ["-"], caller, "input_prefix")
    return replace(job, requests=tuple(replace(one, prompt=prompt) for one in job.requests))


def _job(wire: NativeRequest, prompts: list[Any], caller: Caller, field: str) -> Job:
    n = first(wire.n, wire.n_cmpl)
    shared: Mapping[str, Any] = chat_fields(wire.model_copy(update={"n": None}), FIELDS) | {"n": n}
    plain = CompletionRequest.model_construct(**shared, prompt=prompts)
    job = completion_job(plain, caller, Form("cmpl-", field, partial(NativeReply, wire=wire)))
    text = partial(_text, wire.n_indent or 0, max(0, wire.t_max_predict_ms or 0) / 1000)
    return replace(
        job,
        wanted=replace(job.wanted, text=text),
        # The first event of a stream says which slot it has.
        requests=tuple(replace(one, progress=job.stream) for one in job.requests),
    )


def _text(n_indent: int, seconds: float, prompt_tail: str) -> LimitedText:
    return LimitedText(n_indent, seconds)
