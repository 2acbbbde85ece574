"""Routes of the web page's files, read at start from a fixed table: no request's path ever reaches the file system."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

FOLDER = Path(__file__).parents[2] / "webui"
FILES = {
    "/": ("index.html", "text/html"),
    "/app.js": ("app.js", "text/javascript"),
    "/style.css": ("style.css", "text/css"),
    "/favicon.svg": ("favicon.svg", "image/svg+xml"),
    "/LICENSES.txt": ("LICENSES.txt", "text/plain"),
}
HEADERS = {
    # The page makes elements and never parses markup; trusted types have the browser hold it to that. Images that a
    # user attaches are data: addresses, and none but these and the page's own are shown.
    "content-security-policy": (
        "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
        " require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
    "vary": "accept-encoding",
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


def _page(content: bytes, kind: str) -> Callable[[Request], Response]:
    packed = gzip.compress(content, mtime=0)

    def page(request: Request) -> Response:
        if takes_gzip(request.headers.get("accept-encoding", "")):
            return Response(packed, headers={**HEADERS, "content-encoding": "gzip"}, media_type=kind)
        return Response(content, headers=HEADERS, media_type=kind)

    return page


def takes_gzip(accepted: str) -> bool:
    """Whether a value of `accept-encoding` names gzip, and not as refused."""
    for one in accepted.lower().split(","):
        name, _, weight = one.partition(";")
        if name.strip() == "gzip":
            return weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False
