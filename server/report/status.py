"""Status routes: `/health`, `/ready`, `/live`, `/slots`, `/props`, with llama-server's keys where it has such; and
vLLM's `/ping` (for SageMaker), `/version` and `/load`.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from slipstream.engine.api import AsyncEngine
from slipstream.engine.naming import as_text
from slipstream.engine.settings import Settings
from slipstream.engine.stats import SlotState
from slipstream.server import version
from slipstream.server.describe.openapi import answers, failing
from slipstream.server.http.auth import is_of, tenant_of
from slipstream.server.http.body import answer_json
from slipstream.server.http.error_table import not_found, unavailable
from slipstream.server.http.gate import Gate
from slipstream.server.http.limits import most_body
from slipstream.server.openai.formats.reading import Knowing, Known
from slipstream.server.openai.model_card import caps
from slipstream.server.report.replies import (
    EngineState,
    Health,
    HealthProblem,
    Life,
    Load,
    Props,
    Slot,
    Version,
)
from slipstream.server.report.tally import ms, shown

SECRET = frozenset({"api_key", "otlp_endpoint"})  # an address may have a user and a password in it
NoSlot = Annotated[str, Query(description="1: 503 while every slot is busy")]
# Arguments of the decorators of `health`, a route with four paths.
HEALTH: Any = {
    "methods": ["GET", "HEAD"],
    "summary": "Ready for requests?",
    "responses": answers(Health) | failing(500, 503, model=HealthProblem),
}


def routes(gate: Gate, settings: Settings, knowing: Knowing) -> APIRouter:
    router = APIRouter()

    @router.api_route("/ready", **HEALTH)
    @router.api_route("/ping", **HEALTH)
    @router.api_route("/v1/health", **HEALTH)
    @router.api_route("/health", **HEALTH)
    async def health(fail_on_no_slot: NoSlot = "") -> Response:
        """503 while loading, draining or failed, and without an idle slot if that is asked."""
        status = gate.status
        if status == "ready":
            _check_idle(fail_on_no_slot, gate.for_looking())
            return answer_json({"status": "ok", **_warnings(gate.for_looking())})
        problem = gate.refusal()
        return answer_json({"status": status, **problem.content()}, 503, problem.headers)

    @router.api_route(
        "/live",
        methods=["GET", "HEAD"],
        summary="Worth keeping alive? Only a failed engine is not",
        responses=answers(Life) | failing(503, model=Life),
    )
    async def live() -> Response:
        failed, age_s = gate.status == "failed", gate.engine.step_age_s if gate.engine else 0.0
        content: dict[str, Any] = {"status": "failed" if failed else "ok", "step_age_s": round(age_s, 3)}
        if gate.engine and gate.engine.device_loss is not None:
            content["reason"] = str(gate.engine.device_loss)
        return answer_json(content, 503 if failed else 200)

    @router.get("/version", summary="The server's version", responses=answers(Version))
    async def version_of_server() -> Response:
        return answer_json({"version": version()})

    @router.get("/load", summary="How many replies are being made or wait", responses=answers(Load, 503))
    async def load() -> Response:
        stats = gate.for_looking().stats()
        return answer_json({"server_load": sum(one.busy for one in stats.slots) + stats.n_waiting})

    @router.get("/slots", summary="What each slot is doing", responses=answers(list[Slot], 404, 503))
    async def slots(request: Request, fail_on_no_slot: NoSlot = "") -> Response:
        engine = gate.for_looking()
        if not settings.slots:
            raise not_found("/slots is switched off (--no-slots)", code="not_supported")
        tenant = tenant_of(request)
        _check_idle(fail_on_no_slot, engine)
        stats = engine.stats()
        step_ms = {part: ms(seconds) for part, seconds in stats.step_average_s.items()}
        shown = [one if is_of(one.tenant, tenant) else _of_another(one) for one in stats.slots]
        return answer_json([_slot(one, engine) | {"step_ms": step_ms} for one in shown])

    @router.get("/props", summary="Settings, model and engine", responses=answers(Props, 503))
    async def props() -> Response:
        engine = gate.for_looking()
        return answer_json(_props(engine, settings, await knowing.of(engine)))

    return router


def _check_idle(fail_on_no_slot: str, engine: AsyncEngine) -> None:
    """Raises `Refused` where the request asks for an idle slot and there is none."""
    if fail_on_no_slot == "1" and all(one.busy for one in engine.stats().slots):
        raise unavailable("no slot is idle", "no_idle_slot")


def _warnings(engine: AsyncEngine) -> dict[str, Any]:
    """`{"warnings": […]}` with what works less well than it should; empty if all is well."""
    stats = engine.stats()
    told = [f"{name} failed repeatedly and is switched off" for name in stats.disabled_drafters]
    told += [f"{name} is hardly ever right: see the log" for name in stats.doubtful_drafters]
    told += [f"operator {one}" for one in engine.info.replaced_operators]
    if engine.info.inexact_sums is not None:
        told.append(f"sums over ranks: {engine.info.inexact_sums}")
    return {"warnings": told} if told else {}


def _of_another(slot: SlotState) -> SlotState:
    """A slot as those see it whose request it does not serve."""
    return SlotState(
        slot.id, slot.busy, request_id=None, n_prompt=0, n_past=0, n_cached=0, n_decoded=0, n_remaining=-1
    )


def _slot(slot: SlotState, engine: AsyncEngine) -> dict[str, Any]:
    return {
        "id": slot.id,
        "n_ctx": engine.info.n_ctx,
        "speculative": bool(engine.info.drafters),
        "is_processing": slot.busy,
        "id_task": slot.request_id,
        "n_prompt_tokens": slot.n_prompt,
        "n_prompt_tokens_processed": max(0, min(slot.n_past, slot.n_prompt) - slot.n_cached),
        "n_prompt_tokens_cache": slot.n_cached,
        "n_past": slot.n_past,
        "next_token": [
            {"has_next_token": slot.busy, "n_remain": slot.n_remaining, "n_decoded": slot.n_decoded}
        ],
        "drafters": shown(slot.drafters),
        "n_max": slot.n_max,
        "drafter": slot.drafter,
        "recent": slot.recent,
    }


def _props(engine: AsyncEngine, settings: Settings, known: Known) -> dict[str, Any]:
    info, stats = engine.info, engine.stats()
    told = {
        name: as_text(value) if isinstance(value, str) else value
        for name, value in dataclasses.asdict(settings).items()
        if name not in SECRET
    }
    return {
        "default_generation_settings": {
            "params": {**info.sampling_defaults, "n_predict": settings.n_predict},
            "n_ctx": info.n_ctx,
        },
        "total_slots": info.n_slots,
        "model_alias": info.name,
        "model_path": info.path,
        "modalities": {"vision": "image" in info.modalities, "video": False, "audio": False},
        "endpoint_slots": settings.slots,
        "endpoint_props": False,
        "endpoint_metrics": True,
        "webui": settings.webui,
        "cors_proxy_enabled": False,
        "chat_template": info.chat_template,
        **({"chat_template_tool_use": info.tool_template} if info.tool_template is not None else {}),
        "chat_template_caps": caps(info, known),
        "chat_format": known.format.name,
        "bos_token": info.bos_token,
        "eos_token": info.eos_tokens[0] if info.eos_tokens else None,
        "build_info": info.fingerprint,
        "is_sleeping": False,
        "status": engine.status,
        "settings": told | {"max_body": most_body(info, settings)},
        "model": dataclasses.asdict(info),
        "speculation": {
            "drafters": list(info.drafters),
            "disabled": list(stats.disabled_drafters),
            "n_max": settings.draft_max,
            "counts": shown(stats.drafters),
        },
        "engine": {name: getattr(stats, name) for name in EngineState.model_fields},
    }
