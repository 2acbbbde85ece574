"""The images of a prompt: where they are among its tokens, and what the networks are given of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from slipstream.engine.api import Chat, Image, Request
from slipstream.engine.errors import Unsupported
from slipstream.engine.images import ImageLayout, PlacedImage, Vision


@dataclass(frozen=True, slots=True)
class Sight:
    """What sees images: the model, and perhaps its draft model. None: it sees none."""

    target: Vision | None = None
    draft: Vision | None = None

    def of(self, chat: Chat) -> Vision | None:
        """What sees a chat's images. Raises `Unsupported` if it has some and nothing does."""
        if chat.images and self.target is None:
            raise Unsupported("messages", "this model is served without what sees images")
        return self.target

    def close(self) -> None:
        for one in (self.target, self.draft):
            if one is not None:
                one.close()


@dataclass(frozen=True, slots=True)
class Shown:
    """A prompt as tokens, with its images in their places."""

    token_ids: list[int]
    images: Sequence[tuple[int, Image, ImageLayout]] = ()  # each with the index of its first token

    async def placed(self, vision: Vision | None) -> Sequence[PlacedImage]:
        """The images as a network takes them; none if it sees none, or sees them in other places than the target.

        Raises what `Vision.features` raises.
        """
        if vision is None or not self.images:
            return ()
        layouts = [vision.layout(image.width, image.height) for _, image, _ in self.images]
        pairs = zip(layouts, self.images, strict=True)
        if any(own.token_ids != layout.token_ids for own, (_, _, layout) in pairs):
            return ()
        futures = [asyncio.wrap_future(vision.features(image)) for _, image, _ in self.images]
        features = await asyncio.gather(*futures)
        places = zip(self.images, layouts, features, strict=True)
        return [PlacedImage(start, layout, image.key, rows) for (start, image, _), layout, rows in places]


def without_pixels(request: Request) -> Request:
    """A request as its slot keeps it: what its images are to the networks is there, so their pixels need not be."""
    prompt = request.prompt
    if not isinstance(prompt, Chat) or not prompt.images:
        return request
    return replace(request, prompt=replace(prompt, images=()))


def shown(token_ids: Sequence[int], images: Sequence[Image], vision: Vision) -> Shown:
    """The prompt with the tokens of its images where a placeholder stands for each. Raises `InvalidRequest`."""
    made: list[int] = []
    placed = []
    left = iter(images)
    for token_id in token_ids:
        image = next(left, None) if token_id == vision.placeholder else None
        if image is None:
            made.append(token_id)
            continue
        layout = vision.layout(image.width, image.height)
        placed.append((len(made), image, layout))
        made += layout.token_ids
    return Shown(made, placed)
