"""`/tokenize` and `/detokenize`: text to token ids and back, with llama-server's fields."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from slipstream.engine.settings import Settings
from slipstream.server.http.body import checked, read_json
from slipstream.server.http.error_table import bad_request
from slipstream.server.http.gate import Gate
from slipstream.server.native.wire import MAX_PIECES, Detokenize, Tokenize


def routes(gate: Gate, settings: Settings) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        engine = gate.for_work()
        wire = checked(Tokenize, await read_json(request), strict=settings.strict_api)
        ids = await engine.tokenize(
            wire.content, add_special=wire.add_special, parse_special=wire.parse_special
        )
        if not wire.with_pieces:
            return {"tokens": ids}
        if len(ids) > MAX_PIECES:
            raise bad_request(f"with_pieces: at most {MAX_PIECES} tokens at once", param="with_pieces")
        return {"tokens": [{"id": one, "piece": await engine.detokenize([one])} for one in ids]}

    @router.post("/detokenize")
    async def detokenize(request: Request) -> dict[str, Any]:
        engine = gate.for_work()
        wire = checked(Detokenize, await read_json(request), strict=settings.strict_api)
        return {"content": await engine.detokenize(wire.tokens)}

    return router
