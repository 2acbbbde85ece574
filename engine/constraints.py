"""What a request may hold its reply to: plain data, which the engine makes constraints of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

# How JSON is written under a grammar (llguidance's options): as models write it by themselves, and with no other white
# space, so that names and punctuation are forced and cost next to nothing.
JSON_STYLE: Mapping[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the reply must be, from its first character to its last.

    `reasoning`: markers of a thinking part that may come before and is free; the grammar begins behind its end.
    """

    kind: Literal["json_schema", "regex", "lark"]
    source: str  # a JSON schema as JSON text, a regular expression, or a grammar in llguidance's Lark dialect
    reasoning: tuple[str, str] | None = None  # as in ("<think>", "</think>")
    param: str = "response_format"  # the request field that errors name


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """The most tokens that the thinking a reply begins with may have; then its end is all that may come."""

    n_tokens: int
    markers: tuple[str, str]  # of the thinking, as in ("<think>", "</think>")
    message: str = ""  # comes before the end
