"""Gemma 3: every image is scaled to one square and takes as many tokens as any other, which see each other."""

from __future__ import annotations

from typing import Any

from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from slipstream.engine.errors import SettingError
from slipstream.server.vision.family import Family, Parts


class Gemma3Images(Family):
    """No image is cut into several (pan and scan), as by default in transformers."""

    processor_kind = Gemma3ImageProcessorPil
    modules = ("vision_tower", "multi_modal_projector")
    inputs = ("pixel_values",)
    ahead = "everywhere"

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.n_tokens = parts.config.mm_tokens_per_image
        if (most := parts.n_tokens_most) is not None and self.n_tokens > most:
            reason = f"this model's images take {self.n_tokens} tokens, whatever their size"
            raise SettingError("image_max_tokens", most, reason)
        begin, end = (parts.token(id) for id in (parts.config.boi_token_index, parts.config.eoi_token_index))
        self.written = f"\n\n{begin}{self.marker}{end}\n\n"
        self.marker = begin

    def grid(self, width: int, height: int) -> tuple[int, int]:
        return 1, self.n_tokens

    def scaling(self, width: int, height: int) -> dict[str, Any]:
        return {"do_pan_and_scan": False}


FAMILY = Gemma3Images
