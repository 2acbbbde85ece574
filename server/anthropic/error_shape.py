"""Errors in Anthropic's shape: the table from status to type, and the layer that puts every refusal below
`/v1/messages` into it, whoever made it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

PATH = "/v1/messages"
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_of(status: int, told: Mapping[str, Any], request_id: str) -> dict[str, Any]:
    """The body of an error, made of the `error` object that other endpoints answer."""
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    message, param = told["message"], told.get("param")
    if param and message.startswith(param):
        # `messages[0].content` is `messages.0.content` here.
        message = re.sub(r"\[(\d+)\]", r".\1", param) + message.removeprefix(param)
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


class MessagesErrors:
    """ASGI layer that rewrites error bodies below `PATH`. It is the outermost, so that no other answers beside it."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self.app = app
        self.path = prefix + PATH

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not f"{scope['path']}/".startswith(f"{self.path}/"):
            await self.app(scope, receive, send)
            return
        start: Message = {}
        body = b""

        async def rewritten(message: Message) -> None:
            nonlocal start, body
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=list(message["headers"]))
                headers["request-id"] = headers.get("x-request-id", "")  # Anthropic's name of it
                message = {**message, "headers": headers.raw}
            if message["type"] == "http.response.start" and message["status"] >= 400:
                start = message
            elif start and message["type"] == "http.response.body":
                body += message.get("body", b"")
                if not message.get("more_body", False):
                    await _send_error(start, body, send)
            else:
                await send(message)

        await self.app(scope, receive, rewritten)


async def _send_error(start: Message, body: bytes, send: Send) -> None:
    headers = MutableHeaders(raw=start["headers"])
    if headers.get("content-type") == "application/json":
        told = orjson.loads(body)["error"]
        body = orjson.dumps(error_of(start["status"], told, headers["request-id"]))
        headers["content-length"] = str(len(body))
    await send({**start, "headers": headers.raw})
    await send({"type": "http.response.body", "body": body})
