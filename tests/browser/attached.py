"""Images for the page's composer, and an engine that takes them."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

from PIL import Image

from tests.http.fake import INFO, FakeEngine


def seeing(**change: Any) -> FakeEngine:
    engine = FakeEngine()
    engine.info = replace(INFO, modalities=("text", "image"), n_ctx=100_000, **change)
    return engine


def picture(kind: str = "png", size: tuple[int, int] = (320, 200), colour: str = "teal") -> bytes:
    written = io.BytesIO()
    Image.new("RGB", size, colour).save(written, kind)
    return written.getvalue()


def file(data: bytes, name: str = "teal.png", kind: str = "image/png") -> dict[str, Any]:
    return {"name": name, "mimeType": kind, "buffer": data}
