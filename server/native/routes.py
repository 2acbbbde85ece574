"""`/tokenize` and `/detokenize`: text to token ids and back, with llama-server's fields and vLLM's."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from slipstream.engine.settings import Settings
from slipstream.server.describe.openapi import WORK, answers, takes
from slipstream.server.http.body import answer_json, checked, read_json
from slipstream.server.http.error_table import bad_request
from slipstream.server.http.gate import Gate
from slipstream.server.native.replies import Content, TokenizerInfo, Tokens
from slipstream.server.native.wire import MAX_PIECES, Detokenize, Tokenize


def routes(gate: Gate, settings: Settings) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/tokenize",
        summary="Text to token ids",
        responses=answers(Tokens, *WORK),
        openapi_extra=takes(Tokenize, example={"content": "def add(a, b):"}),
    )
    async def tokenize(request: Request) -> Response:
        engine = gate.for_work()
        wire = await read_json(request, partial(checked, Tokenize, strict=settings.strict_api))
        ids = await engine.tokenize(
            wire.text, add_special=wire.adds_special, parse_special=wire.parse_special
        )
        counts = {} if wire.prompt is None else {"count": len(ids), "max_model_len": engine.info.n_ctx}
        if not wire.with_pieces:
            return answer_json({"tokens": ids, **counts})
        if len(ids) > MAX_PIECES:
            raise bad_request(f"with_pieces: at most {MAX_PIECES} tokens at once", param="with_pieces")
        pieces = [{"id": one, "piece": await engine.detokenize([one])} for one in ids]
        return answer_json({"tokens": pieces, **counts})

    @router.post(
        "/detokenize",
        summary="Token ids to text",
        responses=answers(Content, *WORK),
        openapi_extra=takes(Detokenize, example={"tokens": [5, 6, 7]}),
    )
    async def detokenize(request: Request) -> Response:
        engine = gate.for_work()
        wire = await read_json(request, partial(checked, Detokenize, strict=settings.strict_api))
        text = await engine.detokenize(wire.tokens)
        return answer_json({"content": text, "prompt": text})

    @router.get(
        "/tokenizer_info",
        summary="The tokenizer's special tokens and the chat template",
        responses=answers(TokenizerInfo, 503),
    )
    async def tokenizer_info() -> Response:
        info = gate.for_work().info
        tokens = {"bos_token": info.bos_token, "eos_token": next(iter(info.eos_tokens), None)}
        return answer_json({**tokens, "chat_template": info.chat_template, "max_model_len": info.n_ctx})

    return router
