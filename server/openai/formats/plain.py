"""The formats of models whose tool calls cannot be read: PLAIN for those that think between tags, NONE for the rest."""

from __future__ import annotations

from slipstream.server.openai.formats.format import Format

PLAIN = Format(name="plain", signs=("</think>",), reasoning=("<think>", "</think>"))
NONE = Format(name="none")
