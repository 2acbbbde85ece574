"""The list of formats, and the choice of a model's format: by its chat template, unless `--chat-format` names it.

A template that has no place for tools, or whose calls cannot be read, makes the format `generic`.
"""

from __future__ import annotations

from dataclasses import replace

from slipstream.engine.api import ModelInfo
from slipstream.server.openai.formats.deepseek import DEEPSEEK, DEEPSEEK_V31
from slipstream.server.openai.formats.format import Format
from slipstream.server.openai.formats.generic import GENERIC
from slipstream.server.openai.formats.glm import GLM
from slipstream.server.openai.formats.harmony import HARMONY
from slipstream.server.openai.formats.hermes import HERMES
from slipstream.server.openai.formats.llama3 import LLAMA3
from slipstream.server.openai.formats.mistral import MISTRAL, MISTRAL_LIST
from slipstream.server.openai.formats.plain import NONE, PLAIN
from slipstream.server.openai.formats.qwen3_coder import QWEN3_CODER
from slipstream.server.openai.formats.renderings import Renderings

# In this order: the first format that a chat template fits is chosen. NONE fits every template.
FORMATS: tuple[Format, ...] = (
    HARMONY,
    DEEPSEEK,
    DEEPSEEK_V31,
    MISTRAL,
    MISTRAL_LIST,
    GLM,
    QWEN3_CODER,
    HERMES,
    LLAMA3,
    PLAIN,
    NONE,
)
BY_NAME = {one.name: one for one in (*FORMATS, GENERIC)}


def format_of(info: ModelInfo, chosen: str, seen: Renderings) -> Format:
    """The model's format. `chosen`: `--chat-format`, a format's name or auto; `seen`: of the model's template.

    It comes without `reasoning` if neither the model's template nor its tokens have the marker that closes thinking.
    """
    template = (info.chat_template or "") + (info.tool_template or "")
    found = BY_NAME[chosen] if chosen in BY_NAME else next(one for one in FORMATS if _has(one, template))
    if chosen not in BY_NAME and template and not (can_call(found) and has_tools(info, seen)):
        found = GENERIC
    if found.reasoning and not (found.reasoning[1] in template or found.reasoning[1] in info.added_tokens):
        return replace(found, reasoning=None)
    return found


def can_call(one: Format) -> bool:
    """Whether calls in this format can be read."""
    return one.calls is not None or one.channels


def has_tools(info: ModelInfo, seen: Renderings) -> bool:
    """Whether the model's template has a place for tools."""
    if seen.has_tools is None:
        return "tools" in (info.chat_template or "") or info.tool_template is not None
    return seen.has_tools


def _has(one: Format, template: str) -> bool:
    return all(sign in template for sign in one.signs) and not any(sign in template for sign in one.others)
