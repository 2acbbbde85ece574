"""Finds the markers in a reply: transformers' `ResponseParser`, which takes them as a declarative template.

It is told that all between the markers is text, so that it never refuses a reply. Nothing else here imports
transformers: that takes a second, and loads no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

Event = Mapping[str, Any]  # a kind (below), a field, the text of a chunk
Fields = Mapping[str, Mapping[str, Any]]  # markers of each field; the one without is all the rest

OPENS, CHUNK, CLOSES = "region_open", "region_chunk", "region_close"
AT_ONCE = ""  # a `close_pattern`: the field is a marker that holds nothing


class Scanner(Protocol):
    def feed(self, text: str) -> Iterable[Event]: ...

    def finalize(self) -> tuple[Any, Iterable[Event]]:
        """A message that nobody wants, and the events of what was held back."""


def load() -> None:
    """Import what is needed: not on the event loop."""
    import transformers.utils.chat_parsing  # noqa: F401


def compiled(fields: Fields) -> Any:
    """A template for `scanner`."""
    from transformers.utils.chat_parsing.response_templates import load_response_template

    # The anchor would find the reply in a whole conversation; here it is all there is.
    return load_response_template({"start_anchor": "\0", "fields": fields})


def scanner(template: Any) -> Scanner:
    """A fresh scanner for one reply."""
    from transformers.utils.chat_parsing import ResponseParser

    made: Scanner = ResponseParser(template, prefix="")
    return made
