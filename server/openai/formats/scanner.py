"""Finds the markers in a reply, by transformers' `ResponseParser`, which takes them as a declarative template.

The templates here declare everything between markers as text, so that it never refuses a reply. No other module of the
server imports transformers: that takes a second, but does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

Event = Mapping[str, Any]  # type (OPENS, CHUNK or CLOSES), field, and a chunk's text
Fields = Mapping[str, Mapping[str, Any]]  # markers of each field; the field without markers is all the rest

OPENS, CHUNK, CLOSES = "region_open", "region_chunk", "region_close"
AT_ONCE = ""  # a `close_pattern`: the field is a marker that holds nothing


class Scanner(Protocol):
    def feed(self, text: str) -> Iterable[Event]: ...

    def finalize(self) -> tuple[Any, Iterable[Event]]:
        """A message, which is not used here, and the events of the text that was held back."""


def load() -> None:
    """Import the parts of transformers that are needed. It takes a second: call it off the event loop."""
    import transformers.utils.chat_parsing  # noqa: F401


def compiled(fields: Fields) -> Any:
    """A template for `scanner`, from the markers of its fields."""
    from transformers.utils.chat_parsing.response_templates import load_response_template

    # The anchor is for finding a reply within a whole conversation; here the text is nothing but the reply.
    return load_response_template({"start_anchor": "\0", "fields": fields})


def scanner(template: Any) -> Scanner:
    """A fresh scanner for a reply."""
    from transformers.utils.chat_parsing import ResponseParser

    made: Scanner = ResponseParser(template, prefix="")
    return made
