"""An image among the texts of a turn, and a turn's content with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image as a request shows it: by an address with the scheme data, http, https or file."""

    url: str = field(repr=False)


class ImageRefused(Exception):
    """An image that cannot be shown to the model; says why, behind the name of the field."""


# Texts with images among them, in their order; a turn without images is one text.
Parts = Sequence[str | ImagePart]
Content = str | Parts
Placed = tuple[
    str, ImagePart
]  # an image with the name of its field, as in `messages[0].content[1].image_url`


def images_in(content: Content | None, place: str, name: str) -> Iterator[Placed]:
    """The images of a content that is at `place` in the request; `name`: the field of a part that has the image."""
    if content is None or isinstance(content, str):
        return
    for index, part in enumerate(content):
        if isinstance(part, ImagePart):
            yield f"{place}[{index}]{name}", part


def for_template(content: Content | None) -> Any:
    """A content as chat templates read it: a text, or a list of parts with what there is an image of left out."""
    if content is None or isinstance(content, str):
        return content
    return [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in content
    ]


def joined(contents: Iterable[Content]) -> Content:
    """Contents as one: texts are joined by a line break, empty ones are left out."""
    filled = [one for one in contents if one]
    texts = [one for one in filled if isinstance(one, str)]
    if len(texts) == len(filled):
        return "\n".join(texts)
    return [part for one in filled for part in ([one] if isinstance(one, str) else one)]
