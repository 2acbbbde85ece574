"""`/tokenize` and `/detokenize`: text to token ids and back, with llama-server's fields; and `/lora-adapters`."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from slipstream.engine.settings import Settings
from slipstream.server.describe.openapi import WORK, answers, takes
from slipstream.server.http.body import answer_json, checked, read_array, read_json
from slipstream.server.http.error_table import bad_request, unsupported
from slipstream.server.http.gate import Gate
from slipstream.server.native.replies import Adapter, Content, Success, Tokens
from slipstream.server.native.wire import MAX_PIECES, Detokenize, NoAdapters, Tokenize


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
            wire.content, add_special=wire.add_special, parse_special=wire.parse_special
        )
        if not wire.with_pieces:
            return answer_json({"tokens": ids})
        if len(ids) > MAX_PIECES:
            raise bad_request(f"with_pieces: at most {MAX_PIECES} tokens at once", param="with_pieces")
        return answer_json({"tokens": [{"id": one, "piece": await engine.detokenize([one])} for one in ids]})

    @router.post(
        "/detokenize",
        summary="Token ids to text",
        responses=answers(Content, *WORK),
        openapi_extra=takes(Detokenize, example={"tokens": [5, 6, 7]}),
    )
    async def detokenize(request: Request) -> Response:
        engine = gate.for_work()
        wire = await read_json(request, partial(checked, Detokenize, strict=settings.strict_api))
        return answer_json({"content": await engine.detokenize(wire.tokens)})

    _add_adapters(router, gate)
    return router


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
