"""Models that think between tags, and call no tools in a way known here; and models that do neither."""

from __future__ import annotations

from slipstream.server.openai.formats.format import Format

PLAIN = Format(name="plain", signs=("</think>",), reasoning=("<think>", "</think>"))
NONE = Format(name="none")
