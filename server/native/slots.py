"""`POST /slots/{id}?action=save|restore|erase`: what a slot has computed, to and from a file, as in llama-server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from slipstream.engine.api import AsyncEngine
from slipstream.engine.settings import Settings
from slipstream.server.http.auth import salted
from slipstream.server.http.body import checked, read_json
from slipstream.server.http.error_table import bad_request, not_supported
from slipstream.server.http.gate import Gate
from slipstream.server.native.wire import EraseSlot, SlotFile
from slipstream.server.report.tally import ms

Action = Callable[[AsyncEngine, int, Request], Awaitable[dict[str, Any]]]


def routes(gate: Gate, settings: Settings) -> APIRouter:
    router = APIRouter()

    async def save(engine: AsyncEngine, slot_id: int, request: Request) -> dict[str, Any]:
        wire = checked(SlotFile, await read_json(request), strict=settings.strict_api)
        done = await engine.save_slot(slot_id, wire.filename, _tenant(request, wire))
        return {
            "id_slot": slot_id,
            "filename": wire.filename,
            "n_saved": done.n_tokens,
            "n_written": done.n_bytes,
            "timings": {"save_ms": ms(done.seconds)},
        }

    async def restore(engine: AsyncEngine, slot_id: int, request: Request) -> dict[str, Any]:
        wire = checked(SlotFile, await read_json(request), strict=settings.strict_api)
        done = await engine.restore_slot(slot_id, wire.filename, _tenant(request, wire))
        return {
            "id_slot": slot_id,
            "filename": wire.filename,
            "n_restored": done.n_tokens,
            "n_read": done.n_bytes,
            "timings": {"restore_ms": ms(done.seconds)},
        }

    async def erase(engine: AsyncEngine, slot_id: int, request: Request) -> dict[str, Any]:
        # llama-server takes no body here.
        body = await read_json(request) if await request.body() else {}
        wire = checked(EraseSlot, body, strict=settings.strict_api)
        n_tokens = await engine.erase_slot(slot_id, _tenant(request, wire))
        return {"id_slot": slot_id, "n_erased": n_tokens}

    actions: dict[str, Action] = {"save": save, "restore": restore, "erase": erase}

    @router.post("/slots/{slot}")
    async def act(slot: str, request: Request) -> dict[str, Any]:
        engine = gate.for_work()
        if settings.slot_save_path is None:
            raise not_supported("slots cannot be saved, restored or erased: --slot-save-path is not set")
        if not (slot.isascii() and slot.isdecimal() and len(slot) <= 9):
            raise bad_request("id_slot: must be the number of a slot", param="id_slot")
        action = actions.get(request.query_params.get("action", ""))
        if action is None:
            raise bad_request(f"action: must be one of {', '.join(actions)}", param="action")
        return await action(engine, int(slot), request)

    return router


def _tenant(request: Request, wire: EraseSlot) -> str:
    return salted(getattr(request.state, "tenant", ""), wire.cache_salt)  # only set where keys are checked
