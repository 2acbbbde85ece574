"""Endpoints of other servers that this server does not have: each is refused by name, in OpenAI's error shape.

The status is 404 rather than 501, because clients repeat a request after any 5xx.
"""

from __future__ import annotations

from typing import NoReturn

from fastapi import APIRouter

from slipstream.server.http.error_table import not_found

# What is absent, the paths it has elsewhere, and the endpoint to use instead, if any.
ABSENT: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("embeddings", ("/v1/embeddings", "/embeddings", "/embedding"), ""),
    ("reranking", ("/v1/rerank", "/v2/rerank", "/rerank", "/v1/reranking", "/reranking"), ""),
    ("scoring and classifying", ("/v1/score", "/score", "/classify", "/pooling"), ""),
    ("SGLang's own completions", ("/generate",), "/v1/completions"),
    ("audio", ("/v1/audio/{rest:path}", "/audio/{rest:path}"), ""),
    ("making images", ("/v1/images/{rest:path}",), ""),
    ("LoRA adapters", ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"), ""),
    ("batches of messages", ("/v1/messages/batches",), "/v1/messages"),
)


def routes() -> APIRouter:
    router = APIRouter(include_in_schema=False)
    for what, paths, instead in ABSENT:
        for path in paths:
            _add(router, path, what, instead)
    return router


def _add(router: APIRouter, path: str, what: str, instead: str) -> None:
    hint = f"; use {instead}" if instead else ""

    @router.api_route(path, methods=["GET", "POST"], response_model=None)
    async def refuse() -> NoReturn:
        raise not_found(f"{what}: not supported here{hint}", code="not_supported")
