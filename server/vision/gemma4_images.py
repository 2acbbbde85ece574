"""Gemma 4: an image is scaled to fill a budget of tokens as its shape allows, which see each other in larger models."""

from __future__ import annotations

from typing import Any

from transformers.models.gemma4.image_processing_pil_gemma4 import (
    Gemma4ImageProcessorPil,
    get_aspect_ratio_preserving_size,
)

from slipstream.engine.errors import SettingError
from slipstream.engine.images import Ahead
from slipstream.server.vision.family import Family, Parts

BUDGETS = (70, 140, 280, 560, 1120)  # tokens that the model was trained for


class Gemma4Images(Family):
    """Patches that the budget leaves unused are padding, and no rows come of them."""

    processor_kind = Gemma4ImageProcessorPil
    modules = ("vision_tower", "embed_vision")
    inputs = ("pixel_values", "image_position_ids")

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.budget = fitting_budget(self.processor.max_soft_tokens, parts.n_tokens_most)
        begin, end = (parts.token(id) for id in (parts.config.boi_token_id, parts.config.eoi_token_id))
        self.written = f"{begin}{self.marker}{end}"

    @property
    def ahead(self) -> Ahead:
        looks = self.parts.config.get_text_config().use_bidirectional_attention == "vision"
        return "in windows" if looks else "nowhere"

    def grid(self, width: int, height: int) -> tuple[int, int]:
        patch, pooled = self.processor.patch_size, self.processor.pooling_kernel_size
        scaled = get_aspect_ratio_preserving_size(
            height=height,
            width=width,
            patch_size=patch,
            max_patches=self.budget * pooled**2,
            pooling_kernel_size=pooled,
        )
        return scaled[0] // (patch * pooled), scaled[1] // (patch * pooled)

    def scaling(self, width: int, height: int) -> dict[str, Any]:
        return {"max_soft_tokens": self.budget}


def fitting_budget(own: int, most: int | None) -> int:
    """The model's own budget, or the largest of a smaller limit. Raises `SettingError` if there is none."""
    if most is None or own <= most:
        return own
    if most < BUDGETS[0]:
        choice = ", ".join(map(str, BUDGETS))
        raise SettingError("image_max_tokens", most, f"this model gives an image one of {choice} tokens")
    return max(budget for budget in BUDGETS if budget <= most)


FAMILY = Gemma4Images
