"""llama-server's own completions, `/completion` and `/infill`; and text to token ids and back, `/tokenize` and
`/detokenize`, with vLLM's fields too; and `/lora-adapters`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from slipstream.server.describe.openapi import GENERATE, WORK, answers, takes
from slipstream.server.http.body import answer_json, checked, read_array, read_json
from slipstream.server.http.error_table import bad_field, unsupported
from slipstream.server.http.gate import Gate
from slipstream.server.native.completion_reply import NativeReply
from slipstream.server.native.generation import (
    InfillRequest,
    NativeCompletion,
    NativeRequest,
    infill_job,
    native_job,
)
from slipstream.server.native.replies import (
    Adapter,
    Content,
    Generated,
    GeneratedPiece,
    Success,
    TokenizerInfo,
    Tokens,
)
from slipstream.server.native.wire import MAX_PIECES, Detokenize, NoAdapters, Tokenize, TokenizeChat
from slipstream.server.openai.choices import naming_prompt
from slipstream.server.openai.convert import chat_job
from slipstream.server.openai.refuse import without_refused
from slipstream.server.openai.serving import Convert, Serving, in_names

# vLLM's way to ask for the vocabulary's own spelling of each token.
_NOT_TOLD = {"return_token_strs": ("with_pieces gives each token's text", (False,))}

Native = TypeVar("Native", bound=NativeRequest)
Chosen = dict[str, Any]  # with `response_fields`
_GENERATED = answers(
    Generated | Chosen | list[Generated | Chosen],
    *GENERATE,
    event=(GeneratedPiece, Generated),
    has_done=False,
)
COMPLETION: Any = {
    "summary": "Continue a text, in llama-server's form",
    "responses": _GENERATED,
    "openapi_extra": takes(NativeCompletion, example={"prompt": "def add(a, b):\n", "n_predict": 16}),
}


def routes(serving: Serving) -> APIRouter:
    router = APIRouter()
    _add_completions(router, serving)
    _add_tokens(router, serving)
    _add_tokenizer(router, serving.gate)
    _add_adapters(router, serving.gate)
    return router


async def _reply(
    serving: Serving, request: Request, model: type[Native], convert: Convert[Native]
) -> Response:
    engine = serving.gate.for_work()
    wire = await serving.read(request, model)
    job = await serving.converted(engine, request, wire, convert)
    with naming_prompt(job):
        prompts = [
            one if isinstance(one, str) else await engine.detokenize(await engine.prompt_ids(one))
            for one in job.prompts
        ]
    form = replace(job.form, reply=partial(NativeReply, wire=wire, prompts=prompts))
    return await serving.answer(request, engine, replace(job, form=form))


def _add_completions(router: APIRouter, serving: Serving) -> None:
    @router.post("/completions", **COMPLETION)
    @router.post("/completion", **COMPLETION)
    async def completion(request: Request) -> Response:
        return await _reply(serving, request, NativeCompletion, native_job)

    @router.post(
        "/infill",
        summary="Fill the gap between two texts, for models with fill-in-the-middle tokens",
        responses=_GENERATED,
        openapi_extra=takes(
            InfillRequest,
            example={"input_prefix": "def add(a, b):\n", "input_suffix": "\n", "n_predict": 16},
        ),
    )
    async def infill(request: Request) -> Response:
        return await in_names({"suffix": "input_suffix"}, _reply(serving, request, InfillRequest, infill_job))


def _piece(written: bytes) -> str | list[int]:
    try:
        return written.decode()
    except UnicodeDecodeError:
        return list(written)


def _add_tokens(router: APIRouter, serving: Serving) -> None:
    gate, strict = serving.gate, serving.settings.strict_api

    def read_text_or_chat(data: dict[str, Any]) -> Tokenize | TokenizeChat:
        data = without_refused(data, (), _NOT_TOLD, ())
        if data.get("messages") is None:
            return checked(Tokenize, data, strict=strict)
        return checked(TokenizeChat, TokenizeChat.prepared(data), strict=strict)

    @router.post(
        "/tokenize",
        summary="Text to token ids",
        responses=answers(Tokens, *WORK),
        openapi_extra=takes(Tokenize, TokenizeChat, example={"content": "def add(a, b):"}),
    )
    async def tokenize(request: Request) -> Response:
        engine = gate.for_work()
        wire = await read_json(request, read_text_or_chat)
        if isinstance(wire, TokenizeChat):
            job = await serving.converted(engine, request, wire, chat_job)
            ids = await engine.prompt_ids(job.requests[0].prompt)
        else:
            special = {"add_special": wire.adds_special, "parse_special": wire.parse_special}
            ids = await engine.tokenize(wire.text, **special)
        is_for_vllm = isinstance(wire, TokenizeChat) or wire.prompt is not None
        counts = {"count": len(ids), "max_model_len": engine.info.n_ctx} if is_for_vllm else {}
        if not wire.with_pieces:
            return answer_json({"tokens": ids, **counts})
        if len(ids) > MAX_PIECES:
            raise bad_field("with_pieces", f"at most {MAX_PIECES} tokens at once")
        written = await engine.token_bytes(ids)
        pieces = [{"id": one, "piece": _piece(piece)} for one, piece in zip(ids, written, strict=True)]
        return answer_json({"tokens": pieces, **counts})

    @router.post(
        "/detokenize",
        summary="Token ids to text",
        responses=answers(Content, *WORK),
        openapi_extra=takes(Detokenize, example={"tokens": [5, 6, 7]}),
    )
    async def detokenize(request: Request) -> Response:
        engine = gate.for_work()
        wire = await read_json(request, partial(checked, Detokenize, strict=strict))
        text = await engine.detokenize(wire.tokens)
        return answer_json({"content": text, "prompt": text})


def _add_tokenizer(router: APIRouter, gate: Gate) -> None:
    @router.get(
        "/tokenizer_info",
        summary="The tokenizer's special tokens and the chat template",
        responses=answers(TokenizerInfo, 503),
    )
    async def tokenizer_info() -> Response:
        info = gate.for_looking().info
        tokens = {"bos_token": info.bos_token, "eos_token": next(iter(info.eos_tokens), None)}
        return answer_json({**tokens, "chat_template": info.chat_template, "max_model_len": info.n_ctx})


def _add_adapters(router: APIRouter, gate: Gate) -> None:
    """There are no adapters, and clients of llama-server that ask for them first shall get to know it."""

    @router.get("/lora-adapters", summary="LoRA adapters: none", responses=answers(list[Adapter], 503))
    async def adapters() -> Response:
        gate.for_looking()
        return answer_json([])

    @router.post(
        "/lora-adapters",
        summary="Set the scales of no LoRA adapters",
        responses=answers(Success, *WORK),
        openapi_extra=takes(NoAdapters, example=[]),
    )
    async def set_adapters(request: Request) -> Response:
        gate.for_work()
        if await read_array(request):
            raise unsupported("lora", "LoRA adapters are not supported here; [] is all that can be set")
        return answer_json({"success": True})
