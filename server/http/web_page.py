"""Routes of the web page's files, read at start from a fixed table: no request's path ever reaches the file system."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import Response

FOLDER = Path(__file__).parents[2] / "webui"
FILES = {
    "/": ("index.html", "text/html"),
    "/app.js": ("app.js", "text/javascript"),
    "/api.js": ("api.js", "text/javascript"),
    "/chat.js": ("chat.js", "text/javascript"),
    "/style.css": ("style.css", "text/css"),
    "/sources.css": ("sources.css", "text/css"),
    "/favicon.svg": ("favicon.svg", "image/svg+xml"),
}
HEADERS = {
    "content-security-policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def routes() -> APIRouter:
    router = APIRouter()
    for path, (name, kind) in FILES.items():
        router.add_api_route(
            path,
            _page((FOLDER / name).read_bytes(), kind),
            methods=["GET", "HEAD"],
            summary=f"The chat page: {name}",
            response_class=Response,
            responses={200: {"content": {kind: {}}}},
        )
    return router


def _page(content: bytes, kind: str) -> Callable[[], Response]:
    def page() -> Response:
        return Response(content, headers=HEADERS, media_type=kind)

    return page
