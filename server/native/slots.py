"""`POST /slots/{id}?action=save|restore|erase`, as in llama-server: writes what a slot has computed to a file, reads it
back, or drops it.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Path
from starlette.requests import Request
from starlette.responses import Response

from slipstream.engine.api import AsyncEngine
from slipstream.engine.settings import Settings
from slipstream.server.describe.openapi import WORK, answers, asks, takes
from slipstream.server.http.auth import salted, tenant_of
from slipstream.server.http.body import answer_json, checked, read_json
from slipstream.server.http.error_table import bad_field, not_found
from slipstream.server.http.gate import Gate
from slipstream.server.native.replies import SlotErased, SlotRestored, SlotSaved
from slipstream.server.native.wire import EraseSlot, SlotFile
from slipstream.server.report.tally import ms

# The names of the figures in a reply: tokens, bytes, time.
MOVES = {"save": ("n_saved", "n_written", "save_ms"), "restore": ("n_restored", "n_read", "restore_ms")}
ACTIONS = (*MOVES, "erase")
# The path and query of `act`, for the OpenAPI document; `act` checks both by itself.
SlotNumber = Annotated[
    str, Path(description="number of the slot", json_schema_extra={"pattern": "^[0-9]{1,9}$"})
]
ACTION = asks(required=True, action=("what to do", {"type": "string", "enum": list(ACTIONS)}))


def routes(gate: Gate, settings: Settings) -> APIRouter:
    router = APIRouter()

    async def move(action: str, engine: AsyncEngine, slot_id: int, request: Request) -> dict[str, Any]:
        wire = await read_json(request, partial(checked, SlotFile, strict=settings.strict_api))
        moved = engine.save_slot if action == "save" else engine.restore_slot
        done = await moved(slot_id, wire.filename, _tenant(request, wire))
        tokens, n_bytes, time = MOVES[action]
        figures = {tokens: done.n_tokens, n_bytes: done.n_bytes, "timings": {time: ms(done.seconds)}}
        return {"id_slot": slot_id, "filename": wire.filename, **figures}

    async def erase(engine: AsyncEngine, slot_id: int, request: Request) -> dict[str, Any]:
        # A body is optional, as llama-server takes none for this action.
        reading = partial(checked, EraseSlot, strict=settings.strict_api)
        wire = await read_json(request, reading) if await request.body() else reading({})
        n_tokens = await engine.erase_slot(slot_id, _tenant(request, wire))
        return {"id_slot": slot_id, "n_erased": n_tokens}

    @router.post(
        "/slots/{slot}",
        summary="What a slot has computed, to and from a file under `--slot-save-path`",
        responses=answers(SlotSaved | SlotRestored | SlotErased, *WORK, 404),
        openapi_extra=takes(SlotFile, EraseSlot, example={"filename": "talk"}, required=False) | ACTION,
    )
    async def act(slot: SlotNumber, request: Request) -> Response:
        engine = gate.for_work()
        if settings.slot_save_path is None:
            message = "slots cannot be saved, restored or erased: --slot-save-path is not set"
            raise not_found(message, code="not_supported")  # 404: clients repeat a request after a 501
        if not (slot.isascii() and slot.isdecimal() and len(slot) <= 9):
            raise bad_field("id_slot", "must be the number of a slot")
        action = request.query_params.get("action")
        if action not in ACTIONS:
            raise bad_field("action", f"must be one of {', '.join(ACTIONS)}")
        if action == "erase":
            return answer_json(await erase(engine, int(slot), request))
        return answer_json(await move(action, engine, int(slot), request))

    return router


def _tenant(request: Request, wire: EraseSlot) -> str:
    return salted(tenant_of(request), wire.cache_salt)
